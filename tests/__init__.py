"""The tests by kind, one folder each; what several kinds share lies beside this file.

Within the tests the master's state runs from its sources, where it can be subclassed, patched and
stepped through. What is compiled of them runs in every real master, and in
``tests/unit/master/test_compiled.py``, which runs tests again with ``STATE_COMPILED`` set.
"""

import os

from kvstore.master import state
from kvstore.native.compiled import prefer_sources

if "STATE_COMPILED" not in os.environ:
    prefer_sources(state.__path__[0])

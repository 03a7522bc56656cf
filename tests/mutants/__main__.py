"""``python -m tests.mutants``: see ``tests.mutants.run``."""

import sys

from tests.mutants.run import main

sys.exit(main())

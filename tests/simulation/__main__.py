"""``python -m tests.simulation``: see ``tests.simulation.run``."""

import sys

from tests.simulation.run import main

sys.exit(main())

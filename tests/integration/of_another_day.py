"""A ``kvstore-master`` whose clock shows another time: ``OFFSET_MS`` in the environment."""

from __future__ import annotations

import os

from kvstore.cli import master
from kvstore.master import main

OFFSET_MS = int(os.environ["OFFSET_MS"])
true_clock_ms = main.wall_clock_ms
main.wall_clock_ms = lambda: true_clock_ms() + OFFSET_MS

if __name__ == "__main__":
    master.main()

"""Which processes may see the same shared memory.

``host_id()`` is what a node announces and a client compares before it tries to map a segment. It is
a hint that saves a futile attempt, not a proof: whether a segment is really there is settled by the
uuid in its superblock (``kvstore.memory.segment.Mapping``).
"""

from __future__ import annotations

import os
import uuid
from functools import cache

from kvstore.memory.segment import SHM_DIRECTORY


@cache
def host_id() -> str:
    """Equal in two processes when they run under one kernel and one mount of ``/dev/shm``.

    The boot id names the running kernel (host names repeat, and containers invent their own); the
    device number tells apart containers that have a ``/dev/shm`` of their own. Where either cannot
    be read the answer is unique to this process, so that it is served by tcp.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot}-{os.stat(SHM_DIRECTORY).st_dev:x}"
    except OSError:
        return f"unknown-{uuid.uuid4()}"

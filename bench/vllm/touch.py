"""Write all of Mooncake's memory: ``python -m bench.vllm.touch CONFIG MIB``.

Fails if most of it cannot be written within half a minute.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

PIECE = 1 << 20
BUFFER = 64 << 20
WAIT_SECONDS = 30.0
FULL = 0.85
"""The part of the memory that is written; above 0.95 Mooncake begins to evict."""


def main(config: str, memory_mib: str) -> None:
    import numpy as np

    settings: dict[str, Any] = json.loads(Path(config).read_text())
    mooncake: Any = importlib.import_module("mooncake.store")  # exists only if it is installed
    store = mooncake.MooncakeDistributedStore()
    master = settings["master_server_address"]
    failed = store.setup("127.0.0.1", "P2PHANDSHAKE", 0, BUFFER, "tcp", "", master)
    if failed:
        raise SystemExit(f"Mooncake's client cannot be set up: {failed}")
    piece = np.full(PIECE, 1, dtype=np.uint8)
    store.register_buffer(piece.ctypes.data, PIECE)
    keys = [f"touch-{number}" for number in range(int(int(memory_mib) * FULL))]
    deadline = time.monotonic() + WAIT_SECONDS
    for key in keys:
        while failed := store.put_from(key, piece.ctypes.data, PIECE):
            if time.monotonic() > deadline:
                raise SystemExit(f"Mooncake does not take {key}: {failed}")
            time.sleep(0.1)
    for key in keys:
        store.remove(key, True)
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

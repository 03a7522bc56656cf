"""A directory whose files are on a faulty disk, for processes that are started with ``prefix``."""

from __future__ import annotations

import mmap
import struct
import subprocess
from pathlib import Path
from typing import Final

from tests.support.programs import need_program

SOURCE: Final = Path(__file__).with_suffix(".c")
FIELDS: Final = (
    "reads_fail", "writes_fail", "syncs_fail", "halves", "bytes_per_s", "reads", "writes", "syncs",
)  # fmt: skip
"""Of ``struct control``: faults, and counts of calls."""


class FaultyDisk:
    """Files below ``files``. ``set`` changes the faults of running processes."""

    def __init__(self, directory: Path) -> None:
        compiler = need_program("cc", "gcc")
        self.files = directory / "disk"
        self.files.mkdir()
        library, control = directory / "faulty_disk.so", directory / "control"
        flags = "-shared", "-fPIC", "-O1", "-Wall", "-pthread"
        subprocess.run([compiler, *flags, "-o", library, SOURCE], check=True)
        control.write_bytes(bytes(8 * len(FIELDS)))
        with control.open("r+b") as file:
            self._control = mmap.mmap(file.fileno(), 8 * len(FIELDS))
        self.prefix = [
            "env", f"LD_PRELOAD={library}", f"FAULTY_DISK={control}",
            f"FAULTY_DISK_FILES={self.files}/",
        ]  # fmt: skip

    def set(self, **faults: int) -> None:
        """``reads_fail``, ``writes_fail``, ``syncs_fail``: with EIO. ``halves``: reads and writes
        move half of their bytes. ``bytes_per_s``: of the disk; 0: its own rate."""
        for name, value in faults.items():
            struct.pack_into("<q", self._control, 8 * FIELDS.index(name), value)

    def close(self) -> None:
        self._control.close()

    def count(self, name: str) -> int:
        """Calls so far: ``reads``, ``writes`` or ``syncs``."""
        number: int = struct.unpack_from("<q", self._control, 8 * FIELDS.index(name))[0]
        return number

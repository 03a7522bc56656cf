"""A client's attachment to a segment: one mapping to copy with, one for programs to read."""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.memory.header import SUPERBLOCK_BYTES
from kvstore.memory.mapping import Mapping, any_shown
from kvstore.memory.segment import OwnedSegment
from kvstore.memory.shm_entries import SHM_PREFIX
from kvstore.runtime.host import SHM_DIRECTORY
from tests.support.processes import run_python

MIB = 1 << 20
AT = SUPERBLOCK_BYTES


@pytest.fixture
def segment() -> Iterator[OwnedSegment]:
    segment = OwnedSegment.create(f"mapping-{secrets.token_hex(4)}", 4 * MIB)
    yield segment
    segment.close()


@contextlib.contextmanager
def attached(segment: OwnedSegment) -> Iterator[Mapping]:
    mapping = Mapping.attach(SHM_PREFIX + segment.node, segment.uuid)
    yield mapping
    mapping.close()


def ways(segment: OwnedSegment) -> list[str]:
    """How the segment is mapped in this process, apart from the owner's own mapping."""
    with open("/proc/self/maps") as maps:
        found = [line.split()[1] for line in maps if f"{SHM_PREFIX}{segment.node}" in line]
    found.remove("rw-s")
    return found


def test_what_is_shown_is_the_same_memory_mapped_when_it_is_asked_for(
    segment: OwnedSegment,
) -> None:
    with attached(segment) as mapping:
        assert ways(segment) == ["rw-s"]
        shown = mapping.readonly_view()
        assert shown is not None
        assert mapping.readonly_view() is shown
        assert sorted(ways(segment)) == ["r--s", "rw-s"]
        segment.memory[AT : AT + 3] = b"abc"
        assert bytes(shown[AT : AT + 3]) == b"abc"
        assert (len(shown), shown.readonly) == (segment.size, False)
        assert np.frombuffer(shown, np.uint8).flags.writeable, "torch takes no other"
        del shown


def test_it_is_unmapped_with_the_last_thing_made_of_it(segment: OwnedSegment) -> None:
    mapping = Mapping.attach(SHM_PREFIX + segment.node, segment.uuid)
    shown = mapping.readonly_view()
    assert shown is not None
    view = np.frombuffer(shown, np.uint8, 10, AT)[2:]
    mapping.close()
    del mapping, shown
    gc.collect()
    assert ways(segment) == ["r--s"]
    assert view.sum() == 0
    del view
    gc.collect()
    assert ways(segment) == []
    assert not any_shown([memoryview(bytearray(10))])


@pytest.mark.parametrize(
    "write",
    ["memory[5000] = 1", "np.frombuffer(memory, np.uint8)[5000:].fill(1)",
     "torch.from_numpy(np.frombuffer(memory, np.uint8))[5000:].mul_(0)"],
)  # fmt: skip
def test_a_write_ends_the_process_that_writes(segment: OwnedSegment, write: str) -> None:
    if "torch" in write:
        pytest.importorskip("torch")
    segment.memory[5000] = 7
    program = f"""
import numpy as np
{"import torch" if "torch" in write else ""}
from kvstore.memory.mapping import Mapping
mapping = Mapping.attach({SHM_PREFIX + segment.node!r}, bytes.fromhex({segment.uuid.hex()!r}))
memory = mapping.readonly_view()
assert memory[5000] == 7
print("writes", flush=True)
{write}
print("has written", flush=True)
"""
    done = run_python("-c", program)
    assert (done.returncode, done.stdout) == (-11, "writes\n")
    assert segment.memory[5000] == 7
    assert os.path.exists(f"{SHM_DIRECTORY}/{SHM_PREFIX}{segment.node}")

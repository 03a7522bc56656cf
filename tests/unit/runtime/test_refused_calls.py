"""What the kernel, its limits or a sandbox refuse is named, or done without."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from kvstore import Client
from kvstore.errors import StartupError
from kvstore.memory import pages
from kvstore.runtime.refused_calls import check_threads, refused_call
from kvstore.security.credentials import Credentials
from tests.support.certificates import Identities


def test_a_client_that_may_not_start_threads_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    check_threads.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(StartupError, match="a thread") as caught:
            Client("127.0.0.1:1")
    assert "pids.max" in caught.value.advice


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_a_refused_call_is_named_or_done_without(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> int:
        ctypes.set_errno(number)
        return -1

    try:
        raise OSError(number, "no")
    except OSError as error:
        named = refused_call(error)
    assert named is not None
    assert 'raise OSError(number, "no")' in named.message
    assert "seccomp" in named.advice

    monkeypatch.setattr(pages, "_function", lambda _: refuse)
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        pages.prefer_huge(memory)
        assert not pages.populate(memory, 0, mmap.PAGESIZE, pages.POPULATE_WRITE)


def test_a_certificate_loads_where_memfd_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.ENOSYS, "no")

    file = Identities(tmp_path).file("m", "master")
    monkeypatch.setattr(os, "memfd_create", refuse)
    Credentials(file)

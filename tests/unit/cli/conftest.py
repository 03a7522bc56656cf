"""The command ``kvstore`` in this process, against the client of the file's ``store``."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from kvstore.cli.main import cli
from kvstore.cli.options import run


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


KV = Callable[..., Result]


@pytest.fixture
def kv(store: Any, capfdbinary: pytest.CaptureFixture[bytes]) -> KV:
    """Runs ``kvstore`` with these arguments, in this process."""

    def call(*arguments: str) -> Result:
        capfdbinary.readouterr()
        with pytest.raises(SystemExit) as ended:
            run(cli, "kvstore", arguments)
        out, err = capfdbinary.readouterr()
        assert isinstance(ended.value.code, int)
        return Result(ended.value.code, out.decode(errors="surrogateescape"), err.decode())

    return call

"""The access control of a master without certificates."""

from __future__ import annotations

import sys
from types import FrameType

from kvstore import calls
from kvstore.limits import Key, Namespace
from kvstore.master import open_access
from kvstore.master.authorizer import Authorizer
from kvstore.master.open_access import OpenAccess
from kvstore.master.state.traffic import Caller
from tests.unit.wire.test_request_chunking import service_with

SPACE, KEY = Namespace("n"), Key(b"k")


def test_a_call_passes_no_access_control() -> None:
    service = service_with(1)
    entered: list[str] = []

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            entered.append(frame.f_code.co_filename)

    caller = Caller("c")
    for request in (
        calls.Lookup(SPACE, [KEY]),
        calls.PutStart(SPACE, [KEY], [1], None, False, 1, False, 0, "h"),
    ):
        sys.setprofile(count)
        try:
            service.call(request, caller)
        finally:
            sys.setprofile(None)
    assert entered
    assert not any("authorizer" in each or "permissions" in each for each in entered)
    assert open_access.__file__ not in entered


def test_both_kinds_of_access_have_the_same_methods() -> None:
    methods = {name for name in vars(OpenAccess) if not name.startswith("_")}
    methods -= {"refused", "scheduler", "lane_tls", "node_tls"}  # set by the constructor
    assert methods <= vars(Authorizer).keys()

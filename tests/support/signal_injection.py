"""Raises in the main thread wherever CPython runs signal handlers, one place after the other.

CPython looks for signals after each call, at the end of each turn of a loop, and at the beginning
of each function, and nowhere else. A Ctrl-C that a program catches, a time-out by SIGALRM or a
SIGTERM handler that calls ``sys.exit`` raise there. A timer hits one of these places by chance;
``cut`` hits the one that it is told.
"""

from __future__ import annotations

import dis
import gc
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

LOOKS_AFTER = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD"}


class InjectedInterrupt(BaseException):
    """What the handler raises."""


_handlers: dict[CodeType, dict[int, tuple[bool, int | None]]] = {}
_begins: set[tuple[CodeType, int]] = set()
"""Where functions begin, and generators go on: what an error ends looks for no signals."""


def _of(code: CodeType) -> dict[int, tuple[bool, int | None]]:
    """Of each instruction: whether signals are looked for after it, and where errors go."""
    known = _handlers.get(code)
    if known is None:
        _begins.update(
            (code, each.offset) for each in dis.get_instructions(code) if each.opname == "RESUME"
        )
        table = dis._parse_exception_table(code)  # type: ignore[attr-defined]
        known = _handlers[code] = {
            each.offset: (
                each.opname in LOOKS_AFTER,
                next((e.target for e in table if e.start <= each.offset < e.end), None),
            )
            for each in dis.get_instructions(code)
        }
    return known


def cut(work: Callable[[], object], place: int) -> str:
    """Runs ``work`` and raises at the ``place``-th place, from 0; where that was, or empty if the
    work has ended before. What ``work`` itself raises is raised."""
    left = place
    where = ""

    def look(frame: FrameType) -> None:
        nonlocal left, where
        left -= 1
        if left < 0 and not where:
            where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"
            sys.settrace(None)
            raise InjectedInterrupt

    def called(frame: FrameType, event: str, arg: object) -> Any:
        del event, arg
        if frame.f_code.co_filename == __file__:
            return None
        frame.f_trace_lines = False
        frame.f_trace_opcodes = True
        instructions = _of(frame.f_code)
        if (frame.f_code, frame.f_lasti) in _begins:
            look(frame)
        before: tuple[bool, int | None] = (False, None)

        def step(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal before
            del arg
            if event == "opcode" and not where:
                here = instructions.get(frame.f_lasti, (False, None))
                # An error after the last instruction of a block goes where that instruction's
                # does, which cannot be shown from here if the next one is outside of the block.
                if before[0] and before[1] == here[1]:
                    look(frame)
                before = here
            return step

        return step

    earlier, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # it calls functions of others (Hypothesis has one), where an error reaches nobody
    try:
        sys.settrace(called)
        work()
    except InjectedInterrupt:
        pass
    finally:
        sys.settrace(earlier)
        if collects:
            gc.enable()
    return where

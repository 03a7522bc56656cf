"""Log lines as JSON objects (``--log-format json``)."""

from __future__ import annotations

import logging
import math
import re
from typing import Any, Final

from pythonjsonlogger.json import JsonFormatter as BaseJsonFormatter

from kvstore.runtime.log_lines import PIECE_BYTES_MAX, TEXT_MAX, time_text


class JsonFormatter(BaseJsonFormatter):
    """Writes one JSON object per record: ``time``, ``level``, ``logger``, ``event``, each
    ``key=value`` of the line as a key, and the line as ``message``."""

    def add_fields(
        self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]
    ) -> None:
        """As ``BaseJsonFormatter``."""
        fields = fields_of(record)
        event = fields.pop("event", _event(str(record.msg), record.message))
        log_data["time"] = time_text(record)
        log_data["level"] = record.levelname.lower()
        log_data["logger"] = record.name
        if event:
            log_data["event"] = event
        for name, value in fields.items():
            log_data.setdefault(name, value)
        log_data["message"] = record.message
        if left_out := getattr(record, "left_out", 0):
            log_data["left_out"] = left_out
        if "exc_info" in message_dict:
            log_data["exception"] = message_dict["exc_info"]

    def jsonify_log_record(self, log_data: dict[str, Any]) -> str:
        """As ``BaseJsonFormatter``. Texts of an overlong line are truncated."""
        text_max = TEXT_MAX
        while len(line := super().jsonify_log_record(_cut(log_data, text_max))) >= PIECE_BYTES_MAX:
            text_max //= 4
        return line


def _event(form: str, message: str) -> str:
    """Return the event at the beginning of a line; empty: it is a sentence."""
    first, *others = form.split(maxsplit=2)[:2] or [""]
    is_event = first.endswith(":") or "=" in (others or ["="])[0]
    return message.partition(" ")[0].rstrip(":") if is_event else ""


def _cut(fields: dict[str, Any], text_max: int) -> dict[str, Any]:
    return {
        name: value[:text_max] if isinstance(value, str) else value
        for name, value in fields.items()
    }


_CONVERSION: Final = re.compile(r"%[-#0 +]*\d*(?:\.\d+)?([a-zA-Z%])")


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """Return the ``key=value`` pairs of a line from its format and arguments, so that text of a
    peer cannot add one. Numbers stay numbers."""
    arguments: list[object] = list(record.args) if isinstance(record.args, tuple) else []
    found: dict[str, object] = {}
    at = 0
    for word in str(record.msg).split():
        kinds = [kind for kind in _CONVERSION.findall(word) if kind != "%"]
        own = arguments[at : at + len(kinds)]
        at += len(kinds)
        key, equals, shape = word.partition("=")
        if not equals or not key.isidentifier() or len(own) < len(kinds):
            continue
        shape = shape.rstrip(":,;")
        is_one = kinds and _CONVERSION.fullmatch(shape)
        found[key] = (
            _value(shape, own[0]) if is_one else shape % tuple(own) if record.args else shape
        )
    return found


def _value(shape: str, argument: object) -> object:
    """Return the JSON value of an argument."""
    if isinstance(argument, bool | str):
        return argument
    if isinstance(argument, int | float) and math.isfinite(argument):
        text = shape % argument
        return argument if shape[-1] in "sr" else float(text) if shape[-1] in "feg" else argument
    return shape % (argument,)

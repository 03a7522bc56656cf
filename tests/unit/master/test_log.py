"""What gRPC logs about clients that are gone is no news."""

from __future__ import annotations

import asyncio
import logging

import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from kvstore.master.app import _is_news

# gRPC's stubs do not know it.
NO_RECEIVER = vars(cygrpc)["ExecuteBatchError"]


def record_of(error: BaseException | None) -> logging.LogRecord:
    about = (type(error), error, None) if error is not None else None
    return logging.LogRecord("grpc", logging.ERROR, "", 0, "raised in a method", None, about)


@pytest.mark.parametrize(
    ("error", "news"),
    [
        (None, True),
        (ValueError("a bug of ours"), True),
        (NO_RECEIVER("Failed"), False),
    ],
)
def test_only_what_is_news_is_logged(error: BaseException | None, news: bool) -> None:
    assert _is_news(record_of(error)) is news


def test_a_cancelled_call_prints_nothing() -> None:
    """gRPC goes on to print the traceback by itself; that the filter raises is what prevents it."""
    logger = logging.getLogger("test of a cancelled call")
    logger.addFilter(_is_news)
    try:
        raise asyncio.CancelledError
    except asyncio.CancelledError:
        with pytest.raises(asyncio.CancelledError):
            logger.exception("Exception not handled by _handle_exceptions")

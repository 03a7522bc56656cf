"""Logging of our processes: one line per event, ``key=value``, to stderr."""

from __future__ import annotations

import logging


def configure(level: str) -> None:
    """For processes of ours only; a library leaves this to its program.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
    """
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s.%(msecs)03d %(levelname).1s %(name)s %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )

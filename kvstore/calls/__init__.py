"""Calls to a master as plain values: each call has a request type and a reply type.

Only ``kvstore.wire.messages`` knows their protobuf form, which ``proto/generate.py`` generates from
them. Annotations limit the values that are accepted from peers
(``kvstore.calls.field_constraints``). Batches are columns with one entry per key, because a row
object per key would cost more than the call. The receiver of a list must not change it.

Times are ``*_ms`` durations, so that no clocks are compared. Exception: a node reports its clock,
and the master writes the expiry of capabilities in that clock.

Import the names from here.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from kvstore.calls.clients import *  # noqa: F403  # all public names; the same below
from kvstore.calls.clients import ClientRequest
from kvstore.calls.locations import *  # noqa: F403
from kvstore.calls.nodes import *  # noqa: F403
from kvstore.calls.operators import *  # noqa: F403
from kvstore.calls.operators import OperatorRequest
from kvstore.calls.usage import *  # noqa: F403
from kvstore.calls.usage import UsageRequest

Request = ClientRequest | OperatorRequest | UsageRequest
Reply: TypeAlias = tuple[Any, ...]
"""A NamedTuple; ``kvstore.wire.messages.CALLS`` maps requests to replies."""

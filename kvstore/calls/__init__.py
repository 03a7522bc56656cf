"""The calls to a master, as plain values: each call has a request type and a reply type.

The client's flows yield these requests, the master's handlers take them and answer with these
replies, the simulator passes them by hand, and ``kvstore.wire.messages`` is the one place that
knows their protobuf form, which is made of them (``proto/generate.py``). An annotation says what a
field may hold when it comes from a stranger (``kvstore.calls.field_constraints``). Batches are
columns, one entry per key, because a row object per key would cost more than the call. All values
are immutable by agreement: the receiver of a list does not change it.

Times are ``*_ms`` durations and not points in time: no two clocks are compared. The one exception
is the clock that a node tells its master, in which the master writes when capabilities end.

Import the names from here; the modules are for readers.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from kvstore.calls.clients import *  # noqa: F403  # all that it has, and so below
from kvstore.calls.clients import ClientRequest
from kvstore.calls.locations import *  # noqa: F403
from kvstore.calls.nodes import *  # noqa: F403
from kvstore.calls.operators import *  # noqa: F403
from kvstore.calls.operators import OperatorRequest
from kvstore.calls.usage import *  # noqa: F403
from kvstore.calls.usage import UsageRequest

Request = ClientRequest | OperatorRequest | UsageRequest
Reply: TypeAlias = tuple[Any, ...]
"""A NamedTuple: ``kvstore.wire.messages.CALLS`` says which one replies to a request."""

"""Transport over Mooncake's transfer engine: RDMA where there is a card, TCP to test it without.

``engine`` loads the optional package and wraps one engine, ``server`` is a node's end,
``transport`` a client's, ``probe`` says what of it is there. Importing any of them imports no
engine: that costs 150 ms and needs system libraries, and happens when the first engine is made.
"""

from kvstore.transport.mooncake.probe import Finding, probe

__all__ = ["Finding", "probe"]

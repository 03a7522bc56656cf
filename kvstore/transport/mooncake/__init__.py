"""Transport over Mooncake's transfer engine: RDMA where there is a card, TCP to test it without.

``engine`` loads the optional package and wraps one engine, ``server`` is a node's end,
``transport`` a client's, ``probe`` reports which parts are installed. Importing these modules does
not import the engine, which takes 150 ms and needs system libraries: its first use does.
"""

from kvstore.transport.mooncake.probe import ProbeFinding, probe

__all__ = ["ProbeFinding", "probe"]

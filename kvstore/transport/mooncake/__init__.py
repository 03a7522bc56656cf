"""Transport over Mooncake's transfer engine: RDMA, or TCP for tests.

``engine`` wraps the optional package, ``server`` is the node's end, ``transport`` the client's,
``probe`` reports the installed parts. The engine is imported at its first use, because that takes
150 ms and needs system libraries.
"""

from kvstore.transport.mooncake.probe import ProbeFinding, probe

__all__ = ["ProbeFinding", "probe"]

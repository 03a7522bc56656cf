"""Transport over Mooncake's transfer engine: RDMA, or TCP for tests.

The engine is imported at its first use, which takes 150 ms and needs system libraries.
"""

from kvstore.transport.mooncake.probe import ProbeFinding, probe

__all__ = ["ProbeFinding", "probe"]

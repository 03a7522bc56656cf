"""The background work that is due: a part that gets work says so here, in the call that made it.

Each kind of work is a bit, the most urgent the lowest. ``MasterState.work`` does a slice (a few
milliseconds) of the first that is due, and the part then says whether more is left.
"""

from __future__ import annotations

from typing import Final

SERVE: Final = 1 << 0  # puts wait, and room was made since they were last tried
FREE: Final = 1 << 1  # more removed bytes may be free now than one step frees
EXPIRE: Final = 1 << 2  # more lifetimes or pins may be over than one step handles
CLAIM: Final = 1 << 3  # claims of an inventory are to be taken in
ANSWER: Final = 1 << 4  # questions waited for an inventory that is complete, or long enough
EVICT: Final = 1 << 5  # full segments have less than half of their reserve free
SETTLE: Final = 1 << 6  # records are left that nothing may need any more
SWEEP: Final = 1 << 7  # a segment died, or a chain broke, since all candidates were looked at
DRAW: Final = 1 << 8  # operators wait for chains
SCAN: Final = 1 << 9  # a pass over all objects looks for missing replicas
MOVE: Final = 1 << 10  # namespaces may belong to other tenants since the rules changed
RELEASE: Final = 1 << 11  # leases have ended whose objects still count them


class BackgroundJobs:
    """See the module."""

    def __init__(self) -> None:
        self.due = 0

    def note(self, job: int, is_due: bool) -> None:
        self.due = self.due | job if is_due else self.due & ~job

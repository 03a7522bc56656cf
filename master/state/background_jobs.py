"""Bits of the background work that is due, the most urgent one lowest.

A part sets its bit when work arises. ``MasterState.work`` runs a slice (a few milliseconds) of the
most urgent job, which then notes whether more is left.
"""

from __future__ import annotations

from typing import Final

SERVE: Final = 1 << 0  # puts wait, and space was freed since they were last tried
FREE: Final = 1 << 1  # more removed bytes may be free than one step frees
EXPIRE: Final = 1 << 2  # more objects or pins may have expired than one step handles
CLAIM: Final = 1 << 3  # claims of an inventory are waiting
ANSWER: Final = 1 << 4  # queries waited for an inventory that is complete, or for too long
EVICT: Final = 1 << 5  # full segments have less than half of their reserve free
DELETE_UNUSED: Final = 1 << 6  # records may be unused
SWEEP: Final = 1 << 7  # a segment died or a chain broke since all candidates were checked
DRAW: Final = 1 << 8  # operators wait for chains
SCAN: Final = 1 << 9  # a pass over all objects looks for missing replicas
MOVE: Final = 1 << 10  # namespaces may have changed tenants
RELEASE: Final = 1 << 11  # ended leases are still counted in their objects
BRING: Final = 1 << 12  # copies on disks are to be brought into memory
DISK: Final = 1 << 13  # disks are full, or have died


class BackgroundJobs:
    def __init__(self) -> None:
        self.due = 0

    def note(self, job: int, is_due: bool) -> None:
        self.due = self.due | job if is_due else self.due & ~job

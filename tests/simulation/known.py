"""Rules of the oracle that production code is known to break: README.md says how, and what to do.

Their violations are counted (``waived=`` in what ``python -m tests.simulation`` prints), not
raised, so that they hide nothing else. Whoever repairs one takes it out here.
"""

KNOWN_ISSUES = {
    "removed_twice_read": 2,
    "removed_read_from_dead": 3,
    "old_epoch_write": 4,
    "granted_lost_replica": 5,
    "granted_allocation": 6,
    "allocation_outlived": 6,
    "granted_committed": 7,
    "committed_rewritten": 7,
    "match_overcounts": 8,
}
"""Rule and number of the finding."""

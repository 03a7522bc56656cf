"""Leases, views and allocations: memory of the pool that a program uses directly."""

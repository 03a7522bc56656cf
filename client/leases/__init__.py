"""Memory of the pool that a program uses as its own: leases, views and allocations."""

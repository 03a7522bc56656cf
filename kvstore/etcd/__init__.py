"""A small client of etcd: what an election needs, and where the master is by it."""

"""A small client of etcd: the calls of an election, and the search for its leader."""

"""A small client of etcd: the calls by which masters elect a leader, and the search for it."""

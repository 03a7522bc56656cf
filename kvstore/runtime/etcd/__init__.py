"""A small etcd client for leader election and leader lookup."""

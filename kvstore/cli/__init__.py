"""The commands kvstore, kvstore-master, kvstore-node and kvstore-proxy."""

"""The commands: kvstore, kvstore-master, kvstore-node."""

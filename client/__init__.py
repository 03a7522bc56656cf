"""The client: what a program calls. See ``kvstore.client.sync`` and ``kvstore.client.aio``."""

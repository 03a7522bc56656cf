"""The client, a program's interface to the store. See ``kvstore.client.client`` and ``aio``."""

"""The client, a program's interface to the store: ``kvstore.client.client`` and ``aio``."""

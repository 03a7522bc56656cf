"""A directory for ``PYTHONPATH``: see ``kvstore.connectors.mooncake_shim``."""

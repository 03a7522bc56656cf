"""A directory for ``PYTHONPATH``: see ``kvstore.mooncake_shim``."""

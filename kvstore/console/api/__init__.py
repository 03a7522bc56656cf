"""``/api/v1``: keys, nodes and prefixes, for programs."""

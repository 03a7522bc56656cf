"""``/api/v1``: objects, nodes and prefixes, for programs."""

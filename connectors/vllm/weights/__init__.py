"""The weights of an engine: their digests, and the fingerprint of its namespaces."""

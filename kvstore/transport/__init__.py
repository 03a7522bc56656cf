"""Transports: they copy ranges between a segment and a process; ``base`` is the interface."""

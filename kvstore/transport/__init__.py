"""Transports copy ranges between a segment and a process's memory; ``base`` is the interface."""

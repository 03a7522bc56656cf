"""Ranges of a segment to and from a process's memory; the interface is in ``base``."""

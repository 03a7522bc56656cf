"""Answers what more memory, another eviction policy or hints would bring, from a recorded trace."""

"""Connectors: translate an engine's life cycle into client calls."""

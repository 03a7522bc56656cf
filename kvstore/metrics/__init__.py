"""Metrics of masters, nodes, clients: a table of all families, and their text for Prometheus."""

"""Code shared by the connectors of all engines."""

"""Code that the connectors of all engines share."""

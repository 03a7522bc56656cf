"""What the connectors of all engines share."""

"""A node: a segment, its data server, and the agent that keeps it joined to the master."""

"""A node: a segment, its data server, its agent towards the master."""

"""The way to a master: one stub, its connections, and when a call is sent again."""

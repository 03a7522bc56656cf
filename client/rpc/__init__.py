"""Calls to a master: the stub, its connections, and when a call is sent again."""

"""Calls to a master: the stub, its connections and its retries."""

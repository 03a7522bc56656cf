"""The master: its pure ``state``, the shell around it, RPC servers and process."""

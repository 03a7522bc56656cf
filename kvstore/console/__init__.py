"""HTTP of a master for operators: health, metrics, the API, events, the dashboard, diagnostics.

A child process (aiohttp) serves it on a socket that the master has bound, so that no scrape and no
slow reader blocks the master's event loop. It queries the master over a private socket pair
(``kvstore.master.ipc_channel``) for what only that process knows, and otherwise as a client.
"""

"""What people look at: the dashboard, the HTTP API, events over HTTP, and the diagnostics.

    kvstore-master ──listening socket──► child: aiohttp ◄── probes, Prometheus
                   ◄──── requests ───── (``kvstore.master.ipc_channel``: a private socket pair)

HTTP is served by a child process, so that no scrape and no slow reader holds the loop of the
master. The child asks the master through the channel for what only that process knows, and for
everything else as a client.
"""

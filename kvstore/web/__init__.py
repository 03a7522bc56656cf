"""HTTP beside a process: a child that serves health, metrics and a dashboard of its parent.

    kvstore-master ──listening socket──► child: aiohttp ◄── probes, Prometheus
                   ◄──── questions ──── (``channel``: a private socket pair)

The child is a process of its own, so that no scrape and no slow reader holds the loop of its
parent. It asks for what only the parent knows through the channel, and for everything else as any
client of the master does.
"""

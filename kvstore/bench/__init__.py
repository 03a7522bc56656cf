"""What this store costs, measured: alone, beside Mooncake Store, and as the work grows.

* ``python -m kvstore.bench`` (``make bench``): every row of ``rows`` on both systems, in turn
* ``python -m kvstore.bench.growth`` (``make bench-growth``): more clients, objects, blocks
* ``kvstore bench``: this store alone, one row per kind of work

How it is made: a ``Driver`` (``driver``; ``ours`` and ``mooncake`` are the two) prepares one
system's calls, a ``Session`` (``session``) prepares what they need and times them, a ``worker`` is
a client process with a session in it, ``side_by_side`` makes rounds of two systems' workers,
``results`` is the arithmetic, ``report`` and ``picture`` are what people see.
"""

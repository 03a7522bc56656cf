"""Measures this store: alone, beside Mooncake Store, and as the work grows.

* ``python -m kvstore.bench`` (``make bench``): every row of ``rows`` on both systems, in turn
* ``python -m kvstore.bench --behind lmcache`` (``make bench-lmcache``): both as storage of LMCache
* ``python -m kvstore.bench --behind hicache`` (``make bench-hicache``): of SGLang's HiCache
* ``python -m kvstore.bench.growth`` (``make bench-growth``): more clients, objects, blocks
* ``python -m kvstore.bench.gpu`` (``make bench-gpu``): a GPU's way to this store, and plain copies
* ``kvstore bench``: this store alone, one row per kind of work

Structure: a ``Driver`` (``driver``; ``ours``, ``mooncake`` and ``lmcache`` implement it) prepares
one system's calls, a ``Session`` (``session``) prepares their keys and memory and times them, a
``worker`` is a client process with a session, ``side_by_side`` runs rounds of two systems' workers,
``results`` does the arithmetic, ``report`` and ``picture`` produce the output.
"""

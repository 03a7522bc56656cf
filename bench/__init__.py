"""Comparison of this store with others: ``make bench``. Runs from a checkout; not installed.

``tables`` has the rows and the systems, ``kvstore.bench`` the harness, each other module the driver
of a system: ``mooncake``, ``redis``, ``disk`` and ``vllm``.
"""

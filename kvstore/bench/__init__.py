"""The harness of ``kvstore bench`` and ``make bench``: one table of rows, one way to measure it.

A ``Row`` names a call, sizes, clients and busy loops, a ``Table`` the rows and the systems that are
paired (``rows``). ``harness`` starts the systems and their clients (``processes``, ``client``),
measures in turn, and makes a page (``page``). A ``Session`` prepares keys and memory and times the
calls (``timing``) that a ``StoreDriver`` makes; this store's driver is in ``ours``. The folder
``bench`` of a checkout has the tables and drivers of other systems.
"""

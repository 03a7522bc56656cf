"""The harness of ``kvstore bench`` and ``make bench``.

``rows``: the rows of a table, and the systems that it compares. ``harness`` starts the systems and
their clients (``processes``, ``client``), measures in turn, and makes a report (``page``). A
``Session`` prepares keys and memory and times the calls (``timing``) that a ``StoreDriver`` makes;
this store's is in ``kvstore_driver``. The folder ``bench`` of a checkout has the tables and drivers
of other systems.
"""

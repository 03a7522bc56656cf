"""What ``kvstore bench`` measures: this store, on this machine.

A *case* is a function that yields rows, each a dict as ``--json`` prints it, and a ``Sheet`` that
says how a table shows them (``cases``): ``own`` (each kind of call), ``verify`` (what checksums
cost), ``engine`` (beside the bare transfer engine), ``master`` (a master with many objects).

A ``Session`` prepares the keys and memory of a system's calls and times them (``timing``); a
``StoreDriver`` makes the calls (this store's is in ``ours``). The folder ``bench`` of a checkout
measures other systems with them, too.
"""

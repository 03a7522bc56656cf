"""One process reuses the KV cache that another one computed: ``python -m kvstore.demo``.

To see how an engine uses kvstore, read ``Engine.load`` and ``Engine.save`` in ``engine.py``: they
are the whole integration. The rest:

* ``scenario.py``: what the processes agree on; imports no large package
* ``model.py``: a small real decoder with random weights, and memory for its KV
* ``worker.py``: the two processes with an engine, a producer and a consumer
* ``processes.py``: child processes that are started, watched and always ended
* ``__main__.py``: the command: starts everything, prints what happened

Needs the extra ``demo`` (torch and transformers).
"""

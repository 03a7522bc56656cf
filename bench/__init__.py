"""Measures this store beside others, and as the work grows. Runs from a checkout; not installed.

* ``python -m bench`` (``make bench``): every row of ``rows`` on this store and on Mooncake Store,
  in turn; with ``--behind lmcache`` (``make bench-lmcache``) or ``--behind hicache``
  (``make bench-hicache``), both as storage of LMCache or of SGLang's HiCache; with
  ``--beside redis`` (``make bench-redis``), on this store and on Redis
* ``python -m bench.growth`` (``make bench-growth``): this store with more clients, objects, blocks
* ``python -m bench.gpu`` (``make bench-gpu``): saves from a GPU and loads to it, and plain copies
* ``python -m bench.vllm`` (``make bench-vllm``): vLLM without a store and with several
* ``python -m bench.serving`` (``make bench-serving``): two vLLM engines by ``vllm bench serve``,
  1P1D and behind a round robin, and by sessions that grow
* ``python -m bench.restarts``, ``bench.events``, ``bench.memory``, ``bench.capabilities``: a killed
  store, the cost of events, ways to allocate memory, the cost of capabilities
"""

"""vLLM engines that find each other's KV cache: ``python -m kvstore.demo_vllm``, and a benchmark.

* ``__main__.py``: the demonstration: starts everything, sends prompts, prints what happened
* ``scenario.py``: prompts, the outcome of each, and checks of it
* ``bench.py``: the benchmark ``python -m bench.vllm``
* ``systems.py``: what the benchmark compares: no store, this one, vLLM's built-in on Mooncake
* ``measure.py``: the benchmark's rounds, samples and ratios
* ``report.py``: the benchmark's tables and JSON
* ``touch_mooncake.py``: makes Mooncake's memory warm before it is measured
* ``servers.py``: how master, node, engines and proxy are started
* ``requests.py``: HTTP to an engine or the proxy, and the time to the first token
* ``tiny.py``: a random model, created locally; nothing is downloaded

Needs vLLM (its build for CPUs is enough) and the extra ``proxy``.
"""

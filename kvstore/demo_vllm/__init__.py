"""vLLM engines that find each other's KV cache: ``python -m kvstore.demo_vllm``.

* ``__main__.py``: the demonstration: starts everything, sends prompts, prints what happened
* ``scenario.py``: prompts, the outcome of each, and checks of it
* ``servers.py``: how master, node, engines and proxy are started
* ``requests.py``: HTTP to an engine or the proxy, and the time to the first token
* ``tiny.py``: a random model, created locally; nothing is downloaded

Needs vLLM (its build for CPUs is enough) and the extra ``proxy``.
"""

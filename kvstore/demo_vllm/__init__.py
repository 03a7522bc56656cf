"""A demonstration of two vLLM engines that share their KV cache: ``python -m kvstore.demo_vllm``.

* ``__main__.py``: the command: starts everything, sends prompts, prints what happened
* ``scenario.py``: the prompts, the outcome of each, and the checks of the outcomes
* ``servers.py``: starts master, node, engines and proxy
* ``requests.py``: HTTP to an engine or the proxy, and the time to the first token
* ``tiny.py``: creates a random model locally; nothing is downloaded

The demonstration needs vLLM (its build for CPUs is enough) and the extra ``proxy``.
"""

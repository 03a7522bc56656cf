"""``kvstore-proxy`` routes OpenAI requests to engines that share their KV cache in the store.

A *prefiller* computes the prompt and puts its KV blocks into the store; a *decoder* finds them
there by their hashes and answers. Engines are not paired. If the first hop fails, the decoder
computes the prompt itself.

The modules that decide are pure and take the time as an argument: ``affinity``, ``instances``,
``bodies`` and ``records``. The others do I/O, and call them.

The proxy has one event loop and one thread; no other thread may use it. This package needs the
extra ``proxy``; only ``kvstore.cli.proxy`` imports it.
"""

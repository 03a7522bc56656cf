"""``kvstore-proxy`` routes OpenAI requests to engines that share their KV cache in the store.

A request first goes to a *prefiller*, which computes the prompt and puts its KV blocks into the
store, and then to a *decoder*, which finds them there by their hashes and answers. Engines are not
paired with each other. The first hop is only an optimization: if it fails, the decoder computes the
prompt itself.

The modules that decide are pure and take the time as an argument: ``affinity``, ``instances``,
``bodies`` and ``records``. The others do I/O, and call them.

The proxy has one event loop and one thread; no other thread may use it. This package needs the
extra ``proxy``; only ``kvstore.cli.proxy`` imports it.
"""

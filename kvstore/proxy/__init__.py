"""``kvstore-proxy`` routes OpenAI requests to engines that share their KV cache in the store.

A request first goes to a *prefiller*, which computes the prompt and puts its KV blocks into the
store, and then to a *decoder*, which finds them there by their hashes and answers. Engines are not
paired with each other. The first hop is only an optimization: if it fails, the decoder computes the
prompt itself.

The modules that decide are pure and take the time as an argument: ``affinity`` and ``instances``
(which engine gets a request), ``bodies`` (what each hop is sent), ``records`` (the
store's keys of a prompt). The modules that do I/O call them: ``engine`` (HTTP to engines),
``lookup`` (the store), ``render`` (token ids), ``prefill`` and ``decode`` (the two hops),
``salts`` (whose cache a request uses), ``serving`` (one request), ``health``, ``admin``,
``metrics``, ``app`` (the process).

The proxy has one event loop and one thread; no other thread may use it. This package needs the
extra ``proxy``; only ``kvstore.cli.proxy`` imports it.
"""

"""``kvstore-proxy``: between OpenAI clients and engines that share their KV cache in the store.

A request first goes to a *prefiller*, which computes the prompt and puts its KV blocks into the
store, and then to a *decoder*, which finds them there by their hashes and answers. Nobody is paired
with anybody, and the first half is only an optimization: whatever goes wrong in it, the decoder can
compute the prompt itself.

What decides is pure, with time as an argument: ``breaker``, ``affinity``, ``instances`` (whom to
ask), ``bodies`` (what to send), ``hashes`` and ``records`` (what the store would call a prompt).
Around it: ``engine`` (HTTP towards engines), ``lookup`` (the store), ``prefill`` and ``decode``
(the two hops), ``render`` before them, ``serving`` (one request), ``health``, ``admin``,
``metrics``, ``app`` (the process).

One event loop, one thread; nothing here may be used from another. Nothing of this package is
imported without the extra ``kvstore[proxy]``, and only ``kvstore.cli.proxy`` imports it.
"""

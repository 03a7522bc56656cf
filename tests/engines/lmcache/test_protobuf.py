"""The protobuf that LMCache asks for, which is older than the newest that this store works with."""

from __future__ import annotations

import importlib.metadata

from packaging.requirements import Requirement

from kvstore.calls import PutOutcome
from tests.support.cluster import Cluster


def test_every_process_speaks_with_the_protobuf_that_lmcache_wants(store: Cluster) -> None:
    """Master and node run with the packages of this interpreter."""
    asked = map(Requirement, importlib.metadata.requires("lmcache") or ())
    [wanted] = [each.specifier for each in asked if each.name == "protobuf"]
    assert wanted.contains(importlib.metadata.version("protobuf"))
    for carrier in ({"lane": True}, {"lane": False}):
        client = store.client(transports="tcp", **carrier)
        chain = [bytes([number]) * 32 for number in range(4)]
        client.put_chain(chain, [b"x" * 4096] * 4, namespace="chain")
        assert client.match_prefix(chain, namespace="chain") == 4
        assert client.put("key", b"value", ttl=60) in (PutOutcome.STORED, PutOutcome.FOUND)
        assert client.get("key", kind="bytes") == b"value"
        assert client.lookup(["key", "none"]) == [5, None]
        assert client.pin(["key"], 60) == [True]
        assert [row.size for row in client.list_objects(prefix=b"key")] == [5]
        assert client.status().nodes[0].segments
        assert client.remove("key")
        assert client.get("key") is None

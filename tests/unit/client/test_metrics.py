"""A client's numbers in the registry of a program."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from kvstore.client.client import Client
from kvstore.client.metrics import ClientMetrics
from kvstore.http.families import CLIENT


def test_the_numbers_are_those_of_stats_at_the_scrape() -> None:
    registry = CollectorRegistry()
    with Client("127.0.0.1:1") as one, Client("127.0.0.1:1") as two:
        clients = {"one": one}
        registry.register(ClientMetrics(clients))
        assert registry.get_sample_value("kvstore_client_views", {"client": "one"}) == 0
        assert registry.get_sample_value("kvstore_client_epoch", {"client": "one"}) == 0
        one._state.context.count("stale_reads")
        one._state.movers.moved["shm"] = 7
        labels = {"client": "one", "event": "stale_reads"}
        assert registry.get_sample_value("kvstore_client_events_total", labels) == 1
        moved = {"client": "one", "transport": "shm"}
        assert registry.get_sample_value("kvstore_client_transfers_total", moved) == 7
        clients["two"] = two
        assert registry.get_sample_value("kvstore_client_placements", {"client": "two"}) == 0


def test_every_family_is_served_and_a_registry_takes_one_collector() -> None:
    registry = CollectorRegistry()
    registry.register(ClientMetrics({}))
    served = {family.name for family in registry.collect()}
    assert served == {family.name.removesuffix("_total") for family in CLIENT}
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(ClientMetrics({}))

"""Client statistics as Prometheus metrics in the program's own registry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvstore.client.async_client import AsyncClient
from kvstore.client.client import Client
from kvstore.http.exposition import Rows, metric
from kvstore.http.families import CLIENT


class ClientMetrics(Collector):
    """The numbers of ``Client.stats()`` at each scrape.

        prometheus_client.REGISTRY.register(ClientMetrics({"prefill": client}))

    A scrape makes no call. Any thread may scrape. The registry keeps the clients; ``unregister``
    this before they are closed and replaced.
    """

    def __init__(self, clients: Mapping[str, Client | AsyncClient]) -> None:
        """``clients``: by value of the label ``client``; read at each scrape."""
        self._clients = clients

    def describe(self) -> Iterator[Metric]:
        """Return the metric families, by which a registry rejects a second ``ClientMetrics``."""
        for family in CLIENT:
            yield metric(family, {})

    def collect(self) -> Iterator[Metric]:
        values: dict[str, Rows] = {family.name: {} for family in CLIENT}
        for name, client in dict(self._clients).items():
            stats = client.stats()
            for event, count in stats.counters.items():
                values["kvstore_client_events_total"][name, event] = count
            for transport, count in stats.transports.items():
                values["kvstore_client_transfers_total"][name, transport] = count
            values["kvstore_client_placements"][name,] = stats.placements
            values["kvstore_client_views"][name,] = stats.views
            values["kvstore_client_epoch"][name,] = stats.epoch
        for family in CLIENT:
            yield metric(family, values[family.name])

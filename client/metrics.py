"""What clients have done, as Prometheus metrics in a registry of the program's own."""

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

    A scrape makes no call, so it does not wait for the store. Any thread may scrape. The registry
    keeps the clients; ``unregister`` this before they are closed and replaced.
    """

    def __init__(self, clients: Mapping[str, Client | AsyncClient]) -> None:
        """
        Args:
            clients: each under the value of its label ``client``. A scrape shows those that are in
                the mapping then.
        """
        self._clients = clients

    def describe(self) -> Iterator[Metric]:
        """The metric families, by which a registry refuses a second ``ClientMetrics``."""
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

"""What a router does to keep Dynamo's radix tree in step with the events of a store."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgpack
from dynamo.llm import RadixTree

from tests.integration.test_events_zmq import Subscriber

WORKER = 7
"""Stands for the store: a pool that all engines reach."""


class Index:
    """The blocks of one topic, by the hashes that events carry.

    Dynamo's tree takes a block only below its parent, and loses what is below a block that goes.
    A store may hold such blocks, and after a restart it tells them in any order. So this keeps
    them aside until their parent is there.
    """

    def __init__(self) -> None:
        self._tree = RadixTree()
        self._parents: dict[int, int | None] = {}
        """Of every visible block."""
        self._children: defaultdict[int, set[int]] = defaultdict(set)
        self._inside: set[int] = set()
        """Blocks in Dynamo's tree."""
        self._numbers = itertools.count()

    def match(self, hashes: Sequence[int]) -> int:
        """How many leading blocks are in the store."""
        return int(self._tree.find_matches(list(hashes)).scores.get((WORKER, 0), 0))

    def apply(self, event: Mapping[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self._parents.clear()
            self._children.clear()
            self._inside.clear()
            self._tell("cleared")
        elif event["type"] == "BlockStored":
            (block,), parent = event["block_hashes"], event["parent_block_hash"]
            self._forget(block)
            self._parents[block] = parent
            if parent is not None:
                self._children[parent].add(block)
            if parent is None or parent in self._inside:
                self._insert(block)
        else:
            (block,) = event["block_hashes"]
            self._forget(block)

    def _insert(self, block: int) -> None:
        for each in self._below(block):
            parent = self._parents[each]
            stored = {"block_hash": each, "tokens_hash": each}
            self._tell({"stored": {"parent_hash": parent, "blocks": [stored]}})
            self._inside.add(each)

    def _forget(self, block: int) -> None:
        if block not in self._parents:
            return
        if block in self._inside:
            gone = list(self._below(block))
            self._tell({"removed": {"block_hashes": gone[::-1]}})
            self._inside.difference_update(gone)
        parent = self._parents.pop(block)
        if parent is not None:
            self._children[parent].discard(block)

    def _below(self, block: int) -> Iterator[int]:
        """The block and its descendants, parents first."""
        waiting = [block]
        while waiting:
            yield (each := waiting.pop())
            waiting += self._children.get(each, ())

    def _tell(self, data: object) -> None:
        event = {"event_id": next(self._numbers), "data": data, "dp_rank": 0}
        self._tree.apply_event(WORKER, json.dumps(event).encode())


class Router(Subscriber):
    """Reads one master's stream into an index."""

    def __init__(self, addresses: str, topic: str, index: Index) -> None:
        super().__init__(*addresses.split(","))
        self._topic = topic.encode()
        self._index = index

    def apply(self, topic: bytes, number: bytes, payload: bytes) -> None:
        super().apply(topic, number, payload)
        if topic == self._topic:
            for event in msgpack.unpackb(payload)[1]:
                self._index.apply(event)

    def lose(self) -> None:
        """The next batch."""
        assert self.socket.poll(10_000)
        self.socket.recv_multipart()

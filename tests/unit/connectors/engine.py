"""As much of vLLM's scheduler as the connector's half meets: requests, blocks, steps.

``Engine`` keeps block tables and reference counts as vLLM does, knows what bytes each block holds
(the key, once its tokens are computed), and checks every order that is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

from kvstore.config import ConnectorConfig
from kvstore.connectors.vllm.groups import NULL_BLOCK, Groups
from kvstore.connectors.vllm.messages import (
    SaveCommand,
    SaveResult,
    TransferCommands,
    TransferReport,
)
from kvstore.connectors.vllm.metrics import COUNTERS
from kvstore.connectors.vllm.scheduler.events import BlockEvents
from kvstore.connectors.vllm.scheduler.scheduler_logic import SchedulerLogic

HASH_TOKENS = 4
PLAIN = Groups(hash_block_tokens=4, scheduler_block_tokens=4, block_tokens={0: 4})
HYBRID = Groups(hash_block_tokens=4, scheduler_block_tokens=8, block_tokens={0: 4, 1: 8})
FOURS = Groups(
    hash_block_tokens=4, scheduler_block_tokens=4, block_tokens={0: 4}, blocks_per_object=4
)
"""As ``PLAIN``, but four blocks are one object."""


@dataclass(eq=False)
class Request:
    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int
    kv_transfer_params: dict[str, Any] | None = None
    num_computed_tokens: int = 0
    lora_request: Any = None
    mm_features: Sequence[Any] = ()
    prompt_embeds: Any = None
    prompt_is_token_ids: Any = None
    kv_hints: Any = None
    cache_salt: str = ""

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def block_hashes(self) -> list[bytes]:
        ends = range(HASH_TOKENS, self.num_tokens + 1, HASH_TOKENS)
        return [self.cache_salt.encode() + repr(self.all_token_ids[:end]).encode() for end in ends]

    def update_block_hashes(self) -> None:
        """They are always up to date."""


@dataclass(eq=False)
class Block:
    block_id: int
    references: int = 0


class Pool:
    """Reference counts; a block with none may be given to somebody else."""

    def __init__(self, blocks: int) -> None:
        self.num_gpu_blocks = blocks
        self.cached_block_hash_to_block: dict[bytes, Block] = {}
        self.blocks = [Block(number) for number in range(blocks)]
        self.blocks[NULL_BLOCK].references = 1
        self.evicted: set[int] = set()
        """From the prefix cache, the last time."""
        self.freed: list[int] = []
        """In their order; vLLM evicts the first of them first."""

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            assert block.block_id != NULL_BLOCK
            assert block.references > 0, "it may be somebody else's by now"
            block.references += 1

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            assert block.references > 0, f"{block} is freed twice"
            block.references -= 1
            self.freed.append(block.block_id)

    def take(self) -> int:
        block = next(block for block in self.blocks if not block.references)
        block.references = 1
        return block.block_id

    def evict_blocks(self, block_ids: set[int]) -> None:
        self.evicted = set(block_ids)

    @property
    def used(self) -> int:
        return sum(bool(block.references) for block in self.blocks) - 1


class Answer(NamedTuple):
    request_id: str
    in_memory: int


class Asked:
    """Instead of ``LookupThread``: answers what it is told to."""

    def __init__(self) -> None:
        self.there: dict[str, int | None] = {}
        self.on_disk: dict[str, int] = {}
        """Of those that are there, the last tokens."""
        self.wanted: list[tuple[str, int, int]] = []
        """Request, number of hashes, expected tokens."""
        self.known: set[str] = set()

    def request(self, request_id: str, hashes: Sequence[bytes], expected_tokens: int = 0) -> Answer:
        self.wanted.append((request_id, len(hashes), expected_tokens))
        self.known.add(request_id)
        there = self.there.get(request_id) or 0
        return Answer(request_id, there - self.on_disk.get(request_id, 0))

    def tokens(self, lookup: Answer, *, patient: bool = True) -> int | None:
        del patient
        return self.there.get(lookup.request_id, 0)

    def new_step(self) -> None:
        pass

    def forget(self, request_id: str) -> None:
        self.known.discard(request_id)

    def clear(self) -> None:
        self.known.clear()


@dataclass
class Tables:
    """``KVCacheBlocks``, and ``KVConnectorBlockState`` of one request."""

    tables: dict[int, list[int]]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return tuple(list(table) for table in self.tables.values())


@dataclass
class State:
    tables: dict[str, Tables]
    boundary_state_offloads: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...] | None:
        found = self.tables.get(request_id)
        return None if found is None else found.get_block_ids()


@dataclass
class Output:
    """``SchedulerOutput``."""

    num_scheduled_tokens: dict[str, int]
    finished_req_ids: set[str]
    kv_connector_block_state: State | None


@dataclass
class Saving:
    """A save under way."""

    save: SaveCommand
    workers_left: int
    stored: bool = True

    def objects(self) -> Iterator[tuple[int, bytes, int]]:
        """Group, key and block of each."""
        for run in self.save.runs:
            keys = [key for key in run.keys for _ in range(run.each)]
            for each in zip(keys, run.block_ids, strict=True):
                yield run.group, *each


@dataclass
class Engine:
    groups: Groups = PLAIN
    config: ConnectorConfig = field(default_factory=ConnectorConfig)
    blocks: int = 200
    loads: bool = True
    saves: bool = True
    workers: int = 1
    events_wanted: bool = False

    def __post_init__(self) -> None:
        self.asked = Asked()
        self.identity = SimpleNamespace(fingerprint="f", draft="d", is_verified=True)
        self.events = BlockEvents(self.groups, wanted=self.events_wanted)
        self.side = SchedulerLogic(
            self.config, self.groups, self.identity, self.asked, self.events,  # type: ignore[arg-type]
            loads=self.loads, saves=self.saves, workers=self.workers,
        )  # fmt: skip
        self.pool = Pool(self.blocks)
        self.side.bind_block_pool(self.pool)
        self.requests: dict[str, Request] = {}
        self.tables: dict[str, Tables] = {}
        self.finished: set[str] = set()
        self.saving: dict[int, Saving] = {}
        self.content: dict[tuple[int, int], bytes] = {}
        """The key of each object that is whole, by its group and block."""

    # --- requests ---------------------------------------------------------------------------------

    def add(
        self, request_id: str, tokens: int, *, there: int | None = 0, seed: int = 0,
        lora: Any = None, **params: Any,
    ) -> Request:  # fmt: skip
        """``there``: how many tokens the store has."""
        ids = [seed * 1_000 + index for index in range(tokens)]
        request = Request(request_id, ids, tokens, params or None, lora_request=lora)
        self.requests[request_id] = request
        self.tables[request_id] = Tables({group: [] for group in self.groups.block_tokens})
        self.asked.there[request_id] = there
        self.side.new_request(request)
        return request

    def matched(self, request: Request, computed: int = 0) -> int | None:
        tokens, is_async = self.side.matched_tokens(request, computed)
        assert is_async == bool(tokens)
        return tokens

    def allocate(self, request: Request, tokens: int) -> Tables:
        """Blocks for the first ``tokens`` tokens."""
        tables = self.tables[request.request_id]
        for group, size in self.groups.block_tokens.items():
            while len(tables.tables[group]) * size < tokens:
                block = self.pool.take()
                tables.tables[group].append(block)
                for each in self.groups.block_tokens:
                    self.content.pop((each, block), None)
        return tables

    def load(self, request: Request, computed: int = 0) -> int:
        """Matched and allocated; tokens that are ordered to be loaded."""
        tokens = self.matched(request, computed)
        assert tokens is not None
        tables = self.allocate(request, computed + tokens)
        self.side.allocated(request, tables, tokens)
        return tokens

    def fill(self, request: Request, tokens: int) -> None:
        """The first ``tokens`` tokens are in their blocks now."""
        tables = self.tables[request.request_id].tables
        if self.groups.blocks_per_object > 1:
            return
        for group in self.groups.block_tokens:
            keys = self.groups.keys(group, request.block_hashes)
            for index in range(min(tokens // self.groups.tokens_of(group), len(keys))):
                block = tables[group][index]
                if block != NULL_BLOCK:
                    self.content.setdefault((group, block), keys[index])

    def move(self, fingerprint: str) -> None:
        """The weights are others from now on."""
        self.identity.fingerprint = fingerprint
        self.side.on_fingerprint_changed()

    def free(self, request: Request) -> None:
        for table in self.tables[request.request_id].tables.values():
            self.pool.free_blocks(self.pool.blocks[each] for each in table if each != NULL_BLOCK)
            table.clear()

    def preempt(self, request: Request) -> None:
        self.free(request)
        request.num_computed_tokens = 0

    def finish(self, request: Request) -> dict[str, Any] | None:
        said = self.side.finished(request, list(self.tables[request.request_id].tables.values()))
        if said is not None and (tip := said.pop("tip", None)) is not None:
            end = said["stored_tokens"] // self.groups.hash_block_tokens
            assert tip == request.block_hashes[end - 1].hex()
        self.free(request)
        del self.requests[request.request_id], self.tables[request.request_id]
        self.finished.add(request.request_id)
        return said

    # --- steps ------------------------------------------------------------------------------------

    def step(
        self, scheduled: dict[str, int] | None = None, *, generated: int = 1
    ) -> TransferCommands:
        """Compute so many tokens of each request; ``generated``: by those at their end."""
        scheduled = scheduled or {}
        for request_id, tokens in scheduled.items():
            request = self.requests[request_id]
            tables = self.allocate(request, request.num_computed_tokens + tokens)
            self.side.allocated(request, tables, 0)
        orders = self.side.transfer_commands(self.scheduled(scheduled))
        self.finished = set()
        for request_id, tokens in scheduled.items():
            request = self.requests[request_id]
            request.num_computed_tokens += tokens
            self.fill(request, request.num_computed_tokens)
            if request.num_computed_tokens >= request.num_tokens:
                request.all_token_ids += [7] * generated
        for save in orders.saves:
            assert save.number not in self.saving
            self.saving[save.number] = saving = Saving(save, self.workers)
            self.check_content(saving)
        self.check()
        return orders

    def scheduled(self, tokens: dict[str, int]) -> Any:
        """What vLLM says of a step in which so many tokens of each request are computed."""
        for request_id, number in tokens.items():
            request = self.requests[request_id]
            self.allocate(request, request.num_computed_tokens + number)
        known = State({request_id: self.tables[request_id] for request_id in tokens})
        return Output(dict(tokens), self.finished, known if tokens else None)

    def report(self, number: int, *, workers: int = 1, stored: bool = True) -> None:
        """So many workers have done with it."""
        saving = self.saving[number]
        self.check_content(saving)
        saving.workers_left -= workers
        self.side.reported(TransferReport({number: SaveResult(workers, workers * stored)}))
        if not saving.workers_left:
            del self.saving[number]
        self.check()

    def report_all(self) -> None:
        for number, saving in list(self.saving.items()):
            self.report(number, workers=saving.workers_left)

    def fail_load(self, request: Request, good_tokens: int) -> None:
        self.side.reported(TransferReport(failed_loads={request.request_id: good_tokens}))
        self.check()

    # --- checks -----------------------------------------------------------------------------------

    def check_content(self, saving: Saving) -> None:
        """What is being saved is still where the workers read it. With several blocks an object,
        no block has a key of its own."""
        if self.groups.blocks_per_object > 1:
            return
        for group, key, block in saving.objects():
            assert self.content.get((group, block)) == key

    def check(self) -> None:
        pinned = self.side._pinned.values()
        assert self.side.pinned_blocks == sum(len(each.block_ids) for each in pinned)
        assert all(each.workers_remaining > 0 for each in pinned)
        held = [Saving(save, 0) for save in self.side._held]
        saves = [*self.saving.values(), *held]
        assert self.side.has_pinned == bool(saves)
        expected = [0] * self.pool.num_gpu_blocks
        expected[NULL_BLOCK] = 1
        for tables in self.tables.values():
            for table in tables.tables.values():
                for block_id in table:
                    expected[block_id] += block_id != NULL_BLOCK
        for saving in saves:
            objects = [(group, block_id) for group, _, block_id in saving.objects()]
            assert len(set(objects)) == len(objects)
            for block_id in {block_id for _, block_id in objects}:
                expected[block_id] += 1
        assert [block.references for block in self.pool.blocks] == expected
        assert self.side.counters.keys() <= COUNTERS.keys()


def saved(orders: TransferCommands) -> dict[int, list[int]]:
    """Indices of the blocks that are saved, by group."""
    found: dict[int, list[int]] = {}
    for save in orders.saves:
        for run in save.runs:
            found.setdefault(run.group, []).extend(range(run.first, run.first + len(run.keys)))
    return found

"""The faults that are planted: small ones, of the kind that a hurried change makes.

Each is an exact text of one file and what stands there instead. The text must occur exactly once:
who changes the code there changes the entry, too, or removes it where the fault cannot be made any
more. Tests are the quick ones that should see it, the most likely first.
"""

from __future__ import annotations

from typing import Final, NamedTuple

MASTER: Final = ("tests/unit/master", "tests/model/test_master_state.py")
FOREST: Final = ("tests/model/test_forest.py", *MASTER)
EVICTION: Final = ("tests/unit/master/test_eviction.py", "tests/model/test_eviction.py", *MASTER)
CLIENT: Final = ("tests/unit/client", "tests/conformance/test_objects.py")
TRANSPORT: Final = (
    "tests/conformance/test_transports.py", "tests/conformance/test_objects.py",
    "tests/unit/transport",
)  # fmt: skip
MEMORY: Final = ("tests/unit/memory", "tests/model/test_allocator.py", "tests/unit/node")
CONNECTOR: Final = ("tests/unit/connectors",)
ASKING: Final = "master/state/asking.py"
COMMON: Final = "master/state/common.py"
GRANTING: Final = "master/state/granting.py"
MARKS: Final = "master/state/marks.py"
NODES: Final = "master/state/nodes.py"
PUTTING: Final = "master/state/putting.py"
REMOVING: Final = "master/state/removing.py"
RETURNING: Final = "master/state/returning.py"
POOL: Final = "master/state/pool.py"
RECLAIM: Final = "master/state/reclaim.py"
SCHEDULER: Final = "connectors/vllm/scheduler.py"
WORKER: Final = "connectors/vllm/worker.py"


class Mutant(NamedTuple):
    """One fault."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    native: bool = True
    """False: tests run without what is compiled, because its twin in Python is broken."""


MUTANTS: Final = (
    # --- grants and the wiping before them ----------------------------------------------------
    Mutant(
        "granted-before-wiped",
        PUTTING,
        "return self._common.when_wiped(now_ms, [], result, unwiped) if unwiped else result",
        "return result",
        MASTER,
    ),
    Mutant(
        "waiting-put-granted-before-wiped",
        COMMON,
        "return [wiping for wiping in unclean if wiping.offsets]  # marks concern no writer",
        "return []",
        MASTER,
    ),
    Mutant(
        "evicted-is-not-wiped",
        GRANTING,
        "            common.effects += common.reclaim.clean(pool.evicted)\n",
        "",
        MASTER,
    ),
    Mutant(
        "found-is-not-leased",
        PUTTING,
        "                found.lease_until_ms = max(found.lease_until_ms, lease_until_ms)\n",
        "",
        MASTER,
    ),
    Mutant(
        "found-is-not-used",
        PUTTING,
        "                found.last_used_ms = now_ms\n",
        "",
        MASTER,
    ),
    Mutant(
        "parent-of-a-put-is-not-leased",
        PUTTING,
        "            parent.lease_until_ms = max(parent.lease_until_ms, lease_until_ms)\n",
        "",
        MASTER,
    ),
    Mutant(
        "suspect-nodes-are-chosen",
        "master/state/membership.py",
        "if not node.draining and self.state_of(node, now_ms) == liveness.ALIVE",
        "if not node.draining",
        MASTER,
    ),
    Mutant(
        "unusable-segments-are-chosen",
        GRANTING,
        "usable = [segment for segment in alive if segment.usable(now_ms)]",
        "usable = list(alive)",
        MASTER,
    ),
    Mutant(
        "no-bound-of-pending-puts",
        GRANTING,
        "if len(self._pending) + len(sizes) > common.rules.pending_puts_max:",
        "if len(self._pending) > common.rules.pending_puts_max:",
        MASTER,
    ),
    # --- ends of puts -------------------------------------------------------------------------
    Mutant(
        "put-end-of-another-epoch",
        PUTTING,
        "enumerate(request.tokens if request.epoch == common.epoch else ())",
        "enumerate(request.tokens)",
        MASTER,
    ),
    Mutant(
        "put-end-after-its-deadline",
        PUTTING,
        "if now_ms > put.deadline_ms or put.record is None:",
        "if put.record is None:",
        MASTER,
    ),
    Mutant(
        "revoked-at-once-is-free",
        PUTTING,
        "            if request.settled:\n                self._pool.free(put.extents, put.length)",
        "            if True:\n                self._pool.free(put.extents, put.length)",
        MASTER,
    ),
    Mutant(
        "quarantine-ends-with-the-deadline",
        GRANTING,
        "until_ms = writes_until_ms + self._common.rules.quarantine_ms",
        "until_ms = writes_until_ms",
        MASTER,
    ),
    Mutant(
        "revoked-is-not-cut",
        PUTTING,
        "remains = remains._replace(writers=put.writers(request.connections))",
        "pass",
        MASTER,
    ),
    Mutant(
        "expired-is-not-cut",
        GRANTING,
        "self._common.wipe([remains._replace(writers=put.writers())])",
        "self._common.wipe([remains])",
        MASTER,
    ),
    Mutant(
        "quarantine-is-not-wiped-at-its-end",
        GRANTING,
        "        common.effects += common.reclaim.clean(over)\n",
        "",
        MASTER,
    ),
    Mutant(
        "what-landed-late-is-not-wiped",
        GRANTING,
        "            self._common.effects += self._common.reclaim.clean([remains])\n",
        "            pass\n",
        MASTER,
    ),
    Mutant(
        "what-expired-is-not-wiped",
        GRANTING,
        "        self._common.wipe([remains._replace(writers=put.writers())])\n",
        "",
        MASTER,
    ),
    Mutant(
        "overwrite-without-tombstone",
        REMOVING,
        "            self._common.forbid(namespace, key, but=version)\n",
        "            pass\n",
        MASTER,
    ),
    Mutant(
        "committed-allocation-is-not-leased",
        PUTTING,
        "        record.lease_until_ms = max(record.lease_until_ms, lease_until_ms)\n"
        "        if not record",
        "        if not record",
        MASTER,
    ),
    Mutant(
        "tail-of-an-allocation-is-lost",
        PUTTING,
        "            self._pool.free(tails, put.length - kept)\n",
        "            pass\n",
        MASTER,
    ),
    # --- removing -----------------------------------------------------------------------------
    Mutant(
        "removal-without-tombstone",
        REMOVING,
        "            self._common.forbid(request.namespace, key)\n",
        "",
        MASTER,
    ),
    Mutant(
        "clear-without-tombstone",
        REMOVING,
        "        self._common.forbid(namespace, None)\n",
        "",
        MASTER,
    ),
    Mutant(
        "removal-does-not-wait-for-others",
        REMOVING,
        "return [*self._reclaim.of_objects(names), *self._elsewhere()]",
        "return [*self._elsewhere()]",
        MASTER,
    ),
    Mutant(
        "removal-does-not-wait-for-readers-of-dead-nodes",
        REMOVING,
        "            still_read += self._reclaim.still_read(record)\n"
        "            if record is not None and",
        "            if record is not None and",
        MASTER,
    ),
    Mutant(
        "removal-does-not-wait-for-the-untold",
        REMOVING,
        "return [*self._reclaim.held(), *self._reclaim.unmarked()]",
        "return [*self._reclaim.unmarked()]",
        MASTER,
    ),
    Mutant(
        "wiping-ignores-a-longer-lease",
        RECLAIM,
        "                wiping.free_at_ms = max(wiping.free_at_ms, remains.lease_until_ms)\n",
        "",
        MASTER,
    ),
    Mutant(
        "wiping-is-free-before-it-is-wiped",
        RECLAIM,
        "        if wiping.wiped:\n            wiping.free()",
        "        wiping.free()",
        MASTER,
    ),
    Mutant(
        "orders-are-not-sent-again",
        NODES,
        "            common.effects += "
        "common.reclaim.send_again(common.pool.segments[segment_id])\n",
        "            pass\n",
        MASTER,
    ),
    Mutant(
        "readers-of-dead-nodes-end-at-once",
        RECLAIM,
        "while self._still_read and self._still_read[0][1].free_at_ms <= now_ms:",
        "while self._still_read:",
        MASTER,
    ),
    Mutant(
        "corrupt-replica-of-another-version",
        REMOVING,
        "            if record is None or (record.epoch, record.counter) != (epoch, counter):\n"
        "                continue\n"
        "            for segment, _ in record.extents():",
        "            if record is None:\n"
        "                continue\n"
        "            for segment, _ in record.extents():",
        MASTER,
    ),
    # --- restarts -----------------------------------------------------------------------------
    Mutant(
        "claim-of-what-is-pending",
        RETURNING,
        "or (version.epoch == common.epoch and common.pending.get(version.counter) is not None)\n",
        "\n",
        MASTER,
    ),
    Mutant(
        "claim-is-not-leased",
        RETURNING,
        "        record.lease_until_ms = max(record.lease_until_ms, "
        "inventory.segment.usable_at_ms)\n",
        "",
        MASTER,
    ),
    Mutant(
        "claim-of-the-removed",
        RETURNING,
        "            or common.tombstones.forbids(claim.name, version, inventory.absent_since)\n",
        "",
        MASTER,
    ),
    Mutant(
        "claim-over-another",
        RETURNING,
        "            or not inventory.fits(offset, size)\n",
        "",
        MASTER,
    ),
    Mutant(
        "claim-from-the-future",
        RETURNING,
        "            version > common.present\n            or (version",
        "            (version",
        MASTER,
    ),
    Mutant(
        "claim-of-outdated-memory",
        RETURNING,
        "            or inventory.outdated\n",
        "",
        MASTER,
    ),
    Mutant(
        "refused-claims-are-not-wiped",
        RETURNING,
        "            common.effects += common.reclaim.clean(refused)\n",
        "",
        MASTER,
    ),
    Mutant(
        "mark-is-not-monotone",
        MARKS,
        "        self._newest = max(self._newest, mark)\n",
        "        self._newest = mark\n",
        MASTER,
    ),
    Mutant(
        "resumed-under-another-generation",
        "master/state/membership.py",
        "segment.whole and segment.offer.generation == generations[segment.offer.uuid]",
        "segment.whole",
        MASTER,
    ),
    Mutant(
        "resumed-before-all-is-told",
        "master/state/membership.py",
        "segment.whole and segment.offer.generation == generations[segment.offer.uuid]",
        "segment.offer.generation == generations[segment.offer.uuid]",
        MASTER,
    ),
    Mutant(
        "rejoined-memory-is-usable-at-once",
        "master/state/membership.py",
        "usable_at_ms = now_ms if offer.fresh else now_ms + self._lease_ms",
        "usable_at_ms = now_ms",
        MASTER,
    ),
    Mutant(
        "dropped-tombstones-are-forgotten",
        "master/state/inventory.py",
        "        if absent_since < self._dropped and version <= self._dropped_version:\n"
        "            return True\n",
        "",
        MASTER,
    ),
    # --- eviction and the forest --------------------------------------------------------------
    Mutant(
        "newest-is-evicted",
        "master/state/eviction.py",
        "time = 0 if detached else record.last_used_ms + 1",
        "time = 0 if detached else (1 << 60) - record.last_used_ms",
        EVICTION,
    ),
    Mutant(
        "leased-is-evicted",
        "master/state/eviction.py",
        "if record.lease_until_ms <= now_ms and (",
        "if (",
        EVICTION,
    ),
    Mutant(
        "recency-is-not-inherited",
        POOL,
        "                at.last_used_ms = max(at.last_used_ms, used_ms)\n",
        "",
        EVICTION,
    ),
    Mutant(
        "lease-is-not-inherited",
        POOL,
        "                at.lease_until_ms = max(at.lease_until_ms, lease_until_ms)\n",
        "",
        EVICTION,
    ),
    Mutant(
        "detached-is-matched",
        "master/state/forest.py",
        "            seen.checked = detached if len(walked) < cut_off else breaks\n",
        "            seen.checked = breaks\n",
        FOREST,
    ),
    Mutant(
        "ring-of-parents",
        "master/state/forest.py",
        "            if at is record:\n",
        "            if False:\n",
        FOREST,
    ),
    Mutant(
        "lookup-is-not-leased",
        ASKING,
        "            record.last_used_ms = now_ms\n"
        "            record.lease_until_ms = lease_until_ms\n"
        "        if uses:",
        "            record.last_used_ms = now_ms\n        if uses:",
        MASTER,
    ),
    Mutant(
        "leased-exists-is-not-leased",
        ASKING,
        "        if request.lease and table is not None:\n",
        "        if False:\n",
        MASTER,
    ),
    Mutant(
        "renewed-though-a-replica-died",
        ASKING,
        "                and all(s.alive or not s.segment_id for s, _ in record.extents())\n",
        "",
        MASTER,
    ),
    Mutant(
        "renewed-under-another-version",
        ASKING,
        "                and (record.epoch, record.counter) == (epoch, counter)\n",
        "",
        MASTER,
    ),
    # --- client -------------------------------------------------------------------------------
    Mutant(
        "late-read-counts",
        "client/flows/getting.py",
        "        if now >= known.until:\n",
        "        if False:\n",
        CLIENT,
    ),
    Mutant(
        "corrupt-at-the-first-sight",
        "client/flows/getting.py",
        "if len(target.bad) > 1]",
        "if len(target.bad) > 0]",
        CLIENT,
    ),
    Mutant(
        "placement-outlives-its-lease",
        "client/flows/placements.py",
        "if placed is not None and placed.until <= self._clock():",
        "if placed is not None and False:",
        CLIENT,
    ),
    Mutant(
        "lease-counted-from-the-answer",
        "client/flows/getting.py",
        "    until = asked + found.lease_ms / 1000 - context.lease_margin_s\n",
        "    until = context.clock() + found.lease_ms / 1000 - context.lease_margin_s\n",
        CLIENT,
    ),
    Mutant(
        "no-lease-margin",
        "client/flows/getting.py",
        "    until = asked + found.lease_ms / 1000 - context.lease_margin_s\n",
        "    until = asked + found.lease_ms / 1000\n",
        CLIENT,
    ),
    Mutant(
        "wrong-counter-is-read",
        "client/flows/objects.py",
        "        and header.counter == counter\n",
        "",
        CLIENT,
    ),
    Mutant(
        "cancelled-call-is-not-waited-for",
        "client/aio.py",
        "            if not call.cancel() and not stop.set():\n"
        "                while not call.done():",
        "            if not call.cancel() and not stop.set():\n                while False:",
        ("tests/unit/client/test_aio.py",),
    ),
    Mutant(
        "stopped-call-goes-on-with-its-answer",
        "kvstore/stopping.py",
        "                if self.is_set:\n"
        "                    raise CallStoppedError\n"
        "                self._is_waiting = False",
        "                self._is_waiting = False",
        ("tests/unit/test_stopping.py", "tests/unit/client/test_aio.py"),
    ),
    Mutant(
        "call-in-the-line-has-no-deadline",
        "client/aio.py",
        "        out_of_time = loop.call_later(timeout_s, call.cancel)  # unless it has begun",
        "        out_of_time = loop.call_later(3600, call.cancel)",
        ("tests/unit/client/test_aio.py",),
    ),
    Mutant(
        "lease-rises-again",
        "client/lent/leases.py",
        "                self.end()\n        return self._kept\n",
        "                return False\n        return self._kept\n",
        CLIENT,
    ),
    Mutant(
        "unmounted-view-is-renewed",
        "client/lent/leases.py",
        "        if self._mounted():\n            self.extend(until)",
        "        if True:\n            self.extend(until)",
        CLIENT,
    ),
    Mutant(
        "put-refused-is-stored",
        "client/flows/putting.py",
        "            outcomes[granted[number]] = PutOutcome.REFUSED\n",
        "            outcomes[granted[number]] = PutOutcome.STORED\n",
        CLIENT,
    ),
    # --- transports ---------------------------------------------------------------------------
    Mutant(
        "shm-copies-under-another-generation",
        "kvstore/transport/shm.py",
        "        if mapping.generation != generation:\n            raise segment_gone(segment)\n"
        "        if uptime() >= deadline:",
        "        if uptime() >= deadline:",
        TRANSPORT,
        native=False,
    ),
    Mutant(
        "shm-memory-of-another-generation",
        "kvstore/transport/shm.py",
        "        if mapping.generation != segment.generation:\n"
        "            raise segment_gone(segment)\n        return mapping.memory\n",
        "        return mapping.memory\n",
        TRANSPORT,
        native=False,
    ),
    Mutant(
        "shm-copies-after-the-deadline",
        "kvstore/transport/shm.py",
        "        if uptime() >= deadline:\n            raise deadline_exceeded(segment)\n",
        "",
        TRANSPORT,
        native=False,
    ),
    Mutant(
        "hello-of-another-generation",
        "kvstore/transport/tcp_connection.py",
        "if hello.generation != segment.generation:",
        "if False:",
        TRANSPORT,
        native=False,
    ),
    Mutant(
        "hello-without-token",
        "kvstore/transport/tcp_connection.py",
        "if not hmac.compare_digest(hello.token, segment.token):",
        "if False:",
        TRANSPORT,
        native=False,
    ),
    Mutant(
        "request-under-another-generation",
        "kvstore/transport/tcp_connection.py",
        "        if self._cut[0] or segment.generation != generation:\n            raise",
        "        if self._cut[0]:\n            raise",
        TRANSPORT,
        native=False,
    ),
    Mutant(
        "ranges-are-not-checked",
        "kvstore/transport/pieces.py",
        "if offset < SUPERBLOCK_BYTES or offset + len(move.buffer) > size:",
        "if offset + len(move.buffer) > size:",
        TRANSPORT,
        native=False,
    ),
    Mutant(
        "checksum-of-the-first-piece",
        "kvstore/transport/pieces.py",
        "        hasher.update(data[start : start + HASH_BYTES])\n",
        "        hasher.update(data[start : start + HASH_BYTES])\n        break\n",
        TRANSPORT,
        native=False,
    ),
    # --- memory -------------------------------------------------------------------------------
    Mutant(
        "extents-are-rounded-down",
        "kvstore/memory/header.py",
        "return (HEADER_BYTES + payload_size + EXTENT_ALIGN - 1) & -EXTENT_ALIGN",
        "return (HEADER_BYTES + payload_size) & -EXTENT_ALIGN",
        MEMORY,
    ),
    Mutant(
        "header-beyond-the-segment",
        "kvstore/memory/header.py",
        "if header is not None and start + at + extent_bytes(header.payload_size) <= size:",
        "if header is not None:",
        MEMORY,
    ),
    Mutant(
        "superblock-checksum-is-not-checked",
        "kvstore/memory/header.py",
        "        or checksum != xxh3_64_intdigest(raw[_SUPERBLOCK_CHECKED_FROM:])\n",
        "",
        MEMORY,
    ),
    Mutant(
        "another-segment-is-mapped",
        "kvstore/memory/mapping.py",
        "if superblock is None or superblock.uuid != uuid:",
        "if superblock is None:",
        (*MEMORY, *TRANSPORT),
    ),
    Mutant(
        "node-forgets-what-was-given-up",
        "kvstore/node/agent.py",
        "            self._given_up.update(attempts)\n",
        "            pass\n",
        ("tests/integration/test_drain.py",),
    ),
    Mutant(
        "what-was-given-up-is-told",
        "kvstore/node/inventory.py",
        "    if given_up:\n",
        "    if not given_up and given_up:\n",
        MEMORY,
    ),
    Mutant(
        "inventory-is-not-verified",
        "kvstore/node/inventory.py",
        "== header.payload_checksum",
        "!= -1",
        MEMORY,
    ),
    # --- the connector ------------------------------------------------------------------------
    Mutant(
        "save-counts-while-another-writes-it",
        WORKER,
        "                    stored &= PutOutcome.BEING_WRITTEN not in outcomes\n",
        "",
        CONNECTOR,
    ),
    Mutant(
        "save-counts-if-one-worker-stored-it",
        SCHEDULER,
        "pinned.stored &= end.stored == end.workers",
        "pinned.stored |= end.stored > 0",
        CONNECTOR,
    ),
    Mutant(
        "unpinned-at-the-first-report",
        SCHEDULER,
        "            if pinned.workers_left > 0:\n                continue\n            del",
        "            del",
        CONNECTOR,
    ),
    Mutant(
        "failed-load-is-offered-again",
        SCHEDULER,
        "tracked.limit = again if tracked.limit is None else min(again, tracked.limit)",
        "tracked.limit = None",
        CONNECTOR,
    ),
    Mutant(
        "no-token-is-left-to-compute",
        SCHEDULER,
        "limit = self._groups.aligned(max(request.num_tokens - 1, 0))",
        "limit = self._groups.aligned(max(request.num_tokens, 0))",
        CONNECTOR,
    ),
    Mutant(
        "guessed-tokens-are-saved",
        SCHEDULER,
        "            len(request.block_hashes) * self._groups.hash_block_tokens,\n",
        "            1 << 30,\n",
        CONNECTOR,
    ),
    Mutant(
        "missing-block-counts-as-loaded",
        WORKER,
        "                if done and None not in sizes:\n",
        "                if done:\n",
        CONNECTOR,
    ),
    Mutant(
        "pieces-of-a-save-have-no-parent",
        WORKER,
        "parent = run.keys[start - 1] if start else run.parent",
        "parent = run.parent",
        CONNECTOR,
    ),
)

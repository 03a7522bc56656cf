"""The faults that are planted: small ones, of the kind that a hurried change makes.

Each is an exact text of one file and what stands there instead. The text must occur exactly once:
who changes the code there changes the entry, too, or removes it where the fault cannot be made any
more. Tests are the quick ones that should see it, the most likely first.
"""

from __future__ import annotations

from typing import Final

from tests.mutants import of_connectors, of_engines
from tests.mutants.mutant import Mutant

MASTER: Final = ("tests/unit/master", "tests/model/test_master_state.py")
FOREST: Final = ("tests/model/test_forest.py", *MASTER)
EVICTION: Final = ("tests/unit/master/test_eviction.py", "tests/model/test_eviction.py", *MASTER)
CLIENT: Final = ("tests/unit/client", "tests/conformance/test_objects.py")
TRANSPORT: Final = (
    "tests/conformance/test_transports.py", "tests/conformance/test_objects.py",
    "tests/unit/transport",
)  # fmt: skip
MEMORY: Final = ("tests/unit/memory", "tests/model/test_allocator.py", "tests/unit/node")
LENT: Final = ("tests/unit/client/test_registered.py",)
MAPPED: Final = ("tests/unit/memory/test_mapping.py",)
WAITS: Final = ("tests/unit/device/test_device.py", "tests/unit/client/test_device_values.py")
TOLD_OF: Final = ("tests/unit/client/test_descriptors.py", "tests/unit/client/test_value_edges.py")
KEPT: Final = (
    "tests/unit/master/test_keeping.py", "tests/unit/master/test_ends.py",
    "tests/model/test_master_state.py",
)  # fmt: skip
WIRE: Final = ("tests/unit/wire",)
EPOCHS: Final = ("tests/unit/master/test_epochs.py",)
TOLD: Final = ("tests/unit/master/test_chains.py",)
ASKING: Final = "master/state/asking.py"
CHAINS: Final = "master/state/views/chains.py"
CODEC: Final = "kvstore/wire/codec.py"
COMMON: Final = "master/state/common.py"
ENDS: Final = "master/state/ends.py"
GRANTING: Final = "master/state/granting.py"
KEEPING: Final = "master/state/keeping.py"
MARKS: Final = "master/state/marks.py"
NODES: Final = "master/state/nodes.py"
PINS: Final = "master/state/pins.py"
PUTTING: Final = "master/state/putting.py"
REMOVING: Final = "master/state/removing.py"
RETURNING: Final = "master/state/returning.py"
POOL: Final = "master/state/pool.py"
RECLAIM: Final = "master/state/reclaim.py"
ACCESS: Final = "kvstore/web/server/access.py"
DOORS: Final = "kvstore/web/server/doors.py"
FEED: Final = "kvstore/web/events/feed.py"
JOURNAL: Final = "kvstore/web/events/journal.py"
LINK: Final = "kvstore/web/server/link.py"
OBJECTS: Final = "kvstore/web/api/objects.py"
OPENAPI: Final = "kvstore/web/server/openapi.py"
OUTRUNS: Final = "master/outruns.py"
PACKED: Final = "kvstore/wire/packed.py"
PEERS: Final = "kvstore/web/events/peers.py"
PUBLISHER: Final = "kvstore/web/events/publisher.py"
SERVING: Final = "kvstore/web/server/serving.py"
SUBSCRIBERS: Final = "kvstore/web/events/subscribers.py"
DEVICE: Final = "kvstore/device/device.py"
DTYPES: Final = "client/dtypes.py"
MAPPING: Final = "kvstore/memory/mapping.py"
RAW: Final = "kvstore/memory/raw.py"
REGIONS: Final = "kvstore/memory/regions.py"
REGISTERED: Final = "client/registered.py"
VALUES: Final = "client/values.py"
TRAFFIC: Final = "master/state/traffic.py"


MUTANTS: Final = (
    # --- grants and the wiping before them ----------------------------------------------------
    Mutant(
        "granted-before-wiped",
        PUTTING,
        "return self._common.when_wiped(now_ms, [], result, earlier) if earlier else result",
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
        "            common.effects += common.reclaim.clean(evicted)\n",
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
        "residue = residue._replace(writers=put.writers(request.connections))",
        "pass",
        MASTER,
    ),
    Mutant(
        "expired-is-not-cut",
        GRANTING,
        "self._common.wipe([residue._replace(writers=put.writers())])",
        "self._common.wipe([residue])",
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
        "            self._common.effects += self._common.reclaim.clean([residue])\n",
        "            pass\n",
        MASTER,
    ),
    Mutant(
        "what-expired-is-not-wiped",
        GRANTING,
        "        self._common.wipe([residue._replace(writers=put.writers())])\n",
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
        "self._reclaim.concerns(readers, (request.namespace, key))",
        "",
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
        "                wiping.free_at_ms = max(wiping.free_at_ms, residue.lease_until_ms)\n",
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
        "            if len(walked) >= cut_off:\n",
        "            if True:\n",
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
        "else all(s.alive or not s.segment_id for s, _ in record.extents())\n",
        "else True\n",
        MASTER,
    ),
    Mutant(
        "renewed-where-the-replica-died",
        ASKING,
        "        if at == offset and segment.alive and segment.offer.uuid == uuid:\n",
        "        if at == offset and segment.offer.uuid == uuid:\n",
        MASTER,
    ),
    Mutant(
        "renewed-elsewhere",
        ASKING,
        "                    _is_at(record, request.uuids[index], request.offsets[index])\n",
        "                    True\n",
        MASTER,
    ),
    Mutant(
        "put-is-acknowledged-while-the-removed-is-read",
        PUTTING,
        "still_read += self._reclaim.being_read((put.record.namespace, put.record.key))",
        "pass",
        MASTER,
    ),
    Mutant(
        "commit-is-acknowledged-while-the-removed-is-read",
        PUTTING,
        "            still_read = self._reclaim.being_read((namespace, key))\n",
        "            still_read = []\n",
        MASTER,
    ),
    Mutant(
        "found-is-acknowledged-while-the-removed-is-read",
        COMMON,
        "                    orders += self.reclaim.being_read((request.namespace, key))\n",
        "                    pass\n",
        MASTER,
    ),
    Mutant(
        "stored-during-a-removal-is-forbidden",
        PUTTING,
        "            self._common.allow(record, version)\n",
        "            pass\n",
        MASTER,
    ),
    Mutant(
        "lost-above-a-put-is-not-told",
        "master/state/sweeping.py",
        "self._above_puts = [each.parent for each in records if each.parent is not None]",
        "pass",
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
        "                while not call.is_done:",
        "            if not call.cancel() and not stop.set():\n                while False:",
        ("tests/unit/client/test_aio.py",),
    ),
    Mutant(
        "stopped-call-goes-on-with-its-answer",
        "kvstore/process/stopping.py",
        "                if self.is_set:\n"
        "                    raise CallStoppedError\n"
        "                self._is_waiting = False",
        "                self._is_waiting = False",
        ("tests/unit/process/test_stopping.py", "tests/unit/client/test_aio.py"),
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
        "client/leases/leases.py",
        "                self.end()\n        return self._kept\n",
        "                return False\n        return self._kept\n",
        CLIENT,
    ),
    Mutant(
        "unmounted-view-is-renewed",
        "client/leases/leases.py",
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
    # --- HTTP and events ------------------------------------------------------------------------
    Mutant(
        "range-says-one-byte-too-many",
        OBJECTS,
        'f"bytes {start}-{stop - 1}/{size}"',
        'f"bytes {start}-{stop}/{size}"',
        ("tests/unit/web/test_objects.py",),
    ),
    Mutant(
        "if-range-is-ignored",
        OBJECTS,
        '        and request.headers.get("If-Range", f\'"{version}"\') == f\'"{version}"\'\n',
        "",
        ("tests/unit/web/test_objects.py",),
    ),
    Mutant(
        "ttl-ms-taken-as-seconds",
        OBJECTS,
        "asked.ttl_ms / 1000",
        "asked.ttl_ms",
        ("tests/unit/web/test_objects.py",),
    ),
    Mutant(
        "room-is-kept-after-a-cancelled-upload",
        OBJECTS,
        (
            "            yield\n"
            "        finally:\n"
            "            self.free += size\n"
            "            self._give()\n"
        ),
        (
            "            yield\n"
            "        except asyncio.CancelledError:\n"
            "            raise\n"
            "        else:\n"
            "            self.free += size\n"
            "            self._give()\n"
        ),
        ("tests/unit/web/test_objects.py",),
    ),
    Mutant(
        "room-is-lost-by-a-grant-that-comes-too-late",
        OBJECTS,
        "                self.free += size\n            else:",
        "                pass\n            else:",
        ("tests/unit/web/test_room.py",),
    ),
    Mutant(
        "no-bytes-are-a-range",
        OBJECTS,
        ' or _NO_BYTES.fullmatch(request.headers["Range"])',
        "",
        ("tests/unit/web/test_objects.py",),
    ),
    Mutant(
        "keys-may-have-blanks",
        OPENAPI,
        "re.fullmatch(_hex(0), text) is None",
        "re.match(_hex(0), text) is None",
        ("tests/unit/web/test_objects.py",),
    ),
    Mutant(
        "every-page-is-the-end",
        JOURNAL,
        "yield number if is_last else -1, rows",
        "yield number, rows",
        ("tests/unit/web/test_events.py",),
    ),
    Mutant(
        "events-amid-a-survey-are-left-out",
        JOURNAL,
        (
            "                    for frame in journal.after(number, before):\n"
            "                        number = frame.before + frame.count\n"
            "                        yield -1, marshal.loads(frame.payload)"
        ),
        (
            "                    for frame in journal.after(number, before):\n"
            "                        number = frame.before + frame.count\n"
            "                        yield -1, []"
        ),
        ("tests/unit/web/test_events.py",),
    ),
    Mutant(
        "a-resumed-stream-repeats-an-event",
        JOURNAL,
        "max(0, number - each.before), wanted)",
        "max(0, number - each.before - 1), wanted)",
        ("tests/unit/web/test_events.py",),
    ),
    Mutant(
        "a-place-after-the-end-is-believed",
        JOURNAL,
        "self.start <= place.number <= self.end",
        "self.start <= place.number",
        ("tests/unit/web/test_events.py",),
    ),
    Mutant(
        "the-journal-grows",
        JOURNAL,
        (
            "            while self._bytes > JOURNAL_BYTES_MAX:\n"
            "                self._drop_oldest()\n"
        ),
        "",
        ("tests/unit/web/test_events.py",),
    ),
    Mutant(
        "a-filter-by-prefix-is-ignored",
        JOURNAL,
        " and namespace.startswith(self.under)",
        "",
        ("tests/unit/web/test_events.py",),
    ),
    Mutant(
        "a-survey-goes-on-in-another-term",
        FEED,
        " or self._epoch != survey.epoch:",
        ":",
        ("tests/unit/web/test_events.py",),
    ),
    Mutant(
        "abandoned-surveys-are-kept",
        FEED,
        "        self._surveys.pop(number, None)\n        asked",
        "        asked",
        ("tests/unit/web/test_events.py",),
    ),
    Mutant(
        "pages-are-made-for-those-who-left",
        FEED,
        (
            "            self._requests.remove(each)\n"
            "            self._frame(LAST_PAGE, number, self._number, 0, _NONE)\n"
        ),
        "            pass\n",
        ("tests/unit/web/test_events.py",),
    ),
    Mutant(
        "a-child-may-ask-without-end",
        FEED,
        "len(self._requests) >= ASKED_MAX or not",
        "not",
        ("tests/unit/web/test_events.py",),
    ),
    Mutant(
        "dropped-events-are-not-told",
        FEED,
        "            self._missed = True\n",
        "",
        ("tests/unit/web/test_events.py",),
    ),
    Mutant(
        "a-replay-waits-for-ever",
        PUBLISHER,
        "            made.set(zmq.ROUTER_MANDATORY, 1)  # says so if a peer does not read\n",
        "            pass\n",
        ("tests/unit/web/test_publisher.py",),
    ),
    Mutant(
        "a-replay-begins-one-late",
        PUBLISHER,
        "first = max(first, self._sent[0].number)",
        "first = max(first, self._sent[0].number + 1)",
        ("tests/unit/web/test_publisher.py",),
    ),
    Mutant(
        "all-replays-are-kept",
        PUBLISHER,
        "while self._sent_bytes > REPLAY_BYTES_MAX or len(self._sent) > REPLAY_BATCHES_MAX:",
        "while False:",
        ("tests/unit/web/test_publisher.py",),
    ),
    Mutant(
        "peers-that-are-behind-stay",
        PUBLISHER,
        "cut = sum(each.cut_those_behind(BEHIND_BYTES) for each in self._peers)",
        "cut = 0",
        ("tests/unit/web/test_publisher.py",),
    ),
    Mutant(
        "peers-without-number",
        PEERS,
        "        if number is None:\n            _cut(sock)\n",
        "",
        ("tests/unit/web/test_publisher.py",),
    ),
    Mutant(
        "places-of-peers-are-not-given-back",
        PEERS,
        "            self._subscribers.leave(number)\n",
        "            pass\n",
        ("tests/unit/web/test_publisher.py",),
    ),
    Mutant(
        "an-address-keeps-all-places",
        SUBSCRIBERS,
        "if count[address] > count[newcomer] + 1:",
        "if False:",
        ("tests/unit/web/test_subscribers.py",),
    ),
    Mutant(
        "a-place-is-kept-for-ever",
        SUBSCRIBERS,
        " and now - since >= TENURE_S:",
        " and False:",
        ("tests/unit/web/test_subscribers.py",),
    ),
    Mutant(
        "a-stranger-turns-others-out",
        SUBSCRIBERS,
        "if count[address] >= count[newcomer] and now",
        "if now",
        ("tests/unit/web/test_subscribers.py",),
    ),
    Mutant(
        "with-a-token-loopback-needs-none",
        ACCESS,
        (
            "        if self._token:\n"
            "            return None if self._has_token(request) else _unauthorized()\n"
            "        if is_loopback(request):"
        ),
        (
            "        if self._token and self._has_token(request):\n"
            "            return None\n"
            "        if is_loopback(request):"
        ),
        ("tests/unit/web/test_access.py",),
    ),
    Mutant(
        "two-tokens-will-do",
        ACCESS,
        "if len(given) != 1 or not self._token:",
        "if not given or not self._token:",
        ("tests/unit/web/test_access.py",),
    ),
    Mutant(
        "a-page-of-another-site-may",
        ACCESS,
        "return self._misdirected(request) or _forged(request) or self",
        "return self._misdirected(request) or self",
        ("tests/unit/web/test_access.py",),
    ),
    Mutant(
        "any-name-will-do",
        ACCESS,
        "self._misdirected(request) or _forged(request) or self",
        "_forged(request) or self",
        ("tests/unit/web/test_access.py",),
    ),
    Mutant(
        "the-page-itself-needs-no-name",
        ACCESS,
        "return _guarded(handler, self._misdirected)\n",
        "return handler\n",
        ("tests/unit/web/test_access.py",),
    ),
    Mutant(
        "the-oldest-wait-stays",
        DOORS,
        (
            "        while self._waiting and self._weight + weight > self._weight_max:\n"
            "            self._crowd_out()\n"
        ),
        "",
        ("tests/unit/web/test_doors.py",),
    ),
    Mutant(
        "bodies-are-decompressed",
        DOORS,
        '            if any(each.lower() != "identity" for each in encodings):',
        "            if not encodings and encodings:",
        ("tests/unit/web/test_doors.py",),
    ),
    Mutant(
        "closing-connections-count-for-ever",
        DOORS,
        "                transport.abort()\n            return True",
        "                pass\n            return True",
        ("tests/unit/web/test_doors.py",),
    ),
    Mutant(
        "health-counts-as-a-request",
        SERVING,
        ("        if request.path in HEALTH:\n            return await handler(request)\n"),
        "",
        ("tests/unit/web/test_doors.py",),
    ),
    Mutant(
        "requests-are-not-counted-down",
        SERVING,
        "        finally:\n            self._count -= 1\n",
        "        finally:\n            pass\n",
        ("tests/unit/web/test_doors.py",),
    ),
    Mutant(
        "a-silent-child-is-left-alone",
        LINK,
        "                if silent == LOOKS:\n",
        "                if False:\n",
        ("tests/unit/web/test_link.py",),
    ),
    Mutant(
        "a-stop-of-the-parent-is-the-child-s-fault",
        LINK,
        "                if silent == LOOKS:\n",
        "                if silent:\n",
        ("tests/unit/web/test_link.py",),
    ),
    # --- what is kept and what ends, and how it is told -------------------------------------------
    Mutant(
        "over-comes-back",
        KEEPING,
        "            residue = Residue.of(record, forbid=True)\n",
        "            residue = Residue.of(record)\n",
        KEPT,
    ),
    Mutant(
        "bad-comes-back",
        REMOVING,
        "                gone.append(Residue.of(record, forbid=True))\n",
        "                gone.append(Residue.of(record))\n",
        MASTER,
    ),
    Mutant(
        "forgets-what-a-dead-node-had-to-wipe",
        RECLAIM,
        "            for version in wiping.forbidden:\n"
        "                self._tombstones.add_version(version)\n",
        "            pass\n",
        MASTER,
    ),
    Mutant(
        "over-with-children-is-free-at-once",
        KEEPING,
        "record.children or record.lease_until_ms > now_ms",
        "record.lease_until_ms > now_ms",
        KEPT,
    ),
    Mutant(
        "over-with-a-lease-is-free-at-once",
        KEEPING,
        "            is_read = record.children or record.lease_until_ms > now_ms\n",
        "            is_read = record.children > 0\n",
        KEPT,
    ),
    Mutant(
        "over-is-copied-on",
        KEEPING,
        "            self._granting.end_copies(now_ms, (record.namespace, record.key))\n",
        "",
        KEPT,
    ),
    Mutant(
        "over-is-not-counted",
        KEEPING,
        '            common.counters["expired_bytes"] += residue.size\n',
        "",
        KEPT,
    ),
    Mutant(
        "over-is-not-wiped",
        KEEPING,
        "            common.effects += common.reclaim.clean(freed)\n",
        "",
        KEPT,
    ),
    Mutant(
        "key-of-what-is-over-waits-its-turn",
        KEEPING,
        "self._take_back(now_ms, [r for r in records if self._lifetimes.ended(r, now_ms)])",
        "pass",
        KEPT,
    ),
    Mutant(
        "evicts-before-what-is-over",
        KEEPING,
        "        self.expire(now_ms)\n\n    def next_ms",
        "\n    def next_ms",
        KEPT,
    ),
    Mutant(
        "slices-of-what-is-over-end",
        KEEPING,
        "goes_on = now_ms >= min(self._lifetimes.next_ms, self._pins.ends.next_ms)",
        "goes_on = False",
        KEPT,
    ),
    Mutant(
        "a-slice-has-no-bound",
        KEEPING,
        "now_ms >= self._lifetimes.next_ms and len(ended) < EXPIRED_PER_STEP",
        "now_ms >= self._lifetimes.next_ms",
        KEPT,
    ),
    Mutant(
        "pins-of-a-slice-have-no-bound",
        KEEPING,
        "now_ms >= self._pins.ends.next_ms and pins < ENDED_PER_STEP",
        "now_ms >= self._pins.ends.next_ms",
        KEPT,
    ),
    Mutant(
        "counts-of-pins-are-left",
        KEEPING,
        "note(EXPIRE, goes_on or self._pins.unsettled)",
        "note(EXPIRE, goes_on)",
        KEPT,
    ),
    Mutant(
        "an-end-of-pins-wakes-no-put",
        KEEPING,
        "        self._common.room_made()  # it can be evicted\n",
        "",
        KEPT,
    ),
    Mutant(
        "unpinned-keeps-its-place",
        KEEPING,
        "                self._pool.let_evict(record)\n",
        "",
        KEPT,
    ),
    Mutant(
        "over-is-pinned",
        KEEPING,
        "record.complete and not self._lifetimes.ended(record, now_ms)",
        "record.complete",
        KEPT,
    ),
    Mutant(
        "bound-of-pins-is-reached",
        KEEPING,
        "before + wanted > bound",
        "before + wanted >= bound",
        KEPT,
    ),
    Mutant(
        "pinned-again-is-refused",
        KEEPING,
        "        if not wanted:\n            return\n        rules",
        "        rules",
        KEPT,
    ),
    Mutant(
        "ancestors-do-not-count",
        KEEPING,
        "                at = at.parent\n",
        "                at = None\n",
        KEPT,
    ),
    Mutant(
        "pins-past-the-bound-of-steps",
        KEEPING,
        "if len(added) == PIN_STEPS:",
        "if len(added) > PIN_STEPS:",
        KEPT,
    ),
    Mutant(
        "next-pin-does-not-wake",
        KEEPING,
        "times = (self._lifetimes.next_ms, self._pins.ends.next_ms)",
        "times = (self._lifetimes.next_ms,)",
        KEPT,
    ),
    Mutant(
        "end-is-rounded-down",
        ENDS,
        "-(-end_ms // STEP_MS) * STEP_MS",
        "end_ms // STEP_MS * STEP_MS",
        KEPT,
    ),
    Mutant(
        "ends-a-moment-late",
        ENDS,
        "return 0 < self.of(record) <= now_ms",
        "return 0 < self.of(record) < now_ms",
        KEPT,
    ),
    Mutant(
        "bucket-ends-a-moment-late",
        ENDS,
        "            if time > now_ms:\n",
        "            if time >= now_ms:\n",
        KEPT,
    ),
    Mutant(
        "next-end-is-the-last-set",
        ENDS,
        "self.next_ms = min(self.next_ms, end_ms)",
        "self.next_ms = end_ms",
        KEPT,
    ),
    Mutant(
        "two-ends-of-one-record",
        ENDS,
        '        """Sets the record\'s end, in place of an earlier one."""\n'
        "        self.drop(record)\n",
        '        """Sets the record\'s end, in place of an earlier one."""\n',
        KEPT,
    ),
    Mutant(
        "parents-end-before-children",
        ENDS,
        "                record, _ = bucket.popitem()\n"
        "                bucket[record] = None  # ``drop`` removes it\n",
        "                record = next(iter(bucket))\n",
        KEPT,
    ),
    Mutant(
        "empty-buckets-stay",
        ENDS,
        "            self._buckets.clear()\n            self._times.clear()\n",
        "",
        KEPT,
    ),
    Mutant(
        "later-pin-shortens",
        PINS,
        "self.ends.set(record, max(end_ms, self.ends.of(record)))",
        "self.ends.set(record, end_ms)",
        KEPT,
    ),
    Mutant(
        "a-lost-pin-holds",
        PINS,
        "        self.ends.drop(record)\n        self._set(pin, 0, 0)\n",
        "        self._set(pin, 0, 0)\n",
        KEPT,
    ),
    Mutant(
        "only-one-replica-is-pinned",
        PINS,
        " * sum(segment.alive for segment, _ in record.extents())",
        "",
        KEPT,
    ),
    Mutant(
        "ancestors-stay-pinned",
        PINS,
        "            above.below -= 1\n"
        "            if not above.below:\n"
        "                self._let_go(above)\n"
        "\n"
        "    def stored",
        "            above.below -= 1\n\n    def stored",
        KEPT,
    ),
    Mutant(
        "new-place-keeps-old-ancestors",
        PINS,
        "        above, pin.above = pin.above, None\n"
        "        above.below -= 1\n"
        "        if not above.below:\n"
        "            self._let_go(above)\n"
        "\n"
        "    def check",
        "\n    def check",
        KEPT,
    ),
    Mutant(
        "what-is-stored-again-does-not-count",
        PINS,
        "            self._measure(self._shards[hash(record) % TABLE_SHARDS][record])\n",
        "            pass\n",
        KEPT,
    ),
    Mutant(
        "loss-of-a-node-changes-no-count",
        PINS,
        "            self._shards_to_measure = list(range(TABLE_SHARDS))\n",
        "            pass\n",
        KEPT,
    ),
    Mutant(
        "ended-pin-goes-although-another-holds",
        PINS,
        "if not (pin.dropped or pin.below or self.ends.of(pin.record)):",
        "if not (pin.dropped or pin.below):",
        KEPT,
    ),
    Mutant(
        "pin-of-a-chain-counts-all-of-it-again",
        PINS,
        "            if known is not None:\n                break\n",
        "",
        KEPT,
    ),
    Mutant(
        "over-counts-in-chains",
        CHAINS,
        "                or (some_ended and self._lifetimes.ended(at, now_ms))\n",
        "",
        TOLD,
    ),
    Mutant(
        "over-is-a-tip",
        CHAINS,
        "        return record.complete and not self._lifetimes.ended(record, now_ms)\n",
        "        return record.complete\n",
        TOLD,
    ),
    Mutant(
        "lost-counts-in-chains",
        CHAINS,
        "                or not (segment.alive or at.complete)\n",
        "",
        TOLD,
    ),
    Mutant(
        "written-counts-as-missing",
        CHAINS,
        "                    branch.being_written += 1\n",
        "                    branch.missing += 1\n",
        TOLD,
    ),
    Mutant(
        "dead-replicas-count-in-chains",
        CHAINS,
        "                    if other.alive:\n",
        "                    if other:\n",
        TOLD,
    ),
    Mutant(
        "removed-tip-is-walked",
        CHAINS,
        "                if self._forest.get(record.namespace, record.key) is not record:\n"
        "                    continue  # it has been removed or evicted meanwhile\n",
        "",
        TOLD,
    ),
    Mutant(
        "newest-are-not-looked-at",
        CHAINS,
        "            steps += self._look_at_newest(question, table)\n",
        "",
        TOLD,
    ),
    Mutant(
        "forks-end-no-branch",
        CHAINS,
        "elif parent.children > 1 or parent in marks:",
        "elif parent in marks:",
        TOLD,
    ),
    Mutant(
        "known-tips-end-no-branch",
        CHAINS,
        "elif parent.children > 1 or parent in marks:",
        "elif parent.children > 1:",
        TOLD,
    ),
    Mutant(
        "branches-have-no-bound",
        CHAINS,
        "        if len(question.branches) == BRANCHES_MAX:\n",
        "        if len(question.branches) == 1 << 30:\n",
        TOLD,
    ),
    Mutant(
        "counts-of-branches-do-not-add-up",
        CHAINS,
        "                above.matched += branch.matched\n",
        "",
        TOLD,
    ),
    Mutant(
        "use-below-does-not-count",
        CHAINS,
        "                above.used_ms = max(above.used_ms, branch.used_ms)\n",
        "",
        TOLD,
    ),
    Mutant(
        "lease-below-does-not-count",
        CHAINS,
        "                above.leased_ms = max(above.leased_ms, branch.leased_ms)\n",
        "",
        TOLD,
    ),
    Mutant(
        "oldest-count-is-lost",
        CHAINS,
        "                above.counted_ms = min(above.counted_ms, branch.counted_ms)\n",
        "",
        TOLD,
    ),
    Mutant(
        "cut-branches-are-not-told",
        CHAINS,
        "                        branch.cut = True\n                        return\n",
        "                        return\n",
        TOLD,
    ),
    Mutant(
        "questions-have-no-bound",
        CHAINS,
        "        if len(self._questions) >= WAITING_MAX:\n",
        "        if len(self._questions) > WAITING_MAX:\n",
        TOLD,
    ),
    # --- the memory of programs, and values -----------------------------------------------------
    Mutant(
        "lent-beyond-its-region",
        REGISTERED,
        "self._regions.holding(address, size) if size >= 0 else None",
        "self._regions.holding(address, 0) if size >= 0 else None",
        LENT,
    ),
    Mutant(
        "lent-from-the-regions-start",
        REGISTERED,
        "region.memory[address - region.start : address - region.start + size]",
        "region.memory[:size]",
        LENT,
    ),
    Mutant(
        "memory-of-a-device-is-lent",
        REGISTERED,
        "        if region.start in self._devices:\n",
        "        if False:\n",
        LENT,
    ),
    Mutant(
        "registered-twice",
        REGISTERED,
        "            if self._regions.overlap(region):\n",
        "            if False:\n",
        LENT,
    ),
    Mutant(
        "unregistered-device-is-remembered",
        REGISTERED,
        "self._devices.pop(start, None) is None",
        "self._devices.get(start) is None",
        LENT,
    ),
    Mutant(
        "runs-of-a-device-are-not-checked",
        REGISTERED,
        "        if ((lengths > room) | (lengths < 0)).any():\n",
        "        if (lengths < 0).any():\n",
        LENT,
    ),
    Mutant(
        "runs-of-negative-length",
        REGISTERED,
        "((lengths > room) | (lengths < 0)).any()",
        "(lengths > room).any()",
        LENT,
    ),
    Mutant(
        "addresses-and-sizes-of-unequal-number",
        REGISTERED,
        "        if len(addresses) != len(sizes):\n",
        "        if False:\n",
        LENT,
    ),
    Mutant(
        "last-byte-is-not-probed",
        RAW,
        "[*range(address, address + size, step), address + size - 1]",
        "[*range(address, address + size, step)]",
        LENT,
    ),
    Mutant(
        "first-byte-alone-is-probed",
        RAW,
        "    for each in probes:\n",
        "    for each in probes[:1]:\n",
        LENT,
    ),
    Mutant(
        "holes-are-not-seen",
        RAW,
        'if start > at or not how.startswith(b"r"):',
        'if not how.startswith(b"r"):',
        LENT,
    ),
    Mutant(
        "unreadable-is-not-seen",
        RAW,
        'if start > at or not how.startswith(b"r"):',
        "if start > at:",
        LENT,
    ),
    Mutant(
        "read-only-is-lent-to-write",
        RAW,
        'is_writable &= how.startswith(b"rw")',
        'is_writable = how.startswith(b"rw")',
        LENT,
    ),
    Mutant(
        "file-that-ends-too-early",
        RAW,
        "    if unreadable is None:\n        unreadable = _unreadable(address, size)\n",
        "",
        LENT,
    ),
    Mutant(
        "overlap-of-two-that-are-not-neighbours",
        REGIONS,
        "    spans = sorted(\n",
        "    spans = list(\n",
        ("tests/unit/test_native.py",),
    ),
    Mutant(
        "runs-of-a-device-overlap",
        "kvstore/device/memory.py",
        "self.sizes[order][:-1] > starts[1:]",
        "self.sizes[:-1] > starts[1:]",
        LENT,
    ),
    Mutant(
        "views-can-be-written",
        MAPPING,
        "access=mmap.ACCESS_READ",
        "access=mmap.ACCESS_WRITE",
        MAPPED,
    ),
    Mutant(
        "views-of-another-entry",
        MAPPING,
        "            if (there.st_dev, there.st_ino) != self._inode:\n"
        "                return None\n"
        "            shown",
        "            shown",
        MAPPED,
    ),
    Mutant(
        "views-are-not-kept-mapped",
        MAPPING,
        "    array.keep = memory\n",
        "",
        MAPPED,
    ),
    Mutant(
        "copies-under-way-are-left-when-stopped",
        DEVICE,
        "deadline + SETTLE_S, stoppable=False",
        "deadline + SETTLE_S, stoppable=True",
        WAITS,
    ),
    Mutant(
        "copies-have-no-time-to-settle",
        DEVICE,
        "deadline + SETTLE_S, stoppable=False",
        "deadline, stoppable=False",
        WAITS,
    ),
    Mutant(
        "failed-device-copies",
        DEVICE,
        "        if self._failed:\n"
        "            raise self._failure()\n"
        "        if locked is not None:",
        "        if locked is not None:",
        WAITS,
    ),
    Mutant(
        "failed-device-waits",
        DEVICE,
        "        if self._failed:\n            raise self._failure()\n        for event in",
        "        for event in",
        WAITS,
    ),
    Mutant(
        "failed-device-settles",
        DEVICE,
        "        if self._failed:\n"
        "            raise self._failure()\n"
        "        if not self._wait(event, deadline + SETTLE_S",
        "        if not self._wait(event, deadline + SETTLE_S",
        WAITS,
    ),
    Mutant(
        "failed-device-copies-ordinary-memory",
        DEVICE,
        "        if self._failed:\n"
        "            raise self._failure()\n"
        "        device, other, sizes = copies\n"
        "        if way is",
        "        device, other, sizes = copies\n        if way is",
        WAITS,
    ),
    Mutant(
        "failed-device-gives-its-slot-back",
        DEVICE,
        "            if not self._failed:\n                self.ring.give(slot)\n",
        "            self.ring.give(slot)\n",
        WAITS,
    ),
    Mutant(
        "failed-device-unlocks-memory",
        DEVICE,
        "            self.locks.keep()\n",
        "",
        WAITS,
    ),
    Mutant(
        "wait-outlives-its-client",
        DEVICE,
        "            if stoppable and self._is_closed:\n",
        "            if False:\n",
        WAITS,
    ),
    Mutant(
        "first-of-several-events-is-enough",
        DEVICE,
        "        for event in {id(each): each for each in events}.values():\n",
        "        for event in list(events)[:1]:\n",
        WAITS,
    ),
    Mutant(
        "empty-tensors-have-an-address",
        "kvstore/device/memory.py",
        "    if not size:\n        return DeviceMemory(device, _NONE, _NONE)\n",
        "",
        WAITS,
    ),
    Mutant(
        "pointers-in-a-descriptor",
        DTYPES,
        "        if _is_numpy(name):\n            return",
        "        if name:\n            return",
        TOLD_OF,
    ),
    Mutant(
        "any-name-of-torch-is-a-dtype",
        DTYPES,
        "getattr(module, str(name), None) if name in _TORCH else None",
        "getattr(module, str(name), None)",
        TOLD_OF,
    ),
    Mutant(
        "arrays-of-arrays-are-stored",
        DTYPES,
        "dtype.names is not None or dtype.subdtype is not None",
        "dtype.names is not None",
        TOLD_OF,
    ),
    Mutant(
        "texts-are-not-looked-at",
        VALUES,
        "        if int(array.reshape(-1).view(points).max()) > sys.maxunicode:\n",
        "        if False:\n",
        TOLD_OF,
    ),
    Mutant(
        "a-mask-is-lost",
        VALUES,
        "type(value) not in (np.ndarray, np.memmap)",
        "False",
        TOLD_OF,
    ),
    Mutant(
        "a-wrapper-is-stored",
        VALUES,
        "        if is_wrapper or not isinstance(tensor, torch.nn.Parameter):\n",
        "        if not isinstance(tensor, torch.nn.Parameter):\n",
        TOLD_OF,
    ),
    Mutant(
        "tensors-without-memory-are-read",
        VALUES,
        "tensor.data_ptr() and end <= tensor.untyped_storage().nbytes()",
        "True",
        TOLD_OF,
    ),
    Mutant(
        "columns-of-unequal-length",
        CODEC,
        "    if len(rows) != count:\n",
        "    if len(rows) > count:\n",
        WIRE,
    ),
    Mutant(
        "columns-are-not-counted",
        CODEC,
        '    bound = f", rows=len({rows.like})" if rows.like else',
        '    bound = f", rows_max=len({rows.like})" if rows.like else',
        WIRE,
    ),
    Mutant(
        "a-name-in-shm-is-matched-at-its-front",
        PACKED,
        "_SHM_NAME.fullmatch(value)",
        "_SHM_NAME.match(value)",
        WIRE,
    ),
    Mutant(
        "partly-found-is-not-counted",
        TRAFFIC,
        "            row.partly += 1\n",
        "            row.partly += first > 1\n",
        ("tests/unit/master/test_traffic.py",),
    ),
    Mutant(
        "any-epoch-is-believed",
        COMMON,
        "return self.epoch < epoch <= self._epoch_max",
        "return self.epoch < epoch",
        EPOCHS,
    ),
    Mutant(
        "reports-end-terms-without-a-pause",
        OUTRUNS,
        "        if epoch <= own or now_s < self._not_before:\n",
        "        if epoch <= own:\n",
        EPOCHS,
    ),
    Mutant(
        "a-term-begins-beyond-the-bound",
        OUTRUNS,
        "room = min(EPOCH_STEP_MAX, highest_believed(wall_clock_ms) - epoch)",
        "room = EPOCH_STEP_MAX",
        EPOCHS,
    ),
    Mutant(
        "memory-is-mounted-by-two-nodes",
        "master/state/membership.py",
        "            if holder is not None and holder.name != join.name:\n",
        "            if holder is not None and holder.name == join.name + '!':\n",
        ("tests/unit/master/test_nodes.py",),
    ),
    Mutant(
        "all-pins-have-no-bound",
        KEEPING,
        "        share = max(rules.pinned_max, rules.pinned_all_max)\n",
        "        share = 1.0\n",
        KEPT,
    ),
    Mutant(
        "a-kept-error-keeps-its-frames",
        "kvstore/errors.py",
        "    return error.with_traceback(None)\n",
        "    return error\n",
        ("tests/unit/network/test_names.py",),
    ),
    Mutant(
        "a-refusal-refers-to-its-frame",
        "kvstore/network/names.py",
        "        del failure  # its traceback refers to this frame\n",
        "        pass\n",
        ("tests/unit/network/test_names.py",),
    ),
    *of_connectors.MUTANTS,
    *of_engines.MUTANTS,
)

"""A client and a node that join, speak well and lie, beside the honest ones.

What they say is drawn from ``tests.support.twin``: one field of one message is a lie. The rules of
the oracle are those of runs without liars. ``Liars.may_be_said`` leaves out what the store cannot
refuse while callers have no identities. An *attacker* is a client with an identity that has rights
in one namespace, which says exactly that: it knows all tokens and keys of the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine, Iterable
from random import Random
from typing import TYPE_CHECKING, Any, Final

from xxhash import xxh3_64_intdigest

from kvstore import calls
from kvstore.auth.identity import identity
from kvstore.calls import NO_VERSION, Version
from kvstore.client.calling.retries import CarrierBrokenError, TokenRefusedError
from kvstore.client.flows import putting
from kvstore.client.flows.writing import PutOptions
from kvstore.errors import InternalError, KVStoreError, PermissionDeniedError
from kvstore.limits import RELEASED_MAX, Key, Namespace, highest_believed
from kvstore.memory.header import HEADER_BYTES, SUPERBLOCK_BYTES, Header, extent_bytes, pack_into
from kvstore.wire.messages import CALLS, decode_reply, encode_request
from kvstore.wire.node_messages import decode_master_message, encode_node_message
from tests.simulation import inside
from tests.simulation.client import Client
from tests.simulation.network import BrokenStreamError, End
from tests.simulation.scheduler import MS, SECOND, Process, TimedOutError
from tests.simulation.workload import NAMESPACES, PIN_S_MAX
from tests.support.twin import KEY, MINE, Lie, Theirs, lies, true_calls, true_join, true_messages

if TYPE_CHECKING:
    from tests.simulation.cluster import SimulatedCluster
    from tests.simulation.master import Master

HOUR_US = 3600 * SECOND
"""No clock from which a master takes its epoch shows so much in a run."""

LIES_MAX = 6
"""Of one client, or one node."""

ROWS_MAX = 3
"""Of a column. Many rows cost many steps; ``tests/integration/test_hostile_twin.py`` has them."""

ATTACKS_MAX = 12
"""Calls of one attacker."""

FLOOD_MAX = 200
"""Calls of one flood, and puts of it that are never ended."""

ATTACKER: Final = identity("attacker", ["engine"], reads=[MINE], writes=[MINE])

HOARD_MAX = 40
"""Allocations of one hoard, which it renews once."""

NODE_BEATS_MAX = 15
"""A node that lies stays for so many heartbeats: longer than a node is silent before it is dead."""


class LyingClient(Client):
    """Puts an object as any client does, and then sends what no client would."""

    async def put_own(self) -> None:
        data = b"of the liar" * 9
        namespace, key = Namespace(MINE), Key(KEY)
        self.oracle.putting(namespace, key, data)
        options = PutOptions(namespace=namespace, wait_ms=200)
        await self.run(putting.put(self.context, key, data, options))

    async def say(self, asked: calls.Request, address: str, port: str) -> calls.Reply:
        """Raises KVStoreError, CarrierBrokenError, TokenRefusedError."""
        call, payload = CALLS[type(asked)], encode_request(asked)
        until = self.clock() + 1
        said = await self._exchange(address, port, next(self._call_ids), call, payload, until)
        return decode_reply(call, said)


class Liars:
    """Those of one run, until ``stop``."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._processes: list[Process] = []

    def client(self) -> None:
        """One more client lies a few times, and ends."""
        process = self._process("liar")
        self._spawn(process, self._lie_as_client(self._cluster.new_liar(process)))

    def attacker(self) -> None:
        """One more client, with an identity, does all that it must not, and ends."""
        process = self._process("attacker")
        client = self._cluster.new_liar(process)
        self._cluster.callers[process.name] = ATTACKER, client.context.client_number
        self._spawn(process, self._attack(client))

    def node(self) -> None:
        """One more node joins a master, lies a few times, beats for a while, and ends."""
        process = self._process("liar-node")
        self._spawn(process, self._lie_as_node(process))

    def stop(self) -> None:
        for process in self._processes:
            process.kill()

    def may_be_said(self, lie: Lie, true: Any) -> bool:
        """Whether no lie of this kind can break a rule.

        The others are left out, because no rule can hold against them until callers have
        identities:

        * Anybody may clear a namespace, drain a node, and pin an own object for a day. (What is
          removed here is the liar's: one field is a lie, the namespace or the key.)
        * A put under way is named by its epoch and a number, and anybody may end it, give it up or
          commit it.
        * A node that reports a later epoch within the bound ends one term a minute. It
          reports it in its join, or by a claim.
        * The mark of a node makes other memory outdated.
        * The name, or the memory, of a node that is away is taken over by the node that offers it.
        * A master that does not know an object believes the node that claims it. So claims of
          another's object are exact (``_exact_claims``), or of the first epoch.
        """
        message, field, value = lie
        if any(part.startswith("rows=") and int(part[5:]) > ROWS_MAX for part in field.split(".")):
            return False
        match message:
            case calls.Clear():
                return not (field == "namespace" and value in ("", *NAMESPACES))
            case calls.Drain():
                return field != "node" or value not in self._names()
            case calls.Pin(hold_ms=hold_ms):
                return bool(hold_ms <= PIN_S_MAX * 1000)
            case calls.PutEnd() | calls.PutRevoke() | calls.Commit():
                return not field.startswith(("epoch", "token")) or message.epoch < true.epoch
            case calls.NodeJoin():
                taken = (field == "name" and value in self._names()) or field == "segments.0.uuid"
                marked = any(offer.mark != NO_VERSION for offer in message.segments)
                return not (taken or marked or self._is_believed(message.highest_epoch))
            case calls.NodeClaims():
                return not any(map(self._is_believed, message.epochs))
        return True

    def _is_believed(self, epoch: int) -> bool:
        """Whether some master of this run, which may begin later or be behind, believes a node
        that says so."""
        return 1 < epoch <= highest_believed(HOUR_US)

    # --- a client -----------------------------------------------------------------------------

    async def _lie_as_client(self, client: LyingClient) -> None:
        random = self._random
        own = Version(0, 0)
        try:
            await client.put_own()
            own = self._versions().get((Namespace(MINE), Key(KEY)), own)
        except KVStoreError as error:
            self._note(f"{client.process.name} has put nothing: {error.code}")
        true = true_calls(put=own)
        for _ in range(random.randint(1, LIES_MAX)):
            lie = self._draw(random.choice(true))
            if lie is None:
                continue
            port = random.choice(("lane", "grpc"))
            if isinstance(lie.message, calls.Join):
                port = "join"
            address = random.choice(self._cluster.masters)
            self._note(f"{client.process.name} says {lie} at {address}")
            try:
                await client.say(lie.message, address, port)
            except InternalError as error:
                self._cluster.oracle.broken("internal", f"{lie}: {error}")
            except (KVStoreError, CarrierBrokenError, TokenRefusedError) as error:
                self._note(f"{client.process.name} hears {type(error).__name__}")
            else:
                self._cluster.oracle.count("lies_answered")

    # --- an attacker --------------------------------------------------------------------------

    async def _attack(self, client: LyingClient) -> None:
        """Says each thing to the master that leads, which must refuse what is not about its own."""
        cluster, random = self._cluster, self._random
        try:
            await client.put_own()
        except KVStoreError as error:
            self._note(f"{client.process.name} has put nothing: {error.code}")
        for _ in range(random.randint(1, ATTACKS_MAX)):
            master = cluster.master
            if master is None:
                return
            chance = random.random()
            if chance < 0.2:
                await self._flood(client, master.process.name)
                continue
            if chance < 0.4 and cluster.options.stamps:
                await self._forge(client, master)
                continue
            if chance < 0.5:
                await self._hoard(client, master.process.name)
                continue
            asked = random.choice(self._attacks())
            self._note(f"{client.process.name} asks {asked!r:.150}")
            is_refused = await self._is_refused(client, asked, master.process.name)
            if is_refused is None:
                continue
            cluster.oracle.count("attacks_refused" if is_refused else "attacks_answered")
            if not is_refused:
                cluster.oracle.broken("allowed", f"{client.process.name} was answered: {asked!r}")

    async def _is_refused(
        self, client: LyingClient, asked: calls.Request, address: str
    ) -> bool | None:
        """None: it was not heard, or names nothing any more."""
        leader = self._cluster.master
        try:
            await client.say(asked, address, "grpc")
        except PermissionDeniedError as error:
            return None if error.fields.get("join") else True
        except (KVStoreError, CarrierBrokenError, TokenRefusedError):
            return None
        if isinstance(asked, calls.PutEnd | calls.PutRevoke | calls.Commit | calls.Renew):
            return None  # the put had ended; if it had not, the oracle sees a put that is lost
        return None if leader is not self._cluster.master else False

    async def _flood(self, client: LyingClient, address: str) -> None:
        """Puts that are never ended, in its own namespace, reports that nodes fail, from hosts that
        it invents, and releases of leases that it does not have."""
        master = self._cluster.master
        segments = [] if master is None else sorted(master.state.pool.segments)
        count = self._random.randint(1, FLOOD_MAX)
        self._note(f"{client.process.name} floods with {count}")
        for number in range(count):
            key = Key(b"flood-%d" % number)
            asked: calls.Request = calls.Exists(Namespace(MINE), [key])
            if number % 20 == 0:
                start = calls.PutStart(
                    Namespace(MINE), [key], [10], None, False, 1, False, 0, "host-liar"
                )
                asked = start
            elif number % 20 == 1:
                host = f"invented-{number}"
                epoch = 0 if master is None else master.state.epoch
                asked = calls.ReportFailure(segments, "liar", host, "invented", epoch)
            elif number % 20 == 2:  # it guesses leases of others
                asked = calls.Release(range(number, number + RELEASED_MAX))
            with contextlib.suppress(KVStoreError, CarrierBrokenError, TokenRefusedError):
                await client.say(asked, address, "grpc")
        self._cluster.oracle.count("floods")

    async def _hoard(self, client: LyingClient, address: str) -> None:
        """Allocates until the master refuses, holds it all, and gives some of it up as if its
        bytes were still on their way. Then more of it would escape the quota."""
        size = self._random.randint(1, 4) << 10
        tokens: list[int] = []
        epoch = 0
        with contextlib.suppress(KVStoreError, CarrierBrokenError, TokenRefusedError):
            for number in range(HOARD_MAX):
                asked = calls.Allocate(Namespace(MINE), size, 0, "host-liar")
                grants = await client.say(asked, address, "grpc")
                assert isinstance(grants, calls.Grants)
                epoch, tokens = grants.epoch, [*tokens, *grants.tokens]
                if number % 5 == 4:
                    await client.say(calls.PutRevoke(epoch, [tokens.pop()], False), address, "grpc")
        self._note(f"{client.process.name} hoards {len(tokens)} times {size}")
        renewal = calls.Renew(Namespace(MINE), [], [], [], epoch, tokens, [], [])
        with contextlib.suppress(KVStoreError, CarrierBrokenError, TokenRefusedError):
            await client.say(renewal, address, "grpc")
        self._cluster.oracle.count("hoards")

    async def _forge(self, client: LyingClient, master: Master) -> None:
        """Writes headers into the extent of a put of its own: of an object of others, at any place,
        and of one that covers all that follows."""
        size = self._random.randint(1, 8) << 10
        key = Key(b"forged-%d" % self._random.getrandbits(40))
        start = calls.PutStart(
            Namespace(MINE), [key], [size], None, False, 1, False, 0, "host-liar"
        )
        try:
            grants = await client.say(start, master.process.name, "grpc")
        except (KVStoreError, CarrierBrokenError, TokenRefusedError):
            return
        assert isinstance(grants, calls.Grants)
        if not grants.segments or grants.segments[0] not in master.state.pool.segments:
            return
        memory = self._cluster.memory(master.state.pool.segments[grants.segments[0]].offer.uuid)
        if memory is None or not memory.linked:
            return
        self._note(f"{client.process.name} forges headers on {memory.node} at {grants.offsets[0]}")
        self._cluster.oracle.count("forged")
        payload = b"of the liar"
        theirs = [name for name in self._versions() if name[0] in NAMESPACES]
        begin, end = grants.offsets[0], grants.offsets[0] + extent_bytes(size)
        for at in range(begin, end - HEADER_BYTES, 2 * HEADER_BYTES):
            header = Header(
                Namespace(MINE), key, None, memory.size - at - HEADER_BYTES, grants.epoch,
                (1 << 60) + at, xxh3_64_intdigest(payload), b"",
            )  # fmt: skip
            if theirs and self._random.random() < 0.5:
                space, known = self._random.choice(theirs)
                header = header._replace(namespace=space, key=known, payload_size=len(payload))
            pack_into(memory.memory[at : at + HEADER_BYTES], header, memory.seed, at)
            memory.memory[at + HEADER_BYTES : at + HEADER_BYTES + len(payload)] = payload

    def _attacks(self) -> list[calls.Request]:
        """About objects and puts of others, which it knows as well as the master does."""
        master = self._cluster.master
        assert master is not None
        state = master.state
        theirs = Namespace(self._random.choice(NAMESPACES))
        named = [(name[1], version) for name, version in self._versions().items()
                 if name[0] == theirs]  # fmt: skip
        key, version = self._random.choice(named) if named else (Key(b"f0"), Version(1, 1))
        found: list[calls.Request] = [
            calls.Remove(theirs, [key]),
            calls.Clear(theirs, 1_000),
            calls.Clear(Namespace(""), 1_000),
            calls.Pin(theirs, [key], 86_400_000),
            calls.Unpin(theirs, [key]),
            calls.Exists(theirs, [key]),
            calls.Lookup(theirs, [key]),
            calls.ReportCorrupt(theirs, [key], [version.epoch], [version.counter], [bytes(16)]),
            calls.PutStart(theirs, [key], [10], None, False, 1, True, 0, "host-liar"),
            calls.Allocate(theirs, 10, 0, "host-liar"),
            calls.Renew(
                theirs, [key], [version.epoch], [version.counter], state.epoch, [], [bytes(16)], [0]
            ),
            calls.Drain(self._random.choice(sorted(self._names())), calls.DrainStep.BEGIN),
            calls.StartMoves(self._random.choice(sorted(self._names())), 0, 10, 1 << 20),
        ]
        tokens = [put.token for put in state.pending]
        if tokens:
            token = self._random.choice(tokens)
            of_puts: list[calls.Request] = [
                calls.PutEnd(state.epoch, [token]),
                calls.PutRevoke(state.epoch, [token], True),
                calls.Commit(state.epoch, token, Namespace(MINE), Key(b"taken"), None, 1, False),
                calls.Renew(Namespace(MINE), [], [], [], state.epoch, [token], [], []),
            ]
            found += 2 * of_puts
        return found

    # --- a node -------------------------------------------------------------------------------

    async def _lie_as_node(self, process: Process) -> None:
        cluster, random = self._cluster, self._random
        join = self._true_join(process.name)
        messages: list[calls.NodeMessage] = []
        if random.random() < 0.5:
            lie = self._draw(join)
            if lie is not None:
                self._note(f"{process.name} says {lie}")
                join = lie.message
        if join.segments and not join.segments[0].fresh:
            messages += self._exact_claims()
        # An old version, which no other object has.
        version = Version(0, random.getrandbits(60))
        for _ in range(random.randint(0, LIES_MAX)):
            lie = self._draw(random.choice(true_messages(version)))
            if lie is not None:
                self._note(f"{process.name} says {lie}")
                messages.append(lie.message)
        random.shuffle(messages)
        address = random.choice(cluster.masters)
        link = cluster.network.connect(process, address, "node")
        try:
            if not self._send(link, join):
                return
            kind, _ = await link.receive(SECOND)
            if kind != "message":
                return
            cluster.oracle.count("liars_joined")
            beats = random.randint(1, NODE_BEATS_MAX)
            while messages or beats:
                if messages:
                    self._send(link, messages.pop())
                else:
                    beats -= 1
                    self._send(link, calls.NodeBeat(beats))
                await self._hear(link)
        except BrokenStreamError:
            pass
        except TimedOutError:
            self._note(f"{process.name} hears nothing")
        finally:
            link.close()

    async def _hear(self, link: End) -> None:
        """Says that it has wiped what it was told to, for a tenth of a second or so."""
        try:
            kind, data = await link.receive(100 * MS)
        except TimedOutError:
            return
        if kind == "message":
            message = decode_master_message(data)
            if isinstance(message, calls.MasterWipe):
                self._send(link, calls.NodeWiped(message.order))

    def _true_join(self, name: str) -> calls.NodeJoin:
        random = self._random
        join = true_join(name, "host-liar", fresh=random.random() < 0.5)
        offer = join.segments[0]._replace(
            uuid=random.randbytes(16), size=self._cluster.segment_bytes, address=f"{name}:1",
            engine=None,
        )  # fmt: skip
        return join._replace(segments=[offer])

    def _exact_claims(self) -> list[calls.NodeMessage]:
        """An object of others, as it is, of which the liar holds no byte. Those with a time to live
        may be over when the claim arrives."""
        master = self._cluster.master
        if master is None:
            return []
        may_end = self._cluster.oracle.may_end
        known = [
            (name, parent, size, version)
            for name, parent, size, version in inside.claims_of(master.state)
            if name[0] in NAMESPACES and not may_end(version)
            and SUPERBLOCK_BYTES + extent_bytes(size) <= self._cluster.segment_bytes
        ]  # fmt: skip
        if not known:
            return []
        (namespace, key), parent, size, version = self._random.choice(known)
        self._note(f"a node claims {namespace}/{key.decode()} v{version.epoch}.{version.counter}")
        self._cluster.oracle.count("claimed_by_liars")
        claims = calls.NodeClaims(
            segment=0, first=True, last=True, namespaces=[namespace], namespace_of=[0], keys=[key],
            parents=[parent], sizes=[size], epochs=[version.epoch], counters=[version.counter],
            offsets=[SUPERBLOCK_BYTES],
        )  # fmt: skip
        return [claims]

    @staticmethod
    def _send(link: End, message: calls.NodeMessage) -> bool:
        """False: there is no encoding for it."""
        try:
            encoded = encode_node_message(message)
        except KVStoreError:
            return False
        link.send(encoded)
        return True

    # --- both ---------------------------------------------------------------------------------

    def _draw(self, true: Any) -> Lie | None:
        """A lie about one of the fields, each as likely; None: there is none that may be said."""
        by_field: dict[str, list[Lie]] = {}
        for lie in lies(true, self._theirs()):
            if self.may_be_said(lie, true):
                by_field.setdefault(lie.field.partition(".rows=")[0], []).append(lie)
        if not by_field:
            return None
        return self._random.choice(by_field[self._random.choice(list(by_field))])

    def _theirs(self) -> Theirs:
        cluster = self._cluster
        epoch = cluster.oracle.newest_epoch
        master = cluster.master
        mounted = () if master is None else sorted(master.state.pool.segments)
        memories = [node.memory for node in cluster.nodes]
        return Theirs(
            keys=[b"f0", b"s0-0"],
            namespaces=[*NAMESPACES],
            numbers=[epoch, epoch + 1, *mounted[:2]],
            texts=[*self._names(), memories[0].shm_name, "host-a", "host-b"],
            blobs=[memories[0].uuid, memories[0].token],
        )

    def _names(self) -> Iterable[str]:
        return [node.name for node in self._cluster.nodes]

    def _versions(self) -> dict[inside.Name, Version]:
        master = self._cluster.master
        return {} if master is None else inside.complete_objects(master.state)

    @property
    def _random(self) -> Random:
        return self._cluster.scheduler.random

    def _process(self, what: str) -> Process:
        name = f"{what}{len(self._processes)}"
        process = Process(self._cluster.scheduler, name, "host-liar")
        self._processes.append(process)
        return process

    def _spawn(self, process: Process, lying: Coroutine[Any, Any, None]) -> None:
        self._note(f"{process.name} begins to lie")
        process.spawn("lie", lying).result.then(process.kill)

    def _note(self, text: str) -> None:
        self._cluster.oracle.note(f"FAULT {text}")

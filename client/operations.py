"""Every verb of the client as a flow: arguments checked, values encoded, results decoded.

``Client`` drives these, and documents what each does.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union, cast

import numpy as np

from kvstore import calls
from kvstore.calls import DrainStep, PutOutcome, SegmentInfo, Version
from kvstore.client.arguments import (
    KINDS,
    SIZE_MAX,
    duration_ms,
    flag,
    one_of,
    sequence,
    text,
    whole,
)
from kvstore.client.flows import asking, getting, moving, putting
from kvstore.client.flows.asking import Match, ObjectStat
from kvstore.client.flows.devices import DeviceLooks, DeviceReads
from kvstore.client.flows.getting import Bad, Target
from kvstore.client.flows.moving import Moved
from kvstore.client.flows.objects import ObjectReads, headers
from kvstore.client.flows.placements import Placed, Replica
from kvstore.client.flows.putting import Items, PutOptions
from kvstore.client.flows.ranges import Parts, get_ranges
from kvstore.client.flows.steps import Context, Flow, Ready, ask
from kvstore.client.leases.leases import Granted, Lease, Named, Place
from kvstore.client.leases.views import Views, Watched
from kvstore.client.movers import Movers
from kvstore.client.values import (
    Buffer,
    Bytes1D,
    Columns,
    Described,
    Kind,
    Payload,
    Storable,
    Value,
    array_over,
    decode,
    decode_tensor,
    described_as,
    described_if_readable,
    encode_all,
    fillable,
    import_torch,
    read_descriptor,
    writable,
)
from kvstore.config import ClientConfig
from kvstore.device.memory import DeviceMemory, memory_of
from kvstore.device.streams import computing_on, handle_of
from kvstore.errors import (
    BufferMismatchError,
    CorruptObjectError,
    InvalidArgumentError,
    InvalidRangeError,
    NodeUnreachableError,
    ReservationLostError,
    SegmentGoneError,
    UnavailableError,
    UnsupportedValueError,
)
from kvstore.keys import packed_keys
from kvstore.limits import (
    BATCH_KEYS_MAX,
    BLOCKS_MAX,
    CHAINS_MAX,
    MATCH_KEYS_MAX,
    NAMESPACES_MAX,
    PIN_MS_MAX,
    REPLICAS_MAX,
    TTL_MS_MAX,
    Key,
    Namespace,
    check_count,
    check_key,
    check_keys,
    check_namespace,
)
from kvstore.memory.header import HEADER_BYTES
from kvstore.memory.mapping import is_shown
from kvstore.memory.raw import address_of
from kvstore.native import steps
from kvstore.native.kinds import STALE, ReadRow
from kvstore.texts import key_text

if TYPE_CHECKING:
    import torch

    from kvstore.device.device import Device

log = logging.getLogger("kvstore.client")

AnyKey = str | bytes
Duration = float | timedelta | str
"""In seconds, or a text with a unit: ``"90s"``, ``"1h"`` (``arguments.duration_ms``)."""
Pairs = Mapping[Any, Storable] | Iterable[tuple[AnyKey, Storable]]
"""Keys and their values."""
Stream = Union[int, "torch.cuda.Stream"]
"""A stream of a device: torch's, or the driver's handle of it."""
TIMEOUT_MS_MAX = 3_600_000
"""The longest time-out of one call; ``ClientConfig.timeout_ms`` has the same bound."""

View = Value | memoryview
"""What ``copy=False`` returns: bytes come as a read-only memoryview."""
Range = tuple[int, Buffer]
"""Where a part of a payload begins, in bytes, and memory for it, which is as long as the part."""
UNREADABLE = (CorruptObjectError, UnsupportedValueError)
"""Why no value can be made of an object's bytes here."""
Unreadable = CorruptObjectError | UnsupportedValueError
Found = View | None | Unreadable
"""A value, a miss, or why there is no value."""
DType = Union[str, "torch.dtype", "np.dtype[np.generic]", type]


class Raw(NamedTuple):
    """A value as bytes."""

    data: memoryview
    """Its payload."""
    described: Described
    """What was put; bytes, if its descriptor cannot be read."""
    version: Version


class _Bounded(Target):
    """A target that is read only up to a size."""

    __slots__ = ("size_max",)

    def __init__(self, key: Key, size_max: int | None) -> None:
        super().__init__(key)
        self.size_max = size_max

    def make_room(self, size: int) -> Payload:
        if self.size_max is not None and size > self.size_max:
            raise BufferMismatchError(
                f"the object has {size} bytes, more than {self.size_max}",
                size_bytes=size,
                key=self.key.hex(),
            )
        return super().make_room(size)


class _OnDevice(Target):
    """A target whose memory is allocated on a device."""

    __slots__ = ("device", "tensor")

    def __init__(self, key: Key, device: Device) -> None:
        super().__init__(key)
        self.device = device
        self.tensor = device.empty(0)

    def make_room(self, size: int) -> Payload:
        if self.tensor.numel() != size:
            self.tensor = self.device.empty(size)
        return memory_of(self.device, self.tensor) if size else []


class Operations:
    """Builds the flows, and holds the state that they share with the views. Threads: any."""

    def __init__(
        self, config: ClientConfig, context: Context, movers: Movers, views: Views
    ) -> None:
        self.config = config
        self.context = context
        self.movers = movers
        self.views = views
        self.devices = movers.devices

    # --- putting ------------------------------------------------------------------------------

    def put(
        self,
        key: AnyKey,
        value: Storable,
        namespace: str | None,
        parent: AnyKey | None,
        replicas: int | None,
        overwrite: bool,
        wait_ms: int | None,
        timeout_ms: int | None = None,
        ttl: Duration | None = None,
        stream: Stream | None = None,
    ) -> Flow[PutOutcome]:
        items = Items([check_key(key)], *self._encoded([value], stream))
        options = self._options(namespace, parent, False, replicas, overwrite, ttl=ttl)
        parts = items.parts[0]
        if not isinstance(parts, list):
            return (yield from self._put_from_device(items, options, wait_ms, timeout_ms, stream))[
                0
            ]
        if len(parts) > 1 and self.views.allocated:
            self._refuse_lost(items)
        lease = self.views.allocation(parts[0]) if len(parts) == 1 else None
        if lease is not None:
            named, until = yield from self._settle_commit(lease)
            if named is None:
                return (yield from self._commit(lease, items, options, until))
            if (named.namespace, named.key) == (options.namespace, items.keys[0]):
                return PutOutcome.STORED
        wait_ms = self._wait(wait_ms, timeout_ms)
        outcomes = yield from putting.put(self.context, items, options, wait_ms)
        return outcomes[0]

    def put_many(
        self,
        items: Pairs,
        namespace: str | None,
        parent: AnyKey | None,
        chain: bool,
        replicas: int | None,
        overwrite: bool,
        partial: bool,
        wait_ms: int | None,
        timeout_ms: int | None = None,
        ttl: Duration | None = None,
        stream: Stream | None = None,
    ) -> Flow[list[PutOutcome]]:
        given = items.items() if isinstance(items, Mapping) else items
        pairs = cast("Sequence[tuple[AnyKey, Storable]]", sequence("items", given, BATCH_KEYS_MAX))
        try:
            named = [key for key, _ in pairs]
        except (TypeError, ValueError):
            raise InvalidArgumentError("items are pairs of a key and a value, or a dict") from None
        keys = check_keys(named, distinct=True)
        options = self._options(namespace, parent, chain, replicas, overwrite, partial, ttl)
        encoded = Items(keys, *self._encoded([value for _, value in pairs], stream))
        if encoded.device is not None:
            return (yield from self._put_from_device(encoded, options, wait_ms, timeout_ms, stream))
        if self.views.allocated:
            self._refuse_lost(encoded)
        wait_ms = self._wait(wait_ms, timeout_ms)
        return (yield from putting.put(self.context, encoded, options, wait_ms))

    def put_chain(
        self,
        keys: Sequence[AnyKey],
        values: Sequence[Storable],
        namespace: str | None,
        parent: AnyKey | None,
        replicas: int | None,
        partial: bool,
        wait_ms: int | None,
        timeout_ms: int | None = None,
        ttl: Duration | None = None,
        stream: Stream | None = None,
    ) -> Flow[list[PutOutcome]]:
        keys = _keys(keys)
        values = cast("Sequence[Storable]", _rows("values", values))
        if len(keys) != len(values):
            raise InvalidArgumentError(
                f"a chain needs one value per key: {len(keys)} keys, {len(values)} values"
            )
        pairs = zip(keys, values, strict=True)
        return self.put_many(
            pairs, namespace, parent, True, replicas, False, partial, wait_ms, timeout_ms, ttl,
            stream,
        )  # fmt: skip

    def _encoded(self, values: Sequence[Storable], stream: Stream | None) -> Columns:
        if stream is None:
            return encode_all(values, self.devices)
        with computing_on([stream]):
            return encode_all(values, self.devices)

    def _put_from_device(
        self,
        items: Items,
        options: PutOptions,
        wait_ms: int | None,
        timeout_ms: int | None,
        stream: Stream | None,
    ) -> Flow[list[PutOutcome]]:
        """Puts values that are in the memory of one device."""
        yield _ready(items.device, items.parts, stream)
        wait_ms = self._wait(wait_ms, timeout_ms)
        return (yield from putting.put(self.context, items, options, wait_ms))

    def allocate(
        self,
        shape: int | Sequence[int],
        dtype: DType,
        kind: Literal["torch", "numpy"],
        wait_ms: int | None,
        timeout_ms: int | None = None,
    ) -> Flow[Value]:
        one_of("kind", kind, KINDS[:2])
        described, size = described_as(shape, dtype, kind)
        whole("the size", size, 0, SIZE_MAX, "bytes")
        grants, replica, until = yield from putting.allocate(
            self.context, size, self._wait(wait_ms, timeout_ms)
        )
        segment, offset = replica
        memory = self.movers.view(segment, offset + HEADER_BYTES, size)
        if memory is None:
            yield from putting.revoke(grants.epoch, grants.tokens)
            raise NodeUnreachableError(
                "no node on this host has free space, and an allocation must be on this host",
                advice="Start a kvstore-node here, or pass memory= to the client.",
                node=segment.node,
            )
        array = _array(memory)
        granted = Granted(grants.epoch, grants.tokens[0], segment, offset, size)
        value = decode(described, array)
        self.views.add(array, granted, until, self.movers.watch(segment), value=value)
        return value

    def _refuse_lost(self, items: Items) -> None:
        """Raises ReservationLostError if an item is an allocation that this client has lost."""
        parts = cast("Sequence[list[memoryview]]", items.parts)  # the host's memory
        for part in itertools.chain.from_iterable(parts):
            lease = self.views.allocation(part)
            if lease is not None and not lease.held:
                raise _lost()

    def _settle_commit(self, lease: Lease) -> Flow[tuple[Named | None, float]]:
        """Returns the object that an allocation has become by a commit without an answer, or None
        if it is still an allocation; and until when the client holds it. (That commit may still
        arrive. Its object is leased until then, too.)

        Raises:
            ReservationLostError: it is neither.
        """
        named = lease.unanswered
        if named is None:
            return None, self.context.clock() + lease.seconds_left
        asked = self.context.clock()
        assert isinstance(lease.what, Granted)
        renew = _renewal(named, lease.what.place, [named.counter])
        renewed = yield from ask(renew, calls.Renewed)
        until = asked + renewed.lease_ms / 1000 - self.context.lease_margin_s
        if renewed.keys_held[0] and lease.held:
            lease.become(named, until)
            return named, until
        if not renewed.tokens_held[0]:
            raise _lost()
        return None, min(until, self.context.clock() + lease.seconds_left)

    def _commit(
        self, lease: Lease, item: Items, options: PutOptions, until: float
    ) -> Flow[PutOutcome]:
        """Puts the object whose payload was computed in an allocation."""
        granted = lease.what
        assert isinstance(granted, Granted)
        if not lease.held:
            raise _lost()
        replica = Replica(granted.segment, granted.offset)
        place = (granted.epoch, granted.token, replica)
        named = Named(options.namespace, item.keys[0], granted.epoch, granted.token)
        try:
            outcome = yield from putting.commit(
                self.context, item, place, options, until, lease.header
            )
        except SegmentGoneError:  # its node has joined another master, or left
            raise _lost() from None
        except UnavailableError:
            lease.unanswered = named
            raise
        if outcome is PutOutcome.REFUSED:
            raise _lost()
        if outcome is not PutOutcome.STORED:  # the memory is quarantined, readable until then
            lease.unneeded()
            return outcome
        asked = self.context.clock()
        renewed = yield from ask(_renewal(named, granted.place), calls.Renewed)
        held_s = renewed.lease_ms / 1000 if renewed.keys_held[0] else 0.0
        lease.become(named, asked + held_s - self.context.lease_margin_s)
        return outcome

    # --- getting ------------------------------------------------------------------------------

    def get(
        self,
        key: AnyKey,
        namespace: str | None,
        copy: bool,
        kind: Kind | None,
        timeout_ms: int | None = None,
        device: str | torch.device | None = None,
    ) -> Flow[View | None]:
        (found,) = yield from self._get([key], namespace, copy, kind, timeout_ms, device)
        if isinstance(found, UNREADABLE):
            raise found
        return found

    def get_many(
        self,
        keys: Sequence[AnyKey],
        namespace: str | None,
        copy: bool,
        kind: Kind | None,
        timeout_ms: int | None = None,
        device: str | torch.device | None = None,
    ) -> Flow[list[View | None]]:
        found = yield from self._get(keys, namespace, copy, kind, timeout_ms, device)
        values = [None if isinstance(each, UNREADABLE) else each for each in found]
        unreadable = [each for each in found if isinstance(each, UNREADABLE)]
        if unreadable:
            self.context.count("unreadable_objects", len(unreadable))
            log.warning(
                "unreadable_objects namespace=%s objects=%d first=%s",
                self._namespace(namespace), len(unreadable), unreadable[0],
            )  # fmt: skip
        return values

    def _get(
        self,
        keys: Sequence[AnyKey],
        namespace: str | None,
        copy: bool,
        kind: Kind | None,
        timeout_ms: int | None,
        device: str | torch.device | None,
    ) -> Flow[list[Found]]:
        if kind is not None:
            one_of("kind", kind, KINDS)
        if kind == "torch":
            import_torch()
        copy = flag("copy", copy)
        checked = check_keys(_keys(keys), distinct=False)
        space = self._namespace(namespace)
        if device is not None and (name := str(device)) != "cpu":
            if kind not in (None, "torch"):
                raise InvalidArgumentError("get(device=...) returns a torch tensor")
            if not copy:
                return (yield from self._view_on_device(checked, space, name, timeout_ms))
            return (yield from self._get_on_device(checked, space, name, timeout_ms))
        if not copy:
            return (yield from self._view_many(checked, space, kind, timeout_ms))
        targets = [Target(key) for key in checked]
        yield from getting.get(self.context, space, targets, timeout_ms)
        return [_decoded(target, kind) for target in targets]

    def _get_on_device(
        self, keys: Sequence[Key], namespace: Namespace, name: str, timeout_ms: int | None
    ) -> Flow[list[Found]]:
        device = self.devices.of(name)
        targets = [_OnDevice(key, device) for key in keys]
        yield from getting.get(self.context, namespace, targets, timeout_ms, DeviceReads)
        return [
            None
            if target.descriptor is None
            else _tensor(target.key, target.descriptor, target.tensor)
            for target in targets
        ]

    def _view_on_device(
        self, keys: Sequence[Key], namespace: Namespace, name: str, timeout_ms: int | None
    ) -> Flow[list[Found]]:
        """Tensors over the pool's own memory, leased, of objects that are in the memory of this
        device; copies of all others, and of those that are not found there after all."""
        context, device = self.context, self.devices.of(name)
        views: list[Found] = [None] * len(keys)
        here: dict[int, tuple[DeviceLooks, list[tuple[int, Placed, int]]]] = {}
        placed = yield from getting.locate(context, namespace, keys)
        for index, known in enumerate(placed):
            if known is None or not known.size:
                continue
            for segment, offset in known.replicas:
                if self.movers.is_on(segment, device):
                    looks = DeviceLooks(segment, namespace, verify=context.verify_views)
                    looks, of = here.setdefault(id(segment), (looks, []))
                    looks.add(known, offset, keys[index], [])
                    of.append((index, known, offset))
                    break
        if here:
            errors = yield [looks for looks, _ in here.values()]
            assert isinstance(errors, list)
            for (looks, of), error in zip(here.values(), errors, strict=True):
                if error is None:
                    self._lend(namespace, keys, looks, of, views)
        rest = [index for index, view in enumerate(views) if view is None]
        if rest:
            wanted = [keys[index] for index in rest]
            copies = yield from self._get_on_device(wanted, namespace, name, timeout_ms)
            for index, copied in zip(rest, copies, strict=True):
                views[index] = copied
        return views

    def _lend(
        self,
        namespace: Namespace,
        keys: Sequence[Key],
        looks: DeviceLooks,
        of: Sequence[tuple[int, Placed, int]],
        views: list[Found],
    ) -> None:
        """Puts tensors over the objects that were found into ``views``, and watches them."""
        held: list[Watched] = []
        now = self.context.clock()
        rows = zip(of, looks.outcomes, looks.lent, strict=True)
        for (index, placed, offset), descriptor, lent in rows:
            if lent is None or not isinstance(descriptor, bytes) or now >= placed.until:
                continue
            views[index] = tensor = _tensor(keys[index], descriptor, lent.tensor)
            if isinstance(tensor, UNREADABLE):
                continue
            named = Named(namespace, keys[index], placed.epoch, placed.counter)
            place = Place(looks.segment.uuid, offset, ends_with_owner=True)
            held.append((lent.owner, lent.address, named, placed.until, place, tensor))
        self.views.add_many(held, self.movers.watch(looks.segment))

    def get_raw(
        self,
        key: AnyKey,
        namespace: str | None,
        size_max: int | None,
        timeout_ms: int | None = None,
    ) -> Flow[Raw | None]:
        if size_max is not None:
            size_max = whole("size_max", size_max, 0, SIZE_MAX, "bytes")
        target = _Bounded(check_key(key), size_max)
        yield from getting.get(self.context, self._namespace(namespace), [target], timeout_ms)
        if target.descriptor is None or target.data is None or target.placed is None:
            return None
        data = memoryview(target.data)  # type: ignore[arg-type]
        version = Version(target.placed.epoch, target.placed.counter)
        return Raw(data, described_if_readable(target.descriptor), version)

    def get_into(
        self,
        keys: Sequence[AnyKey] | AnyKey,
        buffers: Sequence[Buffer | Sequence[Buffer]] | Buffer,
        namespace: str | None,
        timeout_ms: int | None = None,
        stream: Stream | None = None,
    ) -> Flow[list[int | None]]:
        if isinstance(keys, str | bytes):
            one = cast("Buffer | Sequence[Buffer]", buffers)
            targets = [Target(check_key(keys), *fillable(one, self.devices))]
        else:
            checked = check_keys(_keys(keys), distinct=False)
            pairs = zip(checked, _per_key(checked, buffers, "buffers"), strict=True)
            targets = [Target(key, *fillable(each, self.devices)) for key, each in pairs]
        device = _device_of(targets)
        _check_apart([(target.key, target.views or []) for target in targets])
        kind = ObjectReads
        if device is not None:
            yield _ready(device, [target.views or [] for target in targets], stream)
            kind = DeviceReads
        space = self._namespace(namespace)
        yield from getting.get(self.context, space, targets, timeout_ms, kind)
        return [None if target.placed is None else target.placed.size for target in targets]

    def get_ranges(
        self,
        keys: Sequence[AnyKey] | AnyKey,
        ranges: Sequence[Sequence[Range]] | Sequence[Range],
        namespace: str | None,
        timeout_ms: int | None = None,
    ) -> Flow[list[int | None]]:
        if isinstance(keys, str | bytes):
            wanted = [_parts(check_key(keys), cast("Sequence[Range]", ranges))]
        else:
            checked = check_keys(_keys(keys), distinct=False)
            pairs = zip(checked, _per_key(checked, ranges, "lists of ranges"), strict=True)
            wanted = [_parts(key, each) for key, each in pairs]
        _check_apart([(parts.key, [view for _, view in parts.ranges]) for parts in wanted])
        space = self._namespace(namespace)
        yield from get_ranges(self.context, space, wanted, timeout_ms)
        return [None if parts.placed is None else parts.placed.size for parts in wanted]

    def _view_many(
        self,
        keys: Sequence[Key],
        namespace: Namespace,
        kind: Kind | None,
        timeout_ms: int | None,
    ) -> Flow[list[Found]]:
        """Values over the pool's own memory, leased; copies of objects that are not mapped here."""
        views: list[Found] = [None] * len(keys)
        todo = list(range(len(keys)))
        copied: list[int] = []
        bad: dict[int, list[Bad]] = {}
        fresh = False
        for _ in range(getting.ATTEMPTS):
            placed = yield from getting.locate(
                self.context, namespace, [keys[index] for index in todo], fresh=fresh
            )
            here: dict[int, _Looks] = {}
            for index, known in zip(todo, placed, strict=True):
                if known is None:
                    continue
                if index in bad:
                    bad[index] = getting.confirmed(bad[index], known)
                for replica in getting.in_order(known, bad.get(index, ())):
                    segment, offset = replica
                    looks = here.get(id(segment))
                    if looks is None and (shown := self.movers.shown(segment)) is not None:
                        looks = here[id(segment)] = _Looks(segment, shown, [], [])
                    if looks is not None:
                        size, epoch, counter, _, _ = known
                        looks.rows.append((offset, size, epoch, counter, keys[index], None))
                        looks.of.append((index, known, replica))
                        break
                else:
                    copied.append(index)
            todo, fresh = [], True
            for looks in here.values():
                todo += self._look(namespace, looks, views, kind, bad)
            if not todo:
                break
            for index in todo:
                self.context.placements.forget(namespace, keys[index])
        if bad:
            known_bad = [
                each
                for index, seen in bad.items()
                if views[index] is not None or (index in todo and len(seen) > 1)
                for each in seen
            ]
            yield from getting.report_corrupt(self.context, namespace, known_bad)
        if copied:
            values = yield from self._get(
                [keys[index] for index in copied], namespace, True, kind, timeout_ms, None
            )
            for index, value in zip(copied, values, strict=True):
                views[index] = value
        return views

    def _look(
        self,
        namespace: Namespace,
        looks: _Looks,
        views: list[Found],
        kind: Kind | None,
        bad: dict[int, list[Bad]],
    ) -> list[int]:
        """Puts values over the segment into ``views``. Returns the indexes of objects to look up
        again, and adds to ``bad`` the places that hold other bytes now."""
        segment, shown, rows, of = looks
        context = self.context
        try:
            memory = self.movers.memory(segment)
            mounted = self.movers.watch(segment)
            found = headers(memory, segment, namespace, rows, verify=context.verify_views)
        except (SegmentGoneError, InvalidRangeError):
            context.segments.forget(segment)
            return [index for index, _, _ in of]
        base = address_of(shown)
        read_only = shown.toreadonly()
        stale: list[int] = []
        held: list[Watched] = []
        now = context.clock()
        for row, (index, placed, replica), descriptor in zip(rows, of, found, strict=True):
            offset, size, epoch, counter, key, _ = row
            if now >= placed.until:
                stale.append(index)
                continue
            if not isinstance(descriptor, bytes):
                if descriptor == STALE:
                    context.count("stale_reads")
                else:
                    getting.mismatch(context, namespace, Key(key), replica)
                bad.setdefault(index, []).append(Bad(Key(key), placed, replica))
                stale.append(index)
                continue
            at = offset + HEADER_BYTES
            tensor: Value | None = None
            try:
                wanted = kind or read_descriptor(descriptor).kind
                claimed = shown if wanted == "torch" else read_only  # torch takes no other
                array = array_over(descriptor, kind, claimed, at, size)
                if wanted == "numpy":
                    views[index] = array
                elif wanted == "bytes":
                    views[index] = memoryview(array)  # type: ignore[arg-type]
                else:
                    views[index] = tensor = decode(descriptor, cast("Bytes1D", array), kind)
            except UNREADABLE as error:
                views[index] = _naming(error, Key(key))
                continue
            if size:
                named = Named(namespace, Key(key), epoch, counter)
                place = Place(segment.uuid, offset)
                held.append((array, base + at, named, placed.until, place, tensor))
        self.views.add_many(held, mounted)
        return stale

    # --- asking -------------------------------------------------------------------------------

    def match_prefix(
        self, keys: Sequence[AnyKey], namespaces: Sequence[str | None]
    ) -> Flow[list[Match]]:
        namespaces = cast("Sequence[str | None]", sequence("namespaces", namespaces))
        if not 0 < len(namespaces) <= NAMESPACES_MAX:
            raise InvalidArgumentError(f"match_prefix takes 1 to {NAMESPACES_MAX} namespaces")
        spaces = [self._namespace(each) for each in namespaces]
        return (yield from asking.match_prefix(spaces, packed_keys(_keys(keys), MATCH_KEYS_MAX)))

    def lookup(self, keys: Sequence[AnyKey], namespace: str | None) -> Flow[list[int | None]]:
        checked = check_keys(_keys(keys), distinct=False)
        placed = yield from getting.locate(
            self.context, self._namespace(namespace), checked, fresh=True
        )
        return [None if known is None else known.size for known in placed]

    def exists(
        self, keys: Sequence[AnyKey], namespace: str | None, lease: bool = False
    ) -> Flow[list[bool]]:
        return asking.exists(
            self._namespace(namespace), packed_keys(_keys(keys)), flag("lease", lease)
        )

    def pin(
        self, keys: Sequence[AnyKey], duration: Duration, namespace: str | None
    ) -> Flow[list[bool]]:
        hold_ms = duration_ms("seconds", duration, PIN_MS_MAX)
        checked = check_keys(_keys(keys), distinct=False)
        return asking.pin(self._namespace(namespace), checked, hold_ms)

    def unpin(self, keys: Sequence[AnyKey], namespace: str | None) -> Flow[list[bool]]:
        return asking.unpin(self._namespace(namespace), check_keys(_keys(keys), distinct=False))

    def remove(self, keys: Sequence[AnyKey], namespace: str | None) -> Flow[list[bool]]:
        checked = check_keys(_keys(keys), distinct=False)
        return asking.remove(self.context, self._namespace(namespace), checked)

    def clear_some(self, namespace: str | None) -> Flow[calls.Cleared]:
        space = "" if namespace is None else check_namespace(namespace)
        return asking.clear_some(self.context, space)

    def stat(self, key: AnyKey, namespace: str | None) -> Flow[ObjectStat | None]:
        return asking.stat(self.context, self._namespace(namespace), check_key(key))

    def status(self) -> Flow[calls.ClusterStatus]:
        status = yield from ask(calls.Status(), calls.ClusterStatus)
        while status.next_cursor:
            page = yield from ask(calls.Status(status.next_cursor), calls.ClusterStatus)
            status = status.with_page(page)
        return status

    def reach(self) -> Flow[None]:
        """The cheapest question to the master that leads."""
        nothing = calls.Renew(self._namespace(None), (), (), (), 0, ())
        yield from ask(nothing, calls.Renewed)

    def traffic(self, namespace: str | None) -> Flow[calls.TrafficReport]:
        space = "" if namespace is None else check_namespace(namespace)
        report = yield from ask(calls.Traffic(space), calls.TrafficReport)
        while report.next_cursor:
            request = calls.Traffic(space, report.next_cursor)
            report = report.with_page((yield from ask(request, calls.TrafficReport)))
        return report

    def chains(
        self, namespace: str | None, keys: Sequence[AnyKey], count: int
    ) -> Flow[calls.ChainsFound]:
        count = whole("count", count, 0, SIZE_MAX)
        check_count(count, CHAINS_MAX, "chains")
        checked = check_keys(_keys(keys), distinct=False, keys_max=CHAINS_MAX)
        if checked and namespace is None:
            raise InvalidArgumentError("blocks are looked for in one namespace: name it")
        space = "" if namespace is None else check_namespace(namespace)
        return ask(calls.Chains(space, checked, count), calls.ChainsFound)

    def blocks(
        self, keys: Sequence[AnyKey], above: int, namespace: str | None
    ) -> Flow[calls.BlocksFound]:
        above = whole("above", above, 0, SIZE_MAX)
        check_count(above, BLOCKS_MAX, "blocks above")
        checked = check_keys(_keys(keys), distinct=False, keys_max=BLOCKS_MAX)
        request = calls.Blocks(self._namespace(namespace), checked, above)
        return ask(request, calls.BlocksFound)

    def drain(self, node: str, undo: bool, leave: bool) -> Flow[calls.Drained]:
        node, undo, leave = text("node", node), flag("undo", undo), flag("leave", leave)
        if undo and leave:
            raise InvalidArgumentError("leave and undo exclude each other")
        step = DrainStep.UNDO if undo else DrainStep.LEAVE if leave else DrainStep.BEGIN
        return ask(calls.Drain(node, step), calls.Drained)

    def move_some(
        self, node: str, cursor: int, repair: bool, evict_up_to: calls.Version = calls.NO_VERSION
    ) -> Flow[Moved]:
        node, cursor = text("node", node), whole("cursor", cursor, 0, CURSOR_MAX)
        if flag("repair", repair):
            return moving.repair_some(self.context, node)
        return moving.move_some(self.context, node, cursor, evict_up_to)

    def list_page(self, namespace: str, prefix: bytes, cursor: int) -> Flow[calls.Listed]:
        space = text("namespace", namespace) and check_namespace(namespace)
        begin = b"" if type(prefix) in (bytes, str) and not prefix else check_key(prefix)
        cursor = whole("cursor", cursor, 0, CURSOR_MAX)
        request = calls.ListObjects(space, begin, cursor, LIST_PAGE)
        return ask(request, calls.Listed)

    # --- arguments ----------------------------------------------------------------------------

    def _namespace(self, namespace: str | None) -> Namespace:
        return check_namespace(self.config.namespace if namespace is None else namespace)

    def _wait(self, wait_ms: int | None, timeout_ms: int | None) -> int:
        wanted = self.config.put_wait_ms
        if wait_ms is not None:
            wanted = whole("wait_ms", wait_ms, 0, SIZE_MAX, "milliseconds")
        longest = self.config.timeout_ms
        if timeout_ms is not None:
            longest = whole("timeout_ms", timeout_ms, 1, TIMEOUT_MS_MAX, "milliseconds")
        # The master must answer before the call's own time-out, so that its error can say why.
        return max(0, min(wanted, longest * 9 // 10))

    def _options(
        self,
        namespace: str | None,
        parent: AnyKey | None,
        chain: bool,
        replicas: int | None,
        overwrite: bool,
        partial: bool = False,
        ttl: Duration | None = None,
    ) -> PutOptions:
        count = self.config.replicas
        if replicas is not None:
            count = whole("replicas", replicas, 1, REPLICAS_MAX)
        return PutOptions(
            namespace=self._namespace(namespace),
            parent=None if parent is None else check_key(parent),
            chain=chain,
            replicas=count,
            overwrite=flag("overwrite", overwrite),
            partial=flag("partial", partial),
            ttl_ms=0 if ttl is None else duration_ms("ttl", ttl, TTL_MS_MAX),
        )


def _decoded(target: Target, kind: Kind | None) -> Found:
    if target.descriptor is None or target.data is None:
        return None
    try:
        return decode(target.descriptor, target.data, kind)
    except UNREADABLE as error:
        return _naming(error, target.key)


def _tensor(key: Key, descriptor: bytes, flat: torch.Tensor) -> torch.Tensor | Unreadable:
    try:
        return decode_tensor(descriptor, flat)
    except UNREADABLE as error:
        return _naming(error, key)


def _naming(error: Unreadable, key: Key) -> Unreadable:
    """The same error, about this object."""
    named = type(error)(
        f"no value can be made of {key_text(key)}: {error.message}", advice=error.advice
    )
    named.fields = {**error.fields, "key": key.hex()}
    return named


def _ready(device: Device | None, payloads: Sequence[Payload], stream: Stream | None) -> Ready:
    """Waits for what the payloads come after; for payloads that do not say it, and if a stream is
    given, for what was queued there before the call."""
    assert device is not None
    memories = [payload for payload in payloads if not isinstance(payload, list)]
    events = [event for memory in memories for event in memory.after]
    if stream is not None or not all(memory.after for memory in memories):
        events.append(device.driver.mark(handle_of(stream)))
    return Ready(device, events)


def _device_of(targets: Sequence[Target]) -> Device | None:
    """The device whose memory all targets are; None: memory of the host."""
    devices = {
        None if isinstance(each.views, list) else each.views.device
        for each in targets
        if each.views  # there is memory to fill
    }
    if len(devices) > 1:
        raise BufferMismatchError(
            "the buffers of one call are in different memories",
            advice="Make a call for each device, and one for the host's memory.",
        )
    return devices.pop() if devices else None


def _keys(keys: object) -> Sequence[Any]:
    return sequence("keys", keys)


def _rows(name: str, values: object) -> Sequence[object]:
    """Values or buffers, one per key: also the rows of an array or a tensor."""
    if isinstance(values, np.ndarray) and not values.ndim:
        raise InvalidArgumentError(f"{name} is a sequence, and this is one number")
    try:
        return sequence(name, values)
    except (ValueError, RuntimeError) as error:  # a tensor without dimensions, for example
        raise InvalidArgumentError(f"{name} is a sequence: {error}") from None


def _per_key(keys: Sequence[Key], given: object, what: str) -> Sequence[Any]:
    """What is given for each key. Raises InvalidArgumentError: not one for each."""
    each = _rows(what, given)
    if len(each) != len(keys):
        raise InvalidArgumentError(
            f"{len(keys)} keys and {len(each)} {what}", advice="Give one for each key."
        )
    return each


def _parts(key: Key, ranges: Sequence[Range]) -> Parts:
    flat: list[tuple[int, memoryview]] = []
    for pair in sequence("ranges", ranges):
        try:
            offset, buffer = cast("Range", pair)
        except (TypeError, ValueError):
            raise InvalidArgumentError(
                "ranges are pairs of an offset in bytes and a buffer"
            ) from None
        offset = whole("an offset", offset, 0, OFFSET_MAX, "bytes")
        views, _ = writable(buffer)
        flat += [(offset, view) for view in views if len(view)]
    return Parts(key, flat)


def _check_apart(targets: Sequence[tuple[Key, Payload]]) -> None:
    """Checks the memory that one call fills, which is all of the host or all of one device.

    Raises:
        InvalidArgumentError: some of it is given twice, and would hold bytes of two values.
        BufferMismatchError: it is a view of the pool.
    """
    host: list[memoryview] = []
    on_device: list[DeviceMemory] = []
    for _, payload in targets:
        if isinstance(payload, list):
            host += payload
        else:
            on_device.append(payload)
    if on_device and DeviceMemory.joined(on_device).overlaps_itself:
        raise _not_apart("the buffers")
    if len(host) > 1 and (two := steps.overlap(host)) is not None:
        of = [key for key, payload in targets if isinstance(payload, list) for _ in payload]
        raise _not_apart(f"buffers of {' and '.join(key_text(of[each]) for each in two)}")
    if any(map(is_shown, host)):
        raise BufferMismatchError(
            "a view of the pool is read-only", advice="Get into memory of your own."
        )


def _not_apart(what: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{what} share memory: the bytes of one value would overwrite those of another",
        advice="Give each value memory of its own.",
    )


LIST_PAGE = 1_000
CURSOR_MAX = (1 << 64) - 1
OFFSET_MAX = (1 << 62) - 1


def seconds(timeout_ms: int) -> float:
    """The time-out of one call, in seconds. Raises InvalidArgumentError."""
    return whole("timeout_ms", timeout_ms, 1, TIMEOUT_MS_MAX, "milliseconds") / 1000


class _Looks(NamedTuple):
    """Headers to check in one segment, and their objects."""

    segment: SegmentInfo
    shown: memoryview
    """``Movers.shown``."""
    rows: list[ReadRow]
    of: list[tuple[int, Placed, Replica]]


def _renewal(named: Named, place: Place, tokens: Sequence[int] = ()) -> calls.Renew:
    """Asks whether an allocation has become this object."""
    return calls.Renew(
        named.namespace, [named.key], [named.epoch], [named.counter], named.epoch, tokens,
        [place.uuid], [place.offset],
    )  # fmt: skip


def _lost() -> ReservationLostError:
    return ReservationLostError(
        "this allocation is lost: its deadline passed before it could be renewed",
        advice="Stop writing to it and allocate again; kvstore status says whether the "
        "master answers.",
    )


def _array(memory: memoryview) -> Bytes1D:
    """A new array over this memory; ``np.frombuffer`` refuses to be empty."""
    return np.frombuffer(memory, np.uint8) if memory.nbytes else np.empty(0, np.uint8)

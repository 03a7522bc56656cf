"""``Client``: the blocking client. Any thread may call it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Self, TypeVar, cast

import numpy as np

from kvstore import calls, limits
from kvstore.calls import DrainStep, PutOutcome
from kvstore.client import fork_support, validation
from kvstore.client.client_resources import ClientResources, ClientStats, MasterHTTP
from kvstore.client.flows import allocate, control_calls, copy_objects, get, put, read_objects
from kvstore.client.flows.control_calls import EngineMatchResult, ObjectStat, PrefixMatchResult
from kvstore.client.flows.copy_objects import MoveProgress
from kvstore.client.flows.read_objects import GetOptions
from kvstore.client.flows.steps import CallMaster, Flow, SleepFor, WaitForDevice, ask
from kvstore.client.flows.write_objects import PutOptions
from kvstore.client.leases.lease_table import Lease
from kvstore.client.rpc.stub import MasterStub, wait_in_call
from kvstore.client.tracing import traceparent, tracing
from kvstore.client.validation import AnyKey, DType, Duration, Pairs, Range, Stream
from kvstore.client.values import (
    Buffer,
    Kind,
    Payload,
    Storable,
    Value,
    View,
    described_as,
    import_torch,
    writable,
)
from kvstore.config import ClientConfig, load, parse_size
from kvstore.errors import ClosedError, DeadlineExceededError, InvalidArgumentError, KVStoreError
from kvstore.limits import Key, Namespace, check_count, check_key, check_keys, check_namespace
from kvstore.memory.process_memory import cuda_device_at, memory_at
from kvstore.native.packed_keys import packed_keys
from kvstore.runtime.addresses import join_address, shown_place, split_address
from kvstore.runtime.cancellation import CallCancelledError, CancelToken, current
from kvstore.runtime.child_process import start_master
from kvstore.runtime.clock import uptime

if TYPE_CHECKING:
    import torch

    from kvstore.device.device import Device

ResultT = TypeVar("ResultT")
P = ParamSpec("P")

LIST_PAGE = 1_000
"""Objects of one page of ``list_objects``."""

PUT_WAIT_MS = 1_000
"""How long a put waits for space when everything is leased, unless the call says so: most reads end
sooner. At most half of the call's time."""


class Client:
    """A client of one store.

        with Client("127.0.0.1:50001") as client:
            client.put("greeting", tensor)
            tensor = client.get("greeting")          # None on a miss

    Keys are ``bytes`` or ``str`` of 1 to 256 bytes. Every method that takes a ``namespace`` uses
    the configured one where it is None. The client connects at its first call. A call lasts at most
    its ``timeout_ms`` (None: the configured one, by default 10 s); a master that cannot be reached
    is tried again until then. ``list_objects`` and ``clear`` have that time for each page or slice.
    All methods may be called from any thread. In a program that has set a provider of OpenTelemetry
    tracers before it made the client, each call is a span.

    All methods may raise, besides what they name:

    * MasterUnreachableError: no master was found in time; ``fields`` name the addresses.
    * DeadlineExceededError: the master was found, but did not answer in time.
    * InvalidKeyError, BatchTooLargeError, InvalidArgumentError: a wrong argument; nothing sent.
    * ClosedError: after ``close``.

    A failed call leaves the client as it was; nothing needs to be cleaned up. If another exception
    passes through a call, such as a signal handler's, the client drops its connections and connects
    again at its next call.

    After ``os.fork`` (also by ``multiprocessing``) the client can be used in both processes: in
    the child it begins anew by itself, with connections of its own. Views and allocations that the
    child has inherited are the parent's: ``lease`` says that they are not held, an allocation
    cannot be put there, and dropping one gives nothing back. Their bytes can be read for as long
    as the parent holds them. A node or master that the parent contributes is ended by the parent.

    A client that is pickled (for a Ray actor, or ``multiprocessing`` with ``spawn``) arrives as a
    new one of the same settings, which contributes no memory.
    """

    def __init__(
        self,
        master: str | None = None,
        *,
        memory: int | str | None = None,
        config: ClientConfig | None = None,
        **settings: object,
    ) -> None:
        """
        Args:
            master: ``host:port``; None: ``KVSTORE_MASTER``, a file, or ``127.0.0.1:50001``.
            memory: also contribute a segment of this size (``"2GiB"``), served by a child
                process that ends with this client.
            config: all settings at once, instead of those of environment, file and arguments.
            **settings: any other field of ``ClientConfig``: ``timeout_ms=500``,
                ``transports=("tcp",)``, ``namespace="llama"``.

        Raises:
            ConfigError: an unknown or wrong setting.
            StartupError, MasterUnreachableError: only with ``memory``: the segment could not be
                made, or not joined.
        """
        if config is None:
            config = load(ClientConfig, {"master": master, "memory": memory, **settings})
        self.config = config
        self._default_namespace = check_namespace(config.namespace)
        self._timeout_s = config.timeout_ms / 1000
        self._state = ClientResources(self.config)
        self._context = self._state.context
        self._tracing = tracing(shown_place(config.master))
        self._is_cut = False
        """Whether a foreign exception has passed through a call: the next one begins anew."""
        fork_support.watch(self)
        try:
            self._state.contribute()
        except BaseException:
            self.close()
            raise

    @property
    def _stub(self) -> MasterStub:
        return self._state.stub

    def _check_calls(self, check: Callable[[calls.Request], None]) -> None:
        """Has ``check`` called before each call to the master, in the calling thread. It may refuse
        the call by raising a ``KVStoreError``."""
        self._stub.check = check

    def _reset_after_fork(self) -> None:
        """Called automatically in the child of a fork; see the class."""
        self._state.reset_after_fork()

    def _close_after_fork(self) -> None:
        self._state.give_up()

    def __del__(self) -> None:
        state = self.__dict__.get("_state")
        if state is not None:
            state.close_from_finalizer()

    @classmethod
    def embedded(cls, memory: int | str = "1GiB", **settings: Any) -> Self:
        """A whole store in one process tree: master and node as children, ended by ``close``.

        For a laptop, a test or a single host. Other processes of this host reach it at
        ``client.config.master``; it has no authentication, whatever ``KVSTORE_AUTH`` says.

        Args:
            memory: size of the pool, in ``/dev/shm``.
            **settings: as of ``Client``.

        Raises:
            SharedMemoryTooSmallError, StartupError: the children could not start.
        """
        child = start_master(memory=parse_size(memory))
        try:
            settings.setdefault("auth", "")
            client = cls(f"127.0.0.1:{child.said['port']}", **settings)
        except BaseException:
            child.stop()
            raise
        client._state.children.append(child)
        return client

    # --- putting ------------------------------------------------------------------------------

    def put(
        self,
        key: AnyKey,
        value: Storable,
        *,
        namespace: str | None = None,
        parent: AnyKey | None = None,
        replicas: int | None = None,
        overwrite: bool = False,
        wait_ms: int | None = None,
        ttl: Duration | None = None,
        timeout_ms: int | None = None,
        stream: Stream | None = None,
    ) -> PutOutcome:
        """Store a torch tensor, a numpy array or bytes under a key.

        A key names its content: if a complete object with this key exists, nothing is written.

        Args:
            value: copied before this returns; of any shape, dtype and device. A tensor from
                ``allocate`` is not copied: its memory becomes the object, and must not be
                written to any more.
            parent: key of the object before it in its chain. The parent need not be there yet;
                until it is, the object is not found by ``match_prefix``.
            replicas: copies on distinct nodes, or on as many as there are.
            overwrite: write a new version even if the key exists, and retire the old version. After
                the call no get of any client finds the old one; during it, one client may find the
                new one and another still the old.
            wait_ms: how long to wait for leases to end when there is no room; None: 1 s,
                or half of the call's time if that is less.
            ttl: seconds, a ``timedelta``, or a text with a unit (``"90s"``, ``"5min"``, ``"1h"``)
                after which the object is gone, counted from the end of this call, up to a week
                (rounded up to 64 ms); None: it stays until it is evicted or removed. From
                then on the master does not find it, and its memory is the first to be used
                again. A client that has found it before may get it until that lease ends
                (``kvstore-master --lease-ms``). Blocks below it in a chain are not matched any
                more, and evicted first. A pin does not prolong it. An object that is
                FOUND keeps the end that it has; ``overwrite`` sets a new one, or none. The end is
                known to the master only: after a restart of the master, or when its node was away,
                the object has none.
            stream: for a tensor on a device: the call waits for the work queued there before it;
                None: the stream on which this thread computes, unless a ``DeviceMemory`` says what
                it comes after. Once the call has returned, none of its copies is under way.

        Returns:
            STORED by this call, FOUND there already, or BEING_WRITTEN by another client.

        Raises:
            UnsupportedValueError: a value without plain bytes (sparse, quantized, objects).
            ValueTooLargeError: larger than any segment.
            NoSpaceError: everything is leased or pinned; ``fields["missing_bytes"]``, and
                ``fields["pinned_bytes"]`` if objects are pinned.
            PutRefusedError: nodes came and went; try again.
            ReservationLostError: the client no longer holds the memory from ``allocate``.
        """
        key = check_key(key)
        options = self._put_options(
            namespace=namespace, parent=parent, replicas=replicas, overwrite=overwrite,
            wait_ms=wait_ms, ttl=ttl, timeout_ms=timeout_ms,
        )  # fmt: skip
        return self._run(put.put(self._context, key, value, options, stream), timeout_ms)

    def put_many(
        self,
        items: Pairs,
        *,
        namespace: str | None = None,
        parent: AnyKey | None = None,
        replicas: int | None = None,
        overwrite: bool = False,
        partial: bool = False,
        wait_ms: int | None = None,
        ttl: Duration | None = None,
        timeout_ms: int | None = None,
        stream: Stream | None = None,
    ) -> list[PutOutcome]:
        """``put`` of several, in one exchange: room is found for all of them or for none.

        Args:
            items: pairs of a key and a value, or a dict.
            partial: where the pool is full, store the first ones that there is room for; the
                outcome of the others is NO_SPACE. More than 512 are put in several exchanges, of
                which one may evict what another has stored.
            ttl: as of ``put``, of each.
            stream: as of ``put``. Values that are all on one device are copied straight from
                there; in a mixed batch they pass through the host's memory.

        Raises:
            DuplicateKeyError: a key occurs twice. Otherwise as ``put``.
        """
        keys, values = validation.pairs(items)
        options = self._put_options(
            namespace=namespace, parent=parent, replicas=replicas, overwrite=overwrite,
            partial=partial, wait_ms=wait_ms, ttl=ttl, timeout_ms=timeout_ms,
        )  # fmt: skip
        flow = put.put_many(self._context, keys, values, options, stream)
        return self._run(flow, timeout_ms)

    def put_chain(
        self,
        keys: Sequence[AnyKey],
        values: Sequence[Storable],
        *,
        namespace: str | None = None,
        parent: AnyKey | None = None,
        replicas: int | None = None,
        partial: bool = False,
        wait_ms: int | None = None,
        ttl: Duration | None = None,
        timeout_ms: int | None = None,
        stream: Stream | None = None,
    ) -> list[PutOutcome]:
        """Store the blocks of one prefix: each key's parent is the key before it.

        Args:
            keys: from the root towards the tip, such as the hashes of an engine's blocks.
            parent: of the first; None: the first is a root.
            partial: where the pool is full, store as much of the front as there is room for; the
                outcome of the others is NO_SPACE.
            ttl: as of ``put``, of each block.
            stream: as of ``put_many``.

        Raises:
            As ``put_many``; InvalidArgumentError: a key would become its own ancestor.
        """
        keys = cast("Sequence[AnyKey]", validation.sequence("keys", keys))
        values = cast("Sequence[Storable]", validation.rows("values", values))
        if len(keys) != len(values):
            raise InvalidArgumentError(
                f"a chain needs one value per key: {len(keys)} keys, {len(values)} values"
            )
        options = self._put_options(
            namespace=namespace, parent=parent, chain=True, replicas=replicas,
            partial=partial, wait_ms=wait_ms, ttl=ttl, timeout_ms=timeout_ms,
        )  # fmt: skip
        checked = check_keys(keys, distinct=True)
        flow = put.put_many(self._context, checked, values, options, stream)
        return self._run(flow, timeout_ms)

    def allocate(
        self,
        shape: int | Sequence[int],
        dtype: DType = "uint8",
        *,
        kind: Literal["torch", "numpy"] = "torch",
        namespace: str | None = None,
        wait_ms: int | None = None,
        timeout_ms: int | None = None,
    ) -> Value:
        """A tensor inside the pool to compute into; putting it moves no byte.

        Its contents are undefined. The client holds the memory for as long as the tensor, or
        anything made of it, lives; memory that is dropped without a put is given back. Check
        ``lease(tensor).held``: if the master could not be reached for longer than the put deadline,
        the memory may have been granted to another client.

        Args:
            namespace: where it is going to be put: until then the memory counts for the tenant of
                this namespace. A put in another tenant's namespace moves it there, within the
                bound of that one.

        Raises:
            NodeUnreachableError: there is no segment on this host. Otherwise as ``put``.
        """
        validation.one_of("kind", kind, validation.KINDS[:2])
        descriptor, size = described_as(shape, dtype, kind)
        validation.check_integer("the size", size, 0, validation.SIZE_MAX, "bytes")
        waits_ms = self._wait_ms(wait_ms, timeout_ms)
        space = self._namespace(namespace)
        flow = allocate.allocate(self._context, space, descriptor, size, waits_ms)
        return self._run(flow, timeout_ms)

    # --- getting ------------------------------------------------------------------------------

    def get(
        self,
        key: AnyKey,
        *,
        namespace: str | None = None,
        copy: bool = True,
        kind: Kind | None = None,
        device: str | torch.device | None = None,
        timeout_ms: int | None = None,
    ) -> View | None:
        """The value of a key, dtype and shape as they were put; None on a miss.

        Args:
            copy: False gives a view of the pool's own memory where that is on this host (a copy
                elsewhere), leased for as long as the view or anything made of it lives. It is
                read-only: arrays refuse to be written to; torch cannot express that, and a write
                into a tensor ends the process (SIGSEGV). bytes come as a memoryview. Only the
                header is checked then, not the payload, unless ``verify="all"``.
            kind: ``"torch"``, ``"numpy"`` or ``"bytes"``, instead of the kind that was put.
            device: return a torch tensor there (``"cuda:0"``), whose bytes have arrived when this
                returns. Bytes come as a tensor of ``uint8``. With ``copy=False`` it is the pool's
                own memory where a node pools memory of that device, and a copy elsewhere. Keep the
                tensor until the kernels that read it have ended, and ask ``lease(tensor).held``
                then: the memory ends with its node, and what a kernel has read since is undefined.

        Raises:
            UnsupportedValueError: torch, or the dtype, is not available here.
            CorruptObjectError: the descriptor is invalid, or does not fit the bytes;
                ``fields["key"]`` names the object. ``kind="bytes"`` returns the bytes.
            DeviceError: the device cannot be used, or has failed.
        """
        options = self._get_options(namespace, copy, kind, device, timeout_ms)
        return self._run(get.get(self._context, check_key(key), options), timeout_ms)

    def get_many(
        self,
        keys: Sequence[AnyKey],
        *,
        namespace: str | None = None,
        copy: bool = True,
        kind: Kind | None = None,
        device: str | torch.device | None = None,
        timeout_ms: int | None = None,
    ) -> list[View | None]:
        """``get`` of several, in one exchange with the master and one with each node.

        An object of which no value can be made here (torch, or its dtype, is missing; or its
        descriptor is nonsense) is None, as a miss is: it does not spoil the others. The log says
        so, and ``stats().counters["unreadable_objects"]`` counts it; ``get`` raises why.
        """
        options = self._get_options(namespace, copy, kind, device, timeout_ms)
        return self._run(
            get.get_many(self._context, validation.key_list(keys), options), timeout_ms
        )

    def get_into(
        self,
        keys: Sequence[AnyKey] | AnyKey,
        buffers: Sequence[Buffer | Sequence[Buffer]] | Buffer,
        *,
        namespace: str | None = None,
        timeout_ms: int | None = None,
        stream: Stream | None = None,
    ) -> list[int | None]:
        """Read values into the caller's memory; per key, how many bytes that was, or None: a miss.

        Args:
            keys: a sequence, or a single key with a single buffer.
            buffers: per key a contiguous, writable tensor, array, bytearray or memoryview, in CPU
                memory or all on one device, or a list of them that are filled one after the other.
                Memory beyond the value's size is left as it is. Only if a longer value is replaced
                while it is being read (with the transfer engine: during the call) may it hold bytes
                of that value. Buffers of ``uint8`` take any dtype's bytes.
            stream: for memory of a device, as in ``put``. The bytes have arrived when this returns.

        Raises:
            BufferMismatchError: a buffer is too small (nothing was read for that key), or of
                another dtype (its contents are undefined); other buffers of the batch may be
                filled. Or it cannot be written to, such as a view of the pool; nothing was read.
            InvalidArgumentError: two buffers of the call share memory; nothing was read.
        """
        wanted = validation.per_key(keys, buffers, "buffers")
        options = GetOptions(self._namespace(namespace), timeout_ms=timeout_ms)
        return self._run(get.get_into(self._context, wanted, options, stream), timeout_ms)

    def get_ranges(
        self,
        keys: Sequence[AnyKey] | AnyKey,
        ranges: Sequence[Sequence[Range]] | Sequence[Range],
        *,
        namespace: str | None = None,
        timeout_ms: int | None = None,
    ) -> list[int | None]:
        """Read parts of values into the caller's memory; per key the size of the whole value in
        bytes, or None: a miss, which leaves the contents of its buffers undefined.

        The header says that this is the object, and complete; the bytes of a part cannot be
        compared with the checksum, which covers the whole payload.

        Args:
            keys: a sequence, or a single key with a single list of ranges.
            ranges: per key a list of ``(offset, buffer)``: where the part begins in the payload,
                in bytes, and memory for it, as for ``get_into``, which is as long as the part;
                several buffers are filled one after the other. Dtypes are not compared.

        Raises:
            BufferMismatchError: a range ends beyond its value, or a buffer cannot be filled.
            InvalidArgumentError: two buffers of the call share memory; nothing was read.
        """
        wanted = [
            get.ObjectParts(key, validation.parts(each))
            for key, each in validation.per_key(keys, ranges, "lists of ranges")
        ]
        validation.check_no_overlap(
            [(each.key, [view for _, view in each.ranges]) for each in wanted]
        )
        space = self._namespace(namespace)
        return self._run(get.get_ranges(self._context, space, wanted, timeout_ms), timeout_ms)

    def register(self, memory: Buffer | int, size: int | None = None) -> None:
        """Lend this memory to the client until ``unregister`` or ``close``. ``memory_at`` gives
        parts of it by address. A transfer engine, if there is one, moves bytes directly from and
        into it; bytes of unregistered memory pass through a buffer.

        A ``get_into`` of such memory that fails with MemoryQuarantinedError leaves it in doubt: see
        that error. RDMA needs a process that may lock memory. After a fork the child must register
        its memory again.

        Args:
            memory: a writable tensor, array or buffer, which is kept alive; or the address of
                ``size`` bytes of this process or of a CUDA device, which the caller keeps
                allocated. Memory that is mapped read-only can be put from, and not be filled.

        Raises:
            InvalidArgumentError: it is registered already, in part or whole; or it is an address
                at which neither the processor nor a CUDA device has memory.
            DeviceError: the device cannot be used.
            TransferEngineError: the engine refuses it.
        """
        if isinstance(memory, int | np.integer):
            memory, size = _address(memory), _size(size)
            if name := cuda_device_at(memory):
                self._state.movers.registered.add_of(self.device(name), memory, size)
            else:
                self._state.movers.register(memory_at(memory, size))
        elif size is None:
            self._state.movers.register(_one(memory))
        else:
            raise InvalidArgumentError("register(buffer) takes no size: a buffer has one")

    def unregister(self, memory: Buffer | int) -> None:
        """Take memory back, named by the registered buffer or its address. Returns when nothing can
        be written to it any more: at once, or some 5 s after a read was given up. Unknown memory is
        ignored."""
        is_address = isinstance(memory, int | np.integer)
        self._state.movers.unregister(_address(memory) if is_address else _one(memory))

    def memory_at(self, address: int, size: int) -> memoryview:
        """``size`` bytes at an address of registered memory of the host: a value to put, or a
        buffer to get into. The caller keeps them allocated, and for a put unchanged, until that
        call returns.

        Raises:
            InvalidArgumentError: they are not within one registered memory, or are on a device.
        """
        return self._state.movers.registered.at(
            _address(address),
            validation.check_integer("size", size, 0, validation.SIZE_MAX, "bytes"),
        )

    def payload_at(self, addresses: Sequence[int], sizes: Sequence[int]) -> Payload:
        """As ``memory_at``, for a value that is several runs, all of the host or all of one device.

        Raises:
            InvalidArgumentError: a run is not within one registered memory, or not where the first
                one is.
        """
        starts = validation.check_integers("addresses", addresses, 0, validation.ADDRESS_MAX)
        lengths = validation.check_integers("sizes", sizes, 0, validation.SIZE_MAX, "bytes")
        return self._state.movers.registered.payload(starts, lengths)

    def device(self, name: str) -> Device:
        """A device as this client uses it, for values that are several runs of its memory: an
        engine's pages, as ``kvstore.device.memory.DeviceMemory``.

        Args:
            name: torch's, such as ``cuda:0``.

        Raises:
            DeviceError: there is no such device, or its driver cannot be used.
        """
        return self._state.movers.devices.of(validation.text("name", name))

    def lease(self, view: View) -> Lease | None:
        """The lease of a value from ``get(copy=False)`` or ``allocate``, or of anything that was
        made of it; None: it is not the pool's memory."""
        return self._state.views.of(view)

    # --- asking -------------------------------------------------------------------------------

    def match_prefix(
        self, keys: Sequence[AnyKey], *, namespace: str | None = None, timeout_ms: int | None = None
    ) -> int:
        """How many leading keys of a chain are stored; those are leased, until the last one of them
        has been read or released (``release``).

        Takes O(log n) steps at the master for a chain that was put with ``put_chain``. More than
        16,384 keys take several calls, until one of them misses a key.
        """
        space = self._namespace(namespace)
        flow = control_calls.match_prefix(self._context, [space], _packed(keys))
        return self._run(flow, timeout_ms)[0].matched

    def match_prefixes(
        self, keys: Sequence[AnyKey], *, namespaces: Sequence[str], timeout_ms: int | None = None
    ) -> list[int]:
        """``match_prefix`` in several namespaces at once: an engine's ranks and cache groups."""
        return [
            match.matched
            for match in self.matches(keys, namespaces=namespaces, timeout_ms=timeout_ms)
        ]

    def matches(
        self, keys: Sequence[AnyKey], *, namespaces: Sequence[str], timeout_ms: int | None = None
    ) -> list[PrefixMatchResult]:
        """``match_prefixes``, and how many keys after those are being written at this moment."""
        spaces, _ = self._namespaces("match_prefix", namespaces, ())
        return self._run(
            control_calls.match_prefix(self._context, spaces, _packed(keys)), timeout_ms
        )

    def match_all(
        self,
        keys: Sequence[AnyKey],
        *,
        namespaces: Sequence[str],
        states: Sequence[str] = (),
        timeout_ms: int | None = None,
    ) -> EngineMatchResult:
        """How much of a chain an engine finds: what all of ``namespaces`` have of it, and the last
        key up to there at which all of ``states`` have an object. Both are leased.

        Args:
            namespaces: those of the engine's ranks and cache groups whose blocks are chains.
            states: those whose objects are no chains, as the states of recurrent layers: the engine
                needs the last one only.
        """
        spaces, single = self._namespaces("match_all", namespaces, states)
        flow = control_calls.match_all(self._context, spaces, single, _packed(keys))
        return self._run(flow, timeout_ms)

    def release_match(self, reach: EngineMatchResult) -> None:
        """Releases the lease of ``match_all``; to be called once, when its blocks were loaded, by
        whichever client, or are not wanted any more. Makes no call, and waits for none."""
        self._context.leases.done(reach.lease)

    def lookup(
        self, keys: Sequence[AnyKey], *, namespace: str | None = None, timeout_ms: int | None = None
    ) -> list[int | None]:
        """Which of these are stored, and how large: per key the payload's size in bytes, or None.

        Objects that are found are leased (``kvstore-master --lease-ms``), so that a ``get`` or
        ``get_into`` within that time finds them, without another call to the master. The lease ends
        when each of them has been read or released once.
        """
        checked, space = validation.key_list(keys), self._namespace(namespace)
        return self._run(get.lookup(self._context, space, checked), timeout_ms)

    def release(self, keys: Sequence[AnyKey], *, namespace: str | None = None) -> None:
        """Releases the leases that ``lookup``, ``exists_many(lease=True)`` or ``match_prefix`` took
        for later reads of these objects, which will not come. Leases of views and of other clients
        stay. Makes no call, and waits for none."""
        read_objects.release(self._context, self._namespace(namespace), validation.key_list(keys))

    def exists(
        self, key: AnyKey, *, namespace: str | None = None, timeout_ms: int | None = None
    ) -> bool:
        """Whether a complete object is stored now. Does not lease it, so a later ``get`` may miss;
        ``lookup`` leases it."""
        return self.exists_many([key], namespace=namespace, timeout_ms=timeout_ms)[0]

    def exists_many(
        self,
        keys: Sequence[AnyKey],
        *,
        lease: bool = False,
        namespace: str | None = None,
        timeout_ms: int | None = None,
    ) -> list[bool]:
        """``exists`` of several.

        Args:
            lease: keep those that exist from eviction for as long as a ``get`` would. This is
                cheaper than ``lookup``, and a ``get`` afterwards still asks where they are.
        """
        space, lease = self._namespace(namespace), validation.flag("lease", lease)
        packed = packed_keys(validation.sequence("keys", keys))
        return self._run(control_calls.exists(self._context, space, packed, lease), timeout_ms)

    def stat(
        self, key: AnyKey, *, namespace: str | None = None, timeout_ms: int | None = None
    ) -> ObjectStat | None:
        """All that is known of one object, or None."""
        space = self._namespace(namespace)
        return self._run(control_calls.stat(self._context, space, check_key(key)), timeout_ms)

    def status(self, *, timeout_ms: int | None = None) -> calls.ClusterStatus:
        """The cluster at a glance."""
        return self._run(control_calls.status(), timeout_ms)

    def http(self, *, timeout_ms: int | None = None) -> MasterHTTP:
        """Where the master that leads now serves HTTP."""
        self._run(control_calls.ping_leader(), timeout_ms)
        joined = self._stub.joined
        assert joined is not None, "it has answered a call that needs a join"
        host, _ = split_address(self._stub.address)
        at = join_address(host, joined.http_port) if joined.http_port else ""
        return MasterHTTP(host, at, has_events=joined.has_events)

    def traffic(
        self, namespace: str | None = None, *, timeout_ms: int | None = None
    ) -> calls.TrafficReport:
        """Who puts into a namespace, or into each one (None), who asks there, and which keys were
        not found last.

        The master remembers this since its start, of the last 512 namespaces at least, 16 clients
        of each that put and 16 that asked, and the last missed key of each that asked. It counts
        what reaches the master: a client that still knows from its last question where an object is
        does not ask again.
        ``kvstore why`` draws the conclusions.
        """
        return self._run(control_calls.traffic(_one_or_all(namespace)), timeout_ms)

    def chains(
        self,
        namespace: str | None = None,
        *,
        keys: Sequence[AnyKey] = (),
        count: int = 0,
        timeout_ms: int | None = None,
    ) -> calls.ChainsReply:
        """The chains that were matched most and used last, as branches of a tree.

        The master counts matches by the last block that they found. It remembers the last 128 such
        blocks of a namespace at least, of the last 512 namespaces at least, since its start. Beside
        those it looks at the blocks that were put last. ``kvstore prefixes`` and the dashboard show
        the tree.

        Args:
            namespace: None: of the last 256 namespaces in which clients put or asked.
            keys: up to 128; the chains that end at these blocks instead.
            count: at most so many chains; 0: 128, which is the most. An answer has at most 256
                branches.
        """
        count = validation.check_integer("count", count, 0, validation.SIZE_MAX)
        check_count(count, limits.CHAINS_MAX, "chains")
        checked = validation.key_list(keys, limits.CHAINS_MAX)
        if checked and namespace is None:
            raise InvalidArgumentError("blocks are looked for in one namespace: name it")
        request = calls.Chains(_one_or_all(namespace), checked, count)
        return self._run(ask(request, calls.ChainsReply), timeout_ms)

    def blocks(
        self,
        keys: Sequence[AnyKey],
        *,
        above: int = 0,
        namespace: str | None = None,
        timeout_ms: int | None = None,
    ) -> Sequence[calls.BlockStatus]:
        """What the master knows of these blocks, and of ``above`` blocks before the last one in its
        chain. Up to 256 each. It leases nothing, and counts as no use, match or miss."""
        above = validation.check_integer("above", above, 0, validation.SIZE_MAX)
        check_count(above, limits.BLOCKS_MAX, "blocks above")
        checked = validation.key_list(keys, limits.BLOCKS_MAX)
        request = calls.Blocks(self._namespace(namespace), checked, above)
        return self._run(ask(request, calls.BlocksReply), timeout_ms).blocks

    def list_objects(
        self, *, namespace: str = "", prefix: bytes = b"", timeout_ms: int | None = None
    ) -> Iterator[calls.ObjectRow]:
        """All objects of a namespace ("": of every one) whose keys start with ``prefix``.

        Asked for page by page; objects that come or go meanwhile may be missed or seen twice.
        """
        cursor: int | None = 0
        while cursor is not None:
            page = self.list_page(namespace, prefix, cursor, timeout_ms=timeout_ms)
            yield from page.objects
            cursor = page.next_cursor or None

    def list_page(
        self, namespace: str, prefix: bytes, cursor: int, *, timeout_ms: int | None = None
    ) -> calls.ListObjectsReply:
        """One page of ``list_objects``: up to 1,000 objects, and the cursor of the next page.

        Args:
            cursor: 0: the first page.
        """
        space = validation.text("namespace", namespace) and check_namespace(namespace)
        begin = b"" if type(prefix) in (bytes, str) and not prefix else check_key(prefix)
        cursor = validation.check_integer("cursor", cursor, 0, validation.CURSOR_MAX)
        request = calls.ListObjects(space, begin, cursor, LIST_PAGE)
        return self._run(ask(request, calls.ListObjectsReply), timeout_ms)

    def stats(self) -> ClientStats:
        """What this client has done. Makes no call."""
        return self._state.stats()

    # --- keeping ------------------------------------------------------------------------------

    def pin(
        self,
        keys: Sequence[AnyKey],
        seconds: Duration,
        *,
        namespace: str | None = None,
        timeout_ms: int | None = None,
    ) -> list[bool]:
        """Keep objects from eviction; per key, whether it is there and is pinned now.

        A pinned object keeps its ancestors, too: a pin of a chain's tip, or of all its keys, keeps
        all that a ``match_prefix`` of it needs. Their memory counts towards the bound of the
        namespace, each object once.

        A pin keeps an object from eviction and from nothing else: ``remove``, ``clear``, a ``ttl``
        and the loss of a node end it with the object. It stays on its object through an
        ``overwrite`` and the draining of a node. It is known to the master only: after a restart
        of the master, pin again. A pin keeps the replicas that exist, and makes none.

        Args:
            seconds: until the pin ends, counted from this call: more than 0, at most a day; or a
                ``timedelta`` or a text, as ``ttl``. Of two pins of an object, by any clients, the
                later end holds.

        Raises:
            NoSpaceError: the namespace would have more pinned than its share of the pool
                (``kvstore-master --pinned-max``: half); ``fields["cause"]`` is ``"pins"``. Nothing
                was pinned; of more than 512 keys, which are pinned in several exchanges, the
                first ones may have been.
            InvalidArgumentError: more than 8,192 ancestors would be pinned with one exchange. Pin
                such a chain from its root, in several calls.
        """
        hold_ms = validation.duration_ms("seconds", seconds, limits.PIN_MS_MAX)
        checked, space = validation.key_list(keys), self._namespace(namespace)
        return self._run(control_calls.pin(space, checked, hold_ms), timeout_ms)

    def unpin(
        self, keys: Sequence[AnyKey], *, namespace: str | None = None, timeout_ms: int | None = None
    ) -> list[bool]:
        """End the pins of these objects, by any client; per key, whether it was pinned.

        What was pinned only as an ancestor is let go with the last pin below it, and need not be
        named. An ancestor of an object that is still pinned is kept.
        """
        space = self._namespace(namespace)
        return self._run(control_calls.unpin(space, validation.key_list(keys)), timeout_ms)

    # --- removing -----------------------------------------------------------------------------

    def remove(
        self, key: AnyKey, *, namespace: str | None = None, timeout_ms: int | None = None
    ) -> bool:
        """Remove an object; returns whether there was one. After this call no client finds the
        object, even after a restart. Views of it keep their bytes until their lease ends, which is
        no longer renewed: ask ``lease(view).held``."""
        return self.remove_many([key], namespace=namespace, timeout_ms=timeout_ms)[0]

    def remove_many(
        self, keys: Sequence[AnyKey], *, namespace: str | None = None, timeout_ms: int | None = None
    ) -> list[bool]:
        """``remove`` of several."""
        checked, space = validation.key_list(keys), self._namespace(namespace)
        return self._run(control_calls.remove(self._context, space, checked), timeout_ms)

    def clear(
        self,
        namespace: str | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
        timeout_ms: int | None = None,
    ) -> int:
        """Remove every object of a namespace, or of all of them (None); how many.

        Args:
            progress: called after each slice with the numbers removed and remaining.
        """
        if progress is not None and not callable(progress):
            raise InvalidArgumentError("progress is a function of two numbers")
        removed = 0
        while True:
            cleared = self._clear_some(namespace, timeout_ms=timeout_ms)
            removed += cleared.removed
            if progress is not None:
                progress(removed, cleared.remaining)
            if not cleared.removed:
                return removed

    def _clear_some(self, namespace: str | None, *, timeout_ms: int | None) -> calls.ClearReply:
        return self._run(
            control_calls.clear_page(self._context, _one_or_all(namespace)), timeout_ms
        )

    # --- draining -----------------------------------------------------------------------------

    def drain(
        self, node: str, *, undo: bool = False, leave: bool = False, timeout_ms: int | None = None
    ) -> calls.DrainReply:
        """Stop placing new objects on a node; clients still read the objects that it holds.
        ``kvstore drain`` does all of it: this, ``move_page`` until nothing is left, and ``leave``.

        Args:
            undo: place new objects on the node again.
            leave: tell the node to leave, whatever it still holds.

        Raises:
            InvalidArgumentError: there is no such node; or ``leave``, and it is not being drained.
        """
        node = validation.text("node", node)
        undo, leave = validation.flag("undo", undo), validation.flag("leave", leave)
        if undo and leave:
            raise InvalidArgumentError("leave and undo exclude each other")
        step = DrainStep.UNDO if undo else DrainStep.LEAVE if leave else DrainStep.BEGIN
        return self._run(ask(calls.Drain(node, step), calls.DrainReply), timeout_ms)

    def move_page(
        self,
        node: str,
        cursor: int = 0,
        *,
        repair: bool = False,
        evict_up_to: calls.Version = calls.NO_VERSION,
        timeout_ms: int | None = None,
    ) -> MoveProgress:
        """Copy some of what a draining node holds to others, through this process.

        Args:
            cursor: 0 begins a pass over all objects; then ``next_cursor`` of the step before, until
                that is 0 again.
            repair: instead, for any node: give objects with fewer replicas than they were put with
                one more, if the master finds room. Nodes do this by themselves.
            evict_up_to: evict objects on other nodes, of this version or an earlier one, that were
                used longer ago than the moved object; by default none. With the version that
                ``drain`` returns, no object is evicted that was moved off this node.

        Raises:
            InvalidArgumentError: there is no such node, or it is not being drained.
        """
        node = validation.text("node", node)
        cursor = validation.check_integer("cursor", cursor, 0, validation.CURSOR_MAX)
        if validation.flag("repair", repair):
            flow = copy_objects.repair_page(self._context, node)
        else:
            flow = copy_objects.move_page(self._context, node, cursor, evict_up_to)
        return self._run(flow, timeout_ms)

    # --- life ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Give everything back. Idempotent; calls under way in other threads fail.

        Views stay readable, but their leases are no longer renewed. A client that is dropped
        without this closes itself once its last view and allocation are gone.
        """
        self._state.close()

    def __reduce__(self) -> tuple[object, ...]:
        """Another process gets a new client of the same settings, with nothing of this one's:
        neither its children nor its views; it contributes no memory. The settings travel as they
        are, a password in ``etcd://...`` included."""
        config = self.config.model_copy(update={"memory": 0})
        return functools.partial(type(self), config=config), ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        closed = ", closed" if self._state.is_closed else ""
        return f"<Client of {self.config.master}{closed}>"

    # --- arguments ----------------------------------------------------------------------------

    def _namespace(self, namespace: str | None) -> Namespace:
        return self._default_namespace if namespace is None else check_namespace(namespace)

    def _namespaces(
        self, call: str, namespaces: Sequence[str], states: Sequence[str]
    ) -> tuple[list[Namespace], list[Namespace]]:
        spaces = cast("Sequence[str | None]", validation.sequence("namespaces", namespaces))
        single = cast("Sequence[str | None]", validation.sequence("states", states))
        if not 0 < len(spaces) + len(single) <= limits.NAMESPACES_MAX:
            raise InvalidArgumentError(f"{call} takes 1 to {limits.NAMESPACES_MAX} namespaces")
        return [*map(self._namespace, spaces)], [*map(self._namespace, single)]

    def _put_options(
        self,
        *,
        namespace: str | None,
        parent: AnyKey | None,
        replicas: int | None,
        wait_ms: int | None,
        ttl: Duration | None,
        timeout_ms: int | None,
        chain: bool = False,
        overwrite: bool = False,
        partial: bool = False,
    ) -> PutOptions:
        count = self.config.replicas
        if replicas is not None:
            count = validation.check_integer("replicas", replicas, 1, limits.REPLICAS_MAX)
        return PutOptions(
            namespace=self._namespace(namespace),
            parent=None if parent is None else check_key(parent),
            chain=chain,
            replicas=count,
            overwrite=validation.flag("overwrite", overwrite),
            partial=validation.flag("partial", partial),
            ttl_ms=0 if ttl is None else validation.duration_ms("ttl", ttl, limits.TTL_MS_MAX),
            wait_ms=self._wait_ms(wait_ms, timeout_ms),
        )

    def _wait_ms(self, wait_ms: int | None, timeout_ms: int | None) -> int:
        longest = self.config.timeout_ms if timeout_ms is None else _timeout_ms(timeout_ms)
        if wait_ms is None:
            return min(PUT_WAIT_MS, longest // 2)
        wanted = validation.check_integer(
            "wait_ms", wait_ms, 0, validation.SIZE_MAX, "milliseconds"
        )
        # The master must answer before the call's own time-out, so that its error can say why.
        return min(wanted, longest * 9 // 10)

    def _get_options(
        self,
        namespace: str | None,
        copy: bool,
        kind: Kind | None,
        device: str | torch.device | None,
        timeout_ms: int | None,
    ) -> GetOptions:
        if kind is not None:
            validation.one_of("kind", kind, validation.KINDS)
        if kind == "torch":
            import_torch()
        copy, space = validation.flag("copy", copy), self._namespace(namespace)
        name = "" if device is None or str(device) == "cpu" else str(device)
        if name and kind not in (None, "torch"):
            raise InvalidArgumentError("get(device=...) returns a torch tensor")
        return GetOptions(space, kind, copy, name, timeout_ms)

    # --- driving flows ------------------------------------------------------------------------

    def _run(self, flow: Flow[ResultT], timeout_ms: int | None = None) -> ResultT:
        if self._tracing is None:
            return self._carry_out(flow, timeout_ms)
        with self._tracing(getattr(flow, "__name__", "call")) as span:
            return self._carry_out(flow, timeout_ms, traceparent(span))

    def _carry_out(self, flow: Flow[ResultT], timeout_ms: int | None, trace: str = "") -> ResultT:
        """Carries out the flow's steps until it returns or the time is over."""
        if self._state.is_closed:
            raise ClosedError("the client is closed")
        timeout_s = self._seconds(timeout_ms)
        deadline = uptime() + timeout_s
        call, pause, move = self._state.stub.call, self._pause, self._state.movers.move
        if trace:
            call = functools.partial(call, trace=trace)
        stop = current()
        if stop is not None:
            deadline = min(deadline, stop.deadline)
            call, pause = _waiting(stop, call), _waiting(stop, pause)
        try:
            if self._is_cut:
                self._is_cut = False
                self._state.drop_connections()
            step = next(flow)
            while True:
                outcome: object
                try:
                    if type(step) is CallMaster:
                        outcome = call(step.request, deadline)
                    elif isinstance(step, SleepFor):
                        outcome = None
                        pause(step.seconds, deadline, timeout_s)
                    elif isinstance(step, WaitForDevice):
                        outcome = None
                        step.device.wait(step.events, deadline)
                    else:
                        outcome = move(step, deadline)  # type: ignore[arg-type]
                except KVStoreError as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(outcome)
        except StopIteration as done:
            result: ResultT = done.value
            return result
        except (KVStoreError, CallCancelledError):
            raise
        except BaseException:
            self._is_cut = True
            flow.close()
            raise

    def _seconds(self, timeout_ms: int | None) -> float:
        """The time-out of one call. Raises InvalidArgumentError."""
        return self._timeout_s if timeout_ms is None else _timeout_ms(timeout_ms) / 1000

    def _pause(self, seconds: float, deadline: float, timeout_s: float) -> None:
        left = deadline - uptime()
        if left <= seconds:
            raise DeadlineExceededError(f"the call timed out after {timeout_s:.1f} s")
        wait_in_call(seconds, lambda: self._state.is_closed)


def _timeout_ms(timeout_ms: object) -> int:
    return validation.check_integer(
        "timeout_ms", timeout_ms, 1, validation.TIMEOUT_MS_MAX, "milliseconds"
    )


def _packed(keys: Sequence[AnyKey]) -> Sequence[Key]:
    return packed_keys(validation.sequence("keys", keys), limits.MATCH_KEYS_MAX)


def _one_or_all(namespace: str | None) -> str:
    """A namespace as the master takes it where None means all of them."""
    return "" if namespace is None else check_namespace(namespace)


def _address(address: object) -> int:
    return validation.check_integer("address", address, 0, validation.ADDRESS_MAX)


def _size(size: int | None) -> int:
    if size is None:
        raise InvalidArgumentError("register(address) needs the size of the memory, in bytes")
    return validation.check_integer("size", size, 1, validation.SIZE_MAX, "bytes")


def _one(buffer: object) -> memoryview:
    if isinstance(buffer, list | tuple):
        raise InvalidArgumentError("this takes one buffer, not several")
    return writable(cast("Buffer", buffer))[0][0]


def _waiting(stop: CancelToken, wait: Callable[P, ResultT]) -> Callable[P, ResultT]:
    """``wait``, during which ``stop`` ends the call at once: it touches no memory of the caller."""

    def waits(*args: P.args, **kwargs: P.kwargs) -> ResultT:
        with stop.cancellable_wait():
            return wait(*args, **kwargs)

    return waits

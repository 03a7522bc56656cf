"""``Client``: the blocking client. Any thread may call it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Self, TypedDict, TypeVar, cast, overload

import numpy as np
from numpy.typing import NDArray

from kvstore import calls, limits
from kvstore.calls import DrainStep, HintAction, PutOutcome
from kvstore.calls.hint_envelopes import EnvelopeAction
from kvstore.client import fork_support, validation
from kvstore.client.client_resources import ClientResources, ClientStats, MasterHTTP
from kvstore.client.flows import (
    allocate,
    apply_hints,
    control_calls,
    copy_objects,
    get,
    put,
    read_objects,
)
from kvstore.client.flows.control_calls import EngineMatchResult, ObjectStat, PrefixMatchResult
from kvstore.client.flows.copy_objects import MoveProgress
from kvstore.client.flows.read_objects import GetOptions
from kvstore.client.flows.steps import CallMaster, Flow, SleepFor, WaitForDevice, ask
from kvstore.client.flows.write_objects import PutOptions
from kvstore.client.hints import (
    RETAIN_S,
    ActionResult,
    Hint,
    HintResult,
    check_actions,
    check_chains,
    check_hint,
    check_hints,
)
from kvstore.client.leases.lease_table import Lease
from kvstore.client.rpc.stub import MasterStub, wait_in_call
from kvstore.client.tracing import tracing
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
from kvstore.runtime.refused_calls import check_threads

if TYPE_CHECKING:
    from typing import Unpack

    import torch

    from kvstore.device.device import Device

ResultT = TypeVar("ResultT")
P = ParamSpec("P")

LIST_PAGE = 1_000
"""Objects per page of ``list_objects``."""

PUT_WAIT_MS = 1_000
"""Default wait of a put for space, at most half of the call's time. Most reads end sooner."""


class _GetOptions(TypedDict, total=False):
    """Arguments of a get that do not determine the type of its result."""

    namespace: str | None
    device: str | torch.device | None
    timeout_ms: int | None


class Client:
    """A client of one store.

        with Client("127.0.0.1:50001") as client:
            client.put("greeting", tensor)
            tensor = client.get("greeting")          # None on a miss

    Keys are ``bytes`` or ``str`` of 1 to 256 bytes. Methods use the configured namespace if
    ``namespace`` is None. The client connects at its first call. A call lasts at most its
    ``timeout_ms`` (None: the configured one, by default 10 s), and retries an unreachable master
    until then; ``list_objects`` and ``clear`` have that time for each page or slice. Threads: any.
    If the program has set a provider of OpenTelemetry tracers before, each call is a span.

    All methods may also raise:

    * MasterUnreachableError: no master was found in time; ``fields`` name the addresses.
    * DeadlineExceededError: the master was found, but did not reply in time.
    * InvalidKeyError, BatchTooLargeError, InvalidArgumentError: a wrong argument; nothing sent.
    * ClosedError: after ``close``.

    A failed call leaves the client as it was. If another exception passes through a call, such as a
    signal handler's, the client reconnects at its next call.

    After ``os.fork`` (also by ``multiprocessing``) the client works in both processes: the child
    resets it, with connections of its own. Inherited views and allocations stay the parent's: in
    the child their ``lease`` is not held, an allocation cannot be put, and dropping one releases
    nothing. Their bytes are readable while the parent holds them. Only the parent stops a node or
    master that it contributes.

    A pickled client (for a Ray actor, or ``multiprocessing`` with ``spawn``) arrives as a new one
    with the same settings, which contributes no memory.
    """

    def __init__(
        self,
        master: str | None = None,
        *,
        memory: int | str | None = None,
        config: ClientConfig | None = None,
        **settings: object,
    ) -> None:
        """Create a client; it connects at its first call.

        Args:
            master: ``host:port``; None: ``KVSTORE_MASTER``, a file, or ``127.0.0.1:50001``.
            memory: also contribute a segment of this size (``"2GiB"``), served by a child process
                that ends with this client.
            config: all settings, instead of those of environment, file and arguments.
            **settings: other fields of ``ClientConfig``, such as ``timeout_ms=500``.

        Raises:
            ConfigError: an unknown or wrong setting.
            StartupError: the system refuses to start threads; with ``memory``: the segment could
                not be created.
            MasterUnreachableError: only with ``memory``: the segment has not joined.
        """
        if config is None:
            config = load(ClientConfig, {"master": master, "memory": memory, **settings})
        check_threads()
        self.config = config
        self._default_namespace = check_namespace(config.namespace)
        self._timeout_s = config.timeout_ms / 1000
        self._state = ClientResources(self.config)
        self._context = self._state.context
        self._tracing = tracing(shown_place(config.master))
        self._is_interrupted = False
        """Whether a foreign exception interrupted a call: the next call reconnects."""
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
        """Call ``check`` before each call to the master; it may raise a ``KVStoreError``."""
        self._stub.check = check

    def _reset_after_fork(self) -> None:
        """Reset the client in the child of a fork; called automatically."""
        self._state.reset_after_fork()

    def _close_after_fork(self) -> None:
        self._state.give_up()

    def __del__(self) -> None:
        state = self.__dict__.get("_state")
        if state is not None:
            state.close_from_finalizer()

    @classmethod
    def embedded(cls, memory: int | str = "1GiB", **settings: Any) -> Self:
        """Start a complete store as children of this process, ended by ``close``.

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

    # --- put ---------------------------------------------------------------------------------

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
                ``allocate`` is not copied: its memory becomes the object, and must not be written
                to any more.
            parent: key of the object before it in its chain, which need not be stored yet; until it
                is, ``match_prefix`` does not find the object.
            replicas: copies on distinct nodes, or on as many as there are.
            overwrite: write a new version even if the key exists, and retire the old version.
                During the call, clients may find either version; after it, only the new one.
            wait_ms: maximum wait for leases to end if there is no space; None: 1 s, or half of the
                call's time if that is less. More than nine tenths of that time are not waited.
            ttl: seconds, a ``timedelta``, or a text with a unit (``"90s"``, ``"5min"``, ``"1h"``),
                at most a week (rounded up to 64 ms); None: no TTL. It counts from the end of this
                call. After it the master does not find the object, and reuses its memory first; a
                client that found it before may get it until its lease ends (``kvstore-master
                --lease-ms``). Its descendants are not matched any more, and evicted first. A pin
                does not extend it. An object that is FOUND keeps its TTL; ``overwrite`` replaces
                it. Only the master knows the TTL: a restart of the master, or an absence of the
                node, removes it.
            stream: for a tensor on a device: the call waits for the work queued there before it;
                None: this thread's current stream, unless a ``DeviceMemory`` names events. When the
                call has returned, none of its copies is in progress.

        Returns:
            STORED by this call, FOUND, or BEING_WRITTEN by another client.

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
        """Store several values in one request: space is granted for all of them or for none.

        Args:
            items: pairs of a key and a value, or a dict.
            partial: on a full pool, at a tenant's limit or after a restart, store the first items
                that fit; the outcome of the others is NO_SPACE. More than 512 items take several
                requests, which may evict each other's objects.
            ttl: as of ``put``, for each item.
            stream: as of ``put``. Values that are all on one device are copied directly from there;
                a mixed batch passes through host memory.

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
        hint: HintAction | str | None = None,
        retain: Duration = RETAIN_S,
        timeout_ms: int | None = None,
        stream: Stream | None = None,
    ) -> list[PutOutcome]:
        """Store the blocks of one prefix: the parent of each key is the key before it.

        Args:
            keys: from root to tip, such as the hashes of an engine's blocks.
            parent: of the first key; None: the first is a root.
            partial: as of ``put_many``: store the first blocks that fit; the others are NO_SPACE.
            ttl: as of ``put``, for each block.
            hint: as of ``hint``, for this chain; ``retain``: for how long. Costs no further call.
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
        number, retain_ms = check_hint(hint, retain)
        options = options._replace(hint=number, retain_ms=retain_ms)
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
        """Allocate a tensor inside the pool to compute into; putting it copies nothing.

        Its contents are undefined. The client keeps the memory while the tensor, or anything made
        of it, lives; memory that is dropped without a put is freed. Check
        ``lease(tensor).is_held``: if the master was unreachable for longer than the put deadline,
        another client may have got it.

        Args:
            namespace: namespace of the later put, whose tenant is charged for the memory until
                then. A put for another tenant transfers the charge, within that tenant's limit.

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

    # --- get ---------------------------------------------------------------------------------

    @overload
    def get(
        self, key: AnyKey, *, kind: Literal["bytes"], **more: Unpack[_GetOptions]
    ) -> bytes | None: ...
    @overload
    def get(
        self, key: AnyKey, *, kind: Literal["numpy"], copy: bool = ..., **more: Unpack[_GetOptions]
    ) -> NDArray[Any] | None: ...
    @overload
    def get(
        self, key: AnyKey, *, kind: Literal["torch"], copy: bool = ..., **more: Unpack[_GetOptions]
    ) -> torch.Tensor | None: ...
    @overload
    def get(
        self, key: AnyKey, *, kind: Kind | None = ..., copy: bool = ..., **more: Unpack[_GetOptions]
    ) -> View | None: ...
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
        """Return the value of a key, dtype and shape as they were put; None on a miss.

        Args:
            copy: False returns a read-only view of the pool's memory if it is on this host (else a
                copy), leased while the view or anything made of it lives. Arrays refuse writes;
                torch cannot, and a write into a tensor ends the process (SIGSEGV). bytes come as a
                memoryview. Only the header is verified, unless ``verify="all"``.
            kind: ``"torch"``, ``"numpy"`` or ``"bytes"``, instead of the kind that was put.
            device: return a torch tensor there (``"cuda:0"``), whose bytes have arrived when this
                returns; bytes as ``uint8``. With ``copy=False`` it is the pool's memory if a node
                pools memory of that device, and a copy elsewhere. Keep the tensor until the kernels
                that read it have ended, then check ``lease(tensor).is_held``: the memory ends with
                its node, and later reads are undefined.

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
        """Get several values, in one request to the master and one transfer per segment.

        An unreadable object (torch or its dtype is missing, or its descriptor is invalid) is None,
        as a miss is. It is logged and counted in ``stats().counters["unreadable_objects"]``;
        ``get`` raises the error.
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
        """Read values into the caller's memory; per key the bytes read, or None on a miss.

        Args:
            keys: a sequence, or a single key with a single buffer.
            buffers: per key a contiguous, writable tensor, array, bytearray or memoryview, in CPU
                memory or all on one device, or a list of them that is filled in order. Memory
                beyond the value's size is unchanged, unless a longer value is replaced during the
                read (with the transfer engine: during the call). Buffers of ``uint8`` take any
                dtype's bytes.
            stream: for device memory, as in ``put``. The bytes have arrived when this returns.

        Raises:
            BufferMismatchError: a buffer is too small (nothing was read for that key), of another
                dtype (its contents are undefined), or read-only (nothing was read). Other buffers
                of the batch may be filled.
            InvalidArgumentError: two buffers of the call share memory; nothing was read.
        """
        checked, memory = validation.per_key(keys, buffers, "buffers")
        options = GetOptions(self._namespace(namespace), timeout_ms=timeout_ms)
        return self._run(get.get_into(self._context, checked, memory, options, stream), timeout_ms)

    def get_ranges(
        self,
        keys: Sequence[AnyKey] | AnyKey,
        ranges: Sequence[Sequence[Range]] | Sequence[Range],
        *,
        namespace: str | None = None,
        timeout_ms: int | None = None,
    ) -> list[int | None]:
        """Read parts of values into the caller's memory.

        Returns the size of the complete value per key, or None on a miss, after which the key's
        buffers have undefined contents. The header is verified; the checksum is not, because it
        covers the complete payload.

        Args:
            keys: a sequence, or a single key with a single list of ranges.
            ranges: per key a list of ``(offset, buffer)``: the offset in the payload in bytes, and
                memory as for ``get_into``, which is as long as the range. Dtypes are not compared.

        Raises:
            BufferMismatchError: a range ends beyond its value, or a buffer cannot be filled.
            InvalidArgumentError: two buffers of the call share memory; nothing was read.
        """
        checked, each = validation.per_key(keys, ranges, "lists of ranges")
        targets = get.ObjectParts(checked, [validation.parts(parts) for parts in each])
        validation.check_no_overlap(
            checked, [[view for _, view in parts] for parts in targets.ranges]
        )
        space = self._namespace(namespace)
        return self._run(get.get_ranges(self._context, space, targets, timeout_ms), timeout_ms)

    def register(self, memory: Buffer | int, size: int | None = None) -> None:
        """Register memory of the caller until ``unregister`` or ``close``.

        ``memory_at`` returns parts of it by address. A transfer engine copies directly from and
        into it; other memory passes through a buffer. A ``get_into`` that fails with
        MemoryQuarantinedError leaves its contents in doubt: see that error. RDMA requires a process
        that may lock memory. After a fork the child must register its memory again.

        Args:
            memory: a writable tensor, array or buffer, which is kept alive; or the address of
                ``size`` bytes of this process or of a CUDA device, which the caller keeps
                allocated. Memory that is mapped read-only can be put but not filled.

        Raises:
            InvalidArgumentError: it is registered already, partly or completely, or is not readable
                memory of the host or of a CUDA device.
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
        """Unregister memory, named by the registered buffer or its address.

        Returns when nothing can be written to it any more: at once, or some 5 s after an aborted
        read. Unknown memory is ignored.
        """
        is_address = isinstance(memory, int | np.integer)
        self._state.movers.unregister(_address(memory) if is_address else _one(memory))

    def memory_at(self, address: int, size: int) -> memoryview:
        """Return ``size`` bytes at an address of registered host memory, to put or to get into.

        The caller keeps them allocated, and for a put unchanged, until that call returns.

        Raises:
            InvalidArgumentError: they are not within one registered memory, or are on a device.
        """
        return self._state.movers.registered.at(
            _address(address),
            validation.check_integer("size", size, 0, validation.SIZE_MAX, "bytes"),
        )

    def payload_at(self, addresses: Sequence[int], sizes: Sequence[int]) -> Payload:
        """Return a value of several registered runs, all on the host or all on one device.

        Raises:
            InvalidArgumentError: a run is not within one registered memory, or on another device.
        """
        starts = validation.check_integers("addresses", addresses, 0, validation.ADDRESS_MAX)
        lengths = validation.check_integers("sizes", sizes, 0, validation.SIZE_MAX, "bytes")
        return self._state.movers.registered.payload(starts, lengths)

    def device(self, name: str) -> Device:
        """Return a device, named as in torch (``cuda:0``), for values of several runs of its
        memory.

        See ``kvstore.device.memory.DeviceMemory``.

        Raises:
            DeviceError: there is no such device, or its driver cannot be used.
        """
        return self._state.movers.devices.of(validation.text("name", name))

    def lease(self, view: View) -> Lease | None:
        """Return the lease of a view or allocation, or of anything made of it; otherwise None."""
        return self._state.views.of(view)

    # --- lookups -----------------------------------------------------------------------------

    def match_prefix(
        self,
        keys: Sequence[AnyKey],
        *,
        namespace: str | None = None,
        hint: HintAction | str | None = None,
        retain: Duration = RETAIN_S,
        timeout_ms: int | None = None,
    ) -> int:
        """Return the number of leading keys of a chain that are stored, and lease those.

        The lease ends when the last of them has been read or released (``release``). O(log n) at
        the master for a chain stored by ``put_chain``. More than 16,384 keys take several calls.

        Args:
            hint: as of ``hint``, for the matched prefix; ``retain``: for how long.
        """
        space, hinted = self._namespace(namespace), check_hint(hint, retain)
        flow = control_calls.match_prefix(self._context, [space], _packed(keys), *hinted)
        return self._run(flow, timeout_ms)[0].matched

    def matches(
        self, keys: Sequence[AnyKey], *, namespaces: Sequence[str], timeout_ms: int | None = None
    ) -> list[PrefixMatchResult]:
        """Match a chain in several namespaces at once: an engine's ranks and cache groups."""
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
        bring: bool = True,
        timeout_ms: int | None = None,
    ) -> EngineMatchResult:
        """Match a chain for all namespaces of an engine, and lease the result.

        Args:
            namespaces: those of the engine's ranks and cache groups whose blocks are chains.
            states: those of recurrent states, which are no chains: only the last one is needed.
            bring: whether to begin to bring what is on disks into memory.
        """
        spaces, single = self._namespaces("match_all", namespaces, states)
        packed = _packed(keys)
        flow = control_calls.match_all(self._context, spaces, single, packed, bring=bring)
        return self._run(flow, timeout_ms)

    def release_match(self, reach: EngineMatchResult) -> None:
        """Release the lease of ``match_all``, once, from any client. Makes no call."""
        self._context.leases.done(reach.lease)

    def lookup(
        self, keys: Sequence[AnyKey], *, namespace: str | None = None, timeout_ms: int | None = None
    ) -> list[int | None]:
        """Return the payload size of each key in bytes, or None, and lease the objects found.

        A ``get`` or ``get_into`` within the lease (``kvstore-master --lease-ms``) needs no further
        call to the master. The lease ends when each object has been read or released once.
        """
        checked, space = validation.key_list(keys), self._namespace(namespace)
        return self._run(get.lookup(self._context, space, checked), timeout_ms)

    def release(self, keys: Sequence[AnyKey], *, namespace: str | None = None) -> None:
        """Release leases taken by ``lookup``, ``exists_many(lease=True)`` or ``match_prefix``.

        Leases of views and of other clients stay. Makes no call and does not wait.
        """
        read_objects.release(self._context, self._namespace(namespace), validation.key_list(keys))

    def exists(
        self, key: AnyKey, *, namespace: str | None = None, timeout_ms: int | None = None
    ) -> bool:
        """Return whether a complete object is stored. Takes no lease, unlike ``lookup``."""
        return self.exists_many([key], namespace=namespace, timeout_ms=timeout_ms)[0]

    def exists_many(
        self,
        keys: Sequence[AnyKey],
        *,
        lease: bool = False,
        namespace: str | None = None,
        timeout_ms: int | None = None,
    ) -> list[bool]:
        """Return for each key whether a complete object is stored.

        Args:
            lease: protect those that exist from eviction, as ``get`` does. Cheaper than ``lookup``,
                but a later ``get`` still looks up their locations.
        """
        space, lease = self._namespace(namespace), validation.flag("lease", lease)
        packed = packed_keys(validation.sequence("keys", keys))
        return self._run(control_calls.exists(self._context, space, packed, lease), timeout_ms)

    def stat(
        self, key: AnyKey, *, namespace: str | None = None, timeout_ms: int | None = None
    ) -> ObjectStat | None:
        """Return all details of one object, or None."""
        space = self._namespace(namespace)
        return self._run(control_calls.stat(self._context, space, check_key(key)), timeout_ms)

    def status(self, *, timeout_ms: int | None = None) -> calls.ClusterStatus:
        """Return a summary of the cluster."""
        return self._run(control_calls.status(), timeout_ms)

    def http(self, *, timeout_ms: int | None = None) -> MasterHTTP:
        """Return the HTTP endpoint of the leader."""
        self._run(control_calls.ping_leader(), timeout_ms)
        joined = self._stub.joined
        assert joined is not None, "it has answered a call that needs a join"
        host, _ = split_address(self._stub.address)
        at = join_address(host, joined.http_port) if joined.http_port else ""
        return MasterHTTP(host, at, has_events=joined.has_events)

    def traffic(
        self, namespace: str | None = None, *, timeout_ms: int | None = None
    ) -> calls.TrafficReport:
        """Return writers, readers and the last missed keys of a namespace, or of each one (None).

        The master keeps these since its start, for at least the last 512 namespaces: 16 writers and
        16 readers of each, and the last missed key of each reader. Reads from a client's location
        cache do not reach it. ``kvstore why`` draws the conclusions.
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
        """Return the most matched and most recently used chains, as branches of a tree.

        The master counts matches by the last block found, for at least 128 blocks of each of the
        last 512 namespaces since its start, and adds the most recently stored blocks.

        Args:
            namespace: None: the last 256 namespaces with puts or lookups.
            keys: up to 128; returns the chains that end at these blocks instead.
            count: maximum number of chains; 0: 128, the maximum. A reply has at most 256 branches.
        """
        count = validation.check_integer("count", count, 0, validation.SIZE_MAX)
        check_count(count, limits.CHAINS_MAX, "chains")
        checked = validation.key_list(keys, limits.CHAINS_MAX)
        if checked and namespace is None:
            raise InvalidArgumentError("blocks belong to one namespace: give its name")
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
        """Return the status of these blocks and of ``above`` ancestors of the last, each at most
        256. Takes no lease, and does not count as a use, match or miss."""
        above = validation.check_integer("above", above, 0, validation.SIZE_MAX)
        check_count(above, limits.BLOCKS_MAX, "blocks above")
        checked = validation.key_list(keys, limits.BLOCKS_MAX)
        request = calls.Blocks(self._namespace(namespace), checked, above)
        return self._run(ask(request, calls.BlocksReply), timeout_ms).blocks

    def list_objects(
        self, *, namespace: str = "", prefix: bytes = b"", timeout_ms: int | None = None
    ) -> Iterator[calls.ObjectRow]:
        """Iterate over all objects of a namespace ("": all) whose keys start with ``prefix``.

        Objects that come or go during the iteration may be missed or listed twice.
        """
        cursor: int | None = 0
        while cursor is not None:
            page = self.list_page(namespace, prefix, cursor, timeout_ms=timeout_ms)
            yield from page.objects
            cursor = page.next_cursor or None

    def list_page(
        self, namespace: str, prefix: bytes, cursor: int, *, timeout_ms: int | None = None
    ) -> calls.ListObjectsReply:
        """Return one page of ``list_objects``: up to 1,000 objects, and the next cursor."""
        space = validation.text("namespace", namespace) and check_namespace(namespace)
        begin = b"" if type(prefix) in (bytes, str) and not prefix else check_key(prefix)
        cursor = validation.check_integer("cursor", cursor, 0, validation.CURSOR_MAX)
        request = calls.ListObjects(space, begin, cursor, LIST_PAGE)
        return self._run(ask(request, calls.ListObjectsReply), timeout_ms)

    def stats(self) -> ClientStats:
        """Return the statistics of this client. Makes no call."""
        return self._state.stats()

    # --- pins --------------------------------------------------------------------------------

    def pin(
        self,
        keys: Sequence[AnyKey],
        seconds: Duration,
        *,
        namespace: str | None = None,
        timeout_ms: int | None = None,
    ) -> list[bool]:
        """Protect objects from eviction; per key, whether it is stored and now pinned.

        A pin also protects the ancestors, so pinning a chain's tip keeps the complete chain. Their
        memory counts towards the pin limit of the namespace, each object once.

        ``remove``, ``clear``, a TTL and the loss of a node end a pin with its object. It survives
        an ``overwrite`` and a drain, but not a restart of the master. It creates no replicas.

        Args:
            seconds: duration from this call: more than 0, at most a day; or a ``timedelta`` or
                text, as ``ttl``. Of several pins of an object, by any clients, the latest end
                counts.

        Raises:
            NoSpaceError: the namespace would exceed its pin limit (``kvstore-master --pinned-max``:
                half of the pool); ``fields["cause"]`` is ``"pins"``. Nothing was pinned; of more
                than 512 keys, which take several requests, the first may have been.
            InvalidArgumentError: more than 8,192 ancestors would be pinned by one request. Pin such
                a chain from its root, in several calls.
        """
        hold_ms = validation.duration_ms("seconds", seconds, limits.PIN_MS_MAX)
        checked, space = validation.key_list(keys), self._namespace(namespace)
        return self._run(control_calls.pin(space, checked, hold_ms), timeout_ms)

    def unpin(
        self, keys: Sequence[AnyKey], *, namespace: str | None = None, timeout_ms: int | None = None
    ) -> list[bool]:
        """Remove the pins of these objects, by any client; per key, whether it was pinned.

        Ancestors are released with the last pinned descendant.
        """
        space = self._namespace(namespace)
        return self._run(control_calls.unpin(space, validation.key_list(keys)), timeout_ms)

    # --- hints -------------------------------------------------------------------------------

    def hint(
        self,
        hints: Sequence[Hint],
        *,
        namespace: str | None = None,
        timeout_ms: int | None = None,
    ) -> list[HintResult]:
        """Tell the store what to expect of chains; each is named by its last key.

        Hints change the order of eviction among the objects of one tenant, and cost others nothing:

        * ``retain``: used again within ``ttl``. The chain is evicted last, until it is used or the
          time is over, which the store clips to six times the age at which it evicts.
        * ``release``: over. The blocks at its end that no other chain shares are evicted first.
        * ``demote``: not used soon. As ``release``, but evicted after what is over.
        * ``prefetch``: used soon. IGNORED while all objects are in memory.

        Hints are lost when the master restarts.

        Returns:
            One result per hint.

        Raises:
            InvalidArgumentError: an action is unknown, or a time is not within an hour.
        """
        rows, space = check_hints(hints), self._namespace(namespace)
        return self._run(control_calls.hint(space, rows), timeout_ms)

    def retain(
        self, key: AnyKey, ttl: Duration = RETAIN_S, *, namespace: str | None = None,
        timeout_ms: int | None = None,
    ) -> HintResult:  # fmt: skip
        """Keep the chain that ends with ``key`` for its next use; see ``hint``."""
        hints = [Hint("retain", key, ttl)]
        return self.hint(hints, namespace=namespace, timeout_ms=timeout_ms)[0]

    def end_session(
        self, key: AnyKey, *, namespace: str | None = None, timeout_ms: int | None = None
    ) -> HintResult:
        """Release the chain that ends with ``key``; see ``hint``."""
        hints = [Hint("release", key)]
        return self.hint(hints, namespace=namespace, timeout_ms=timeout_ms)[0]

    def demote(
        self, key: AnyKey, *, namespace: str | None = None, timeout_ms: int | None = None
    ) -> HintResult:
        """Have the chain that ends with ``key`` evicted early; see ``hint``."""
        hints = [Hint("demote", key)]
        return self.hint(hints, namespace=namespace, timeout_ms=timeout_ms)[0]

    def prefetch(
        self, key: AnyKey, *, namespace: str | None = None, timeout_ms: int | None = None
    ) -> HintResult:
        """Have the chain that ends with ``key`` brought into memory; see ``hint``."""
        hints = [Hint("prefetch", key)]
        return self.hint(hints, namespace=namespace, timeout_ms=timeout_ms)[0]

    def apply_hints(
        self,
        actions: Sequence[EnvelopeAction],
        chains: Mapping[str, Sequence[AnyKey]],
        *,
        timeout_ms: int | None = None,
    ) -> list[ActionResult]:
        """Carry out the actions of an envelope (``kvstore.calls.hint_envelopes.parse_envelope``).

        Args:
            chains: by namespace: the last keys of the chains that actions without keys are about.
                All actions are carried out in each of these namespaces.

        Returns:
            One result per action.
        """
        checked, targets = check_actions(actions), check_chains(chains)
        return self._run(apply_hints.apply_hints(checked, targets), timeout_ms)

    # --- remove ------------------------------------------------------------------------------

    def remove(
        self, key: AnyKey, *, namespace: str | None = None, timeout_ms: int | None = None
    ) -> bool:
        """Remove an object; returns whether there was one.

        After this call no client finds it, even after a restart. Views keep their bytes until their
        lease ends, which is no longer renewed: check ``lease(view).is_held``.
        """
        return self.remove_many([key], namespace=namespace, timeout_ms=timeout_ms)[0]

    def remove_many(
        self, keys: Sequence[AnyKey], *, namespace: str | None = None, timeout_ms: int | None = None
    ) -> list[bool]:
        """Remove several objects; per key, whether there was one."""
        checked, space = validation.key_list(keys), self._namespace(namespace)
        return self._run(control_calls.remove(self._context, space, checked), timeout_ms)

    def clear(
        self,
        namespace: str | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
        timeout_ms: int | None = None,
    ) -> int:
        """Remove all objects of a namespace, or of all namespaces (None); returns their number.

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

    # --- drain -------------------------------------------------------------------------------

    def drain(
        self, node: str, *, undo: bool = False, leave: bool = False, timeout_ms: int | None = None
    ) -> calls.DrainReply:
        """Stop placing new objects on a node, which still serves its objects to readers.

        ``kvstore drain`` calls this, then ``move_page`` until the node is empty, then ``leave``.

        Args:
            undo: place new objects on the node again.
            leave: let the node leave, even if it is not empty.

        Raises:
            InvalidArgumentError: there is no such node, or ``leave`` without a drain.
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
        """Copy some objects of a draining node to other nodes, through this process.

        Args:
            cursor: 0 starts a pass over all objects; then ``next_cursor`` of the last step, until
                it is 0.
            repair: instead, for any node, add a replica to objects that have fewer than they were
                put with, if there is space. Nodes do this by themselves.
            evict_up_to: evict objects on other nodes, of at most this version, that were used
                longer ago than the moved object; by default none. The version that ``drain``
                returns excludes objects moved off this node.

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

    # --- close -------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the client. Idempotent; calls in progress in other threads fail.

        Views stay readable, but their leases are no longer renewed. A dropped client closes itself
        when its last view and allocation are dropped.
        """
        self._state.close()

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the settings, with a password in ``etcd://...``, but without ``memory``."""
        config = self.config.model_copy(update={"memory": 0})
        return functools.partial(type(self), config=config), ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
        requested = validation.check_integer(
            "wait_ms", wait_ms, 0, validation.SIZE_MAX, "milliseconds"
        )
        # The master must reply before the call's own timeout, so that its error gives the reason.
        return min(requested, longest * 9 // 10)

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
        with self._tracing(getattr(flow, "__name__", "call")):
            return self._carry_out(flow, timeout_ms)

    def _carry_out(self, flow: Flow[ResultT], timeout_ms: int | None) -> ResultT:
        """Run the steps of a flow until it returns or times out."""
        if self._state.is_closed:
            raise ClosedError("the client is closed")
        timeout_s = self._seconds(timeout_ms)
        deadline = uptime() + timeout_s
        call, pause, move = self._state.stub.call, self._pause, self._state.movers.move
        stop = current()
        if stop is not None:
            deadline = min(deadline, stop.deadline)
            call, pause = _waiting(stop, call), _waiting(stop, pause)
        try:
            if self._is_interrupted:
                self._is_interrupted = False
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
            self._is_interrupted = True
            flow.close()
            raise

    def _seconds(self, timeout_ms: int | None) -> float:
        """Return the timeout of one call in seconds. Raises InvalidArgumentError."""
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
    """Convert a namespace for calls in which "" means all of them."""
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
    """Return ``wait``, which ``stop`` ends at once: it touches no memory of the caller."""

    def waits(*args: P.args, **kwargs: P.kwargs) -> ResultT:
        with stop.cancellable_wait():
            return wait(*args, **kwargs)

    return waits

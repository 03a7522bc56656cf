"""Mooncake's transfer engine: its import, and one engine with its registered memory.

Tested properties of the engine (0.3.13.post1) that shape this package:

- ``initialize``, ``register_memory`` and the destructor hold the GIL; ``batch_register_memory``,
  ``batch_unregister_memory`` and transfers release it. So the former run only when an engine is
  created or closed, and only the batch forms register memory.
- Several threads may transfer, register and unregister on one engine. They must not create engines
  (which share static state), nor close one during its calls.
- A call times out after ``MC_TRANSFER_TIMEOUT`` (at least 5 s) and 1 s per GiB; a transfer cannot
  be cancelled, and an abandoned one may land until the engine is closed.
- Waiting for a batch polls a core, so this package sleeps first for long batches.
- After a failed transfer others to the same peer may wait for seconds: an engine that has failed is
  replaced.
- ``initialize`` aborts the process (``LOG(FATAL)``) for an unsupported kind of metadata server, and
  waits 5 s for an etcd that does not reply: both are checked before.
- For rdma without an RDMA device it silently uses tcp, so this package checks for devices.
- Over tcp the peer rejects bytes outside its registered memory, and acknowledges a write after
  applying it. Only RDMA also checks that *our* memory is registered.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import logging
import mmap
import os
import re
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import sleep
from typing import Any, Final, NamedTuple

from kvstore.calls import EngineAddress
from kvstore.config import P2P
from kvstore.errors import DeadlineExceededError, InvalidArgumentError, TransferEngineError
from kvstore.runtime import resolver
from kvstore.runtime.addresses import split_address
from kvstore.runtime.clock import uptime
from kvstore.runtime.descriptors import sockets
from kvstore.wire.busy_poll_gauge import HIT, BusyPollGauge, polling_outcome

log = logging.getLogger("kvstore.mooncake")

PACKAGE: Final = "mooncake-transfer-engine-non-cuda"
"""Or ``mooncake-transfer-engine``, which requires CUDA's libraries."""

DEBIAN_PACKAGES: Final = "libibverbs1 librdmacm1 libnuma1 liburing2 libcurl4"

RDMA_DEVICES_DIR: Final = Path("/sys/class/infiniband")
METADATA_TIMEOUT_S: Final = 2.0

_ENVIRONMENT: Final = {
    # The minimum: a transfer that misses our deadline ends so much later.
    "MC_TRANSFER_TIMEOUT": "5",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "2",
    # One connection per peer, so that its idle time is known; more are not faster.
    "MC_TCP_LANES_PER_PEER": "1",
    "MC_LOG_LEVEL": "ERROR",
}
"""Defaults of environment variables. They apply to other users in this process, too."""

_LOGGED_FATAL: Final = 3
_POLL_S: Final = 1e-3
_NAP_S: Final = 50e-6
"""A caller's thread busy-polls for ``_POLL_S`` (1 MiB), if that pays, then naps between polls."""

_LARGE_BYTES: Final = 1 << 20
_UNCERTAIN: Final = 0.7
_NAP_S_MAX: Final = 0.01
"""Maximum sleep before polling for a large batch: ``_UNCERTAIN`` of its likely time."""

_NEEDED_OF_TCP: Final = ("MC_TCP_PROTO", "is not within any registered buffer")
"""Texts in a library that acknowledges applied writes and checks addresses."""

_making = threading.Lock()
_protocol_of_process = ""


class EngineSettings(NamedTuple):
    """The fields of ``NodeConfig`` and ``ClientConfig`` of these names."""

    protocol: str
    device_name: str = ""
    metadata_server: str = P2P


class TransferEngine:
    """One engine. Threads: any; ``close`` once no other call is in progress. Registered memory
    stays the caller's, who keeps it until ``unregister`` or ``close`` has returned."""

    def __init__(self, settings: EngineSettings, host: str) -> None:
        """``host``: our own address, as peers reach it. Raises TransferEngineError."""
        self.settings: Final = settings
        with _making:
            engine = _load(settings)
            _check_rdma_devices(settings)
            _check_metadata_server(settings.metadata_server)
            before = {sock_port for sock_port, _ in _listening()}
            name = host if settings.metadata_server == P2P else _unique_name(host)
            made = engine.TransferEngine()
            _silence()  # each new engine enables its log again
            if made.initialize(name, settings.metadata_server, settings.protocol,
                               settings.device_name):  # fmt: skip
                raise _refused(settings)
            self._engine: Any = made
            self._rpc_port = int(made.get_rpc_port())
            self.data_ports: Final = frozenset(
                port for port, _ in _listening() if port not in before | {self._rpc_port}
            )
            """Ports on which the engine listens for bytes; it has some with protocol tcp only."""
        self.name: Final = f"{host}:{self._rpc_port}" if settings.metadata_server == P2P else name
        self._bytes_per_s = 1e9
        self._gauge = BusyPollGauge()

    def address_of(self, base: int) -> EngineAddress:
        """Return the address of memory that is registered from ``base``, for peers."""
        return EngineAddress(self.name, base, self.settings.protocol, self.settings.metadata_server)

    def register(self, address: int, length: int) -> None:
        """Register memory. Raises TransferEngineError: it cannot be registered."""
        if self._engine.batch_register_memory([address], [length]):
            raise TransferEngineError(
                f"the transfer engine cannot register {length} bytes",
                advice="RDMA locks registered memory: raise the limit of locked memory "
                "(ulimit -l, LimitMEMLOCK= in systemd).",
                bytes=length,
            )

    def unregister(self, address: int) -> bool:
        """Return whether the memory was registered, and peers cannot reach it any more."""
        return not self._engine.batch_unregister_memory([address])

    def transfer(
        self,
        peer: str,
        ours: Sequence[int],
        theirs: Sequence[int],
        lengths: Sequence[int],
        *,
        is_write: bool,
    ) -> bool:
        """Copy these ranges, in any sequence; returns whether all arrived. Releases the GIL."""
        engine = self._engine
        submit = engine.batch_transfer_async_write if is_write else engine.batch_transfer_async_read
        batch = submit(peer, ours, theirs, lengths)
        if not _is_batch(batch):
            return False
        started = uptime()
        total = sum(lengths)
        is_large = total >= _LARGE_BYTES
        if is_large:
            sleep(min(total / self._bytes_per_s * _UNCERTAIN, _NAP_S_MAX))
        if engine.get_batch_transfer_status([batch]):
            return False
        if is_large:
            self._bytes_per_s += (total / (uptime() - started) - self._bytes_per_s) / 8
        return True

    def transfer_one(
        self, peer: str, ours: int, theirs: int, length: int, deadline: float, *, is_write: bool
    ) -> bool:
        """Transfer a single range in this thread. Raises DeadlineExceededError: it continues."""
        engine = self._engine
        submit = engine.batch_transfer_async_write if is_write else engine.batch_transfer_async_read
        batch = submit(peer, [ours], [theirs], [length])
        if not _is_batch(batch):
            return False
        # For a batch of one range this is complete and does not block: no other thread is needed.
        polls, before, outcome = self._gauge.should_poll(), uptime(), HIT
        until = before + (_POLL_S if polls else 0.0)
        while True:
            status, now = engine.transfer_check_status(batch), uptime()
            if outcome == HIT:
                outcome = polling_outcome(before, now, until)
            if status:
                break
            if now >= deadline:
                raise DeadlineExceededError("the deadline passed in a transfer")
            if outcome != HIT:
                sleep(_NAP_S)
            before = now
        if polls:
            self._gauge.record(outcome)
        return bool(status == 1)

    def close(self) -> None:
        """End every transfer, connection and thread. Idempotent. Holds the GIL briefly."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        # The destructor would wait, with the GIL, up to 1 s for the accepting thread.
        for port, listener in _listening():
            if port == self._rpc_port:
                with contextlib.suppress(OSError):
                    listener.shutdown(socket.SHUT_RDWR)
        del engine


def address_of_map(mapped: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def find_package() -> Path | None:
    """Return the engine's library file; None: the package is not installed."""
    try:
        spec = importlib.util.find_spec("mooncake.engine")
    except ImportError:
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)


def library_contains(library: Path, name: str) -> bool:
    """Return whether the library holds that text: a class, or a variable that it reads."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(name.encode()) >= 0


def import_engine() -> Any:
    """Import the package. Raises TransferEngineError: it, or a system library, is missing."""
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as error:
        missing = re.search(r"(lib[\w+-]+\.so[.\d]*)", str(error))
        if missing is None:
            raise TransferEngineError(
                "Mooncake's transfer engine is not installed",
                advice=f"pip install {PACKAGE}; or leave the setting protocol empty.",
                missing=PACKAGE,
            ) from None
        library = missing[1]
        raise TransferEngineError(
            f"Mooncake's transfer engine needs {library}, which this system does not have",
            advice=f"On Debian: apt-get install {DEBIAN_PACKAGES}.",
            missing=library,
        ) from error


def _load(settings: EngineSettings) -> Any:
    global _protocol_of_process  # noqa: PLW0603 - for which the environment was set
    if _protocol_of_process not in ("", settings.protocol):
        raise TransferEngineError(
            f"this process has a transfer engine for {_protocol_of_process} already, which cannot "
            f"have one for {settings.protocol}, too",
            advice="Name the same protocol everywhere in one process.",
        )
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    if settings.protocol == "tcp":
        os.environ["MC_FORCE_TCP"] = (
            "1"  # it uses an RDMA device if there is one, despite our settings
        )
    module = import_engine()
    _check_tcp(settings)
    _protocol_of_process = settings.protocol
    return module


def _check_tcp(settings: EngineSettings) -> None:
    """Check the engine's tcp guarantees, which came with 0.3.13 and can be disabled."""
    library = find_package()
    if settings.protocol != "tcp" or library is None:
        return
    if not all(library_contains(library, text) for text in _NEEDED_OF_TCP):
        raise TransferEngineError(
            "this release of Mooncake's transfer engine reports a write as complete too early",
            advice=f"pip install --upgrade {PACKAGE} (0.3.13 or newer).",
        )
    if os.environ.get("MC_TCP_PROTO") == "1":
        raise TransferEngineError(
            "with MC_TCP_PROTO=1 the transfer engine reports a write as complete too early",
            advice="Unset it.",
        )


def _silence() -> None:
    """Disable the engine's log, unless ``MC_LOG_LEVEL`` is set: our errors report failures."""
    if os.environ.get("MC_LOG_LEVEL") != _ENVIRONMENT["MC_LOG_LEVEL"]:
        return
    with contextlib.suppress(OSError, StopIteration, ValueError):
        maps = Path("/proc/self/maps").read_text().splitlines()
        glog = next(line.split()[-1] for line in maps if "/libglog" in line)
        level = ctypes.c_int32.in_dll(ctypes.CDLL(glog), "_ZN3fLI17FLAGS_minloglevelE")
        level.value = _LOGGED_FATAL


def rdma_devices() -> list[str]:
    try:
        return sorted(device.name for device in RDMA_DEVICES_DIR.iterdir())
    except OSError:
        return []


def _check_rdma_devices(settings: EngineSettings) -> None:
    if settings.protocol != "rdma":
        return
    present = rdma_devices()
    missing = [name for name in settings.device_name.split(",") if name and name not in present]
    if missing or not present:
        raise TransferEngineError(
            f"this host has no RDMA device {', '.join(missing)}".rstrip(),
            advice=f"There are: {', '.join(present)}."
            if present
            else "Load its driver, pass /dev/infiniband into the container, or use tcp.",
            protocol=settings.protocol,
            device_name=settings.device_name,
        )


def _check_metadata_server(server: str) -> None:
    if server == P2P:
        return
    kind, _, rest = server.partition("://")
    library = find_package()
    if (
        kind == "redis"
        and library is not None
        and not library_contains(library, "RedisStoragePlugin")
    ):
        raise TransferEngineError(
            "this build of Mooncake's transfer engine does not support redis://",
            advice=f"Use {P2P}, etcd:// or http://, or build the engine with USE_REDIS=ON.",
            metadata_server=server,
        )
    address = re.split(r"[/?,;]", rest, maxsplit=1)[0]
    try:
        default = {"http": 80, "https": 443, "etcd": 2379, "redis": 6379}[kind]
        by = uptime() + METADATA_TIMEOUT_S
        resolver.connect(*split_address(address, default_port=default), by).close()
    except (OSError, InvalidArgumentError) as error:
        raise TransferEngineError(
            f"the metadata server {server} cannot be reached: {error}",
            advice=f"Start it, correct its address, or use {P2P}, which needs none.",
            metadata_server=server,
        ) from None


def _refused(settings: EngineSettings) -> TransferEngineError:
    return TransferEngineError(
        f"Mooncake's transfer engine does not start with protocol {settings.protocol}, "
        f"devices {settings.device_name or 'all'}, metadata server {settings.metadata_server}",
        advice="Set MC_LOG_LEVEL=INFO to see the engine's log; kvstore doctor checks devices.",
        protocol=settings.protocol,
        device_name=settings.device_name,
        metadata_server=settings.metadata_server,
    )


def _unique_name(host: str) -> str:
    """Return a unique address: an http:// metadata server rejects a second entry with one name."""
    return f"{host}:{20_000 + secrets.randbelow(45_000)}"


def _is_batch(batch: int) -> bool:
    return 0 < batch < (1 << 64) - 1


def _listening() -> Iterator[tuple[int, socket.socket]]:
    for sock in sockets():
        with contextlib.suppress(OSError):
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            ):
                yield sock.getsockname()[1], sock

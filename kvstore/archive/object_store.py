"""The object store of an archive: obstore, with a deadline for each archive object."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Final, TypeVar

from kvstore.errors import ArchiveError, ConfigError
from kvstore.runtime.formatting import sanitize

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

ResultT = TypeVar("ResultT")

RETRIES: Final = 5
CONNECT_S: Final = 5.0
BACKOFF_S: Final = 2.0
FILE_S: Final = 10.0
"""Time for writes of files to end after an interruption: they cannot be cancelled."""
DROP_S: Final = 0.1
"""Time for requests to be dropped after they were cancelled."""
REASON_MAX: Final = 300

PLAIN_HTTP: Final = ("AWS_ALLOW_HTTP", "AZURE_ALLOW_HTTP", "GOOGLE_ALLOW_HTTP")
"""Variables of obstore that allow http://; options given in code would replace them."""


class ArchiveStore:
    """An object store below a URL, whose calls run on a thread and return futures.

    A future fails with an ``ArchiveError`` that names the archive object, at the latest after
    ``timeout_s``. ``close`` cancels all of them.
    """

    def __init__(self, url: str, timeout_s: float, *, create: bool = False) -> None:
        """Open the store. ``create``: also the folder of a ``file://`` URL.

        Raises:
            ConfigError: obstore is missing, or does not accept the URL.
            FileNotFoundError: the folder does not exist.
        """
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._grace_s = FILE_S if url.startswith("file:") else 0.0
        self._store = _open(url, timeout_s, create)
        self._api = importlib.import_module("obstore")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="archive", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(_end_others(self._grace_s))
        self._loop.close()

    # --- calls ------------------------------------------------------------------------------

    def put(self, path: str, content: bytes) -> Future[object]:
        """Write one archive object, at once or not at all."""
        # One request: an upload of several parts that is interrupted leaves parts behind.
        return self._submit(
            path, "written",
            lambda: self._api.put_async(self._store, path, content, use_multipart=False),
        )  # fmt: skip

    def get(self, path: str, start: int = 0, end: int | None = None) -> Future[memoryview | None]:
        """Read one archive object, or some bytes of it (fewer if it is truncated); None: it does
        not exist."""

        async def get() -> memoryview | None:
            with contextlib.suppress(FileNotFoundError):
                if end is None:
                    found = await self._api.get_async(self._store, path)
                    return memoryview(await found.bytes_async())
                part = self._api.get_range_async(self._store, path, start=start, end=end)
                return memoryview(await part)
            return None

        return self._submit(path, "read", get)

    def folders(self) -> Future[list[str]]:
        async def folders() -> list[str]:
            found = await self._api.list_with_delimiter_async(self._store)
            return sorted(found["common_prefixes"])

        return self._submit("", "listed", folders)

    def delete_others(self, folder: str, kept: set[str]) -> Future[int]:
        """Delete what is in a folder except ``kept``; returns the number."""

        async def delete_others() -> int:
            found = await self._api.list_with_delimiter_async(self._store, folder)
            paths = [meta["path"] for meta in found["objects"]]
            others = [path for path in paths if path.rpartition("/")[2] not in kept]
            if others:
                await self._api.delete_async(self._store, others)
            return len(others)

        return self._submit(folder, "cleaned", delete_others)

    def path_text(self, path: str) -> str:
        return f"{self.url}/{path}" if path else self.url

    def _submit(
        self, path: str, done: str, call: Callable[[], Awaitable[ResultT]]
    ) -> Future[ResultT]:
        guarded = self._guarded(self.path_text(path), done, call)
        return asyncio.run_coroutine_threadsafe(guarded, self._loop)

    async def _guarded(
        self, path: str, done: str, call: Callable[[], Awaitable[ResultT]]
    ) -> ResultT:
        from obstore.exceptions import BaseError

        try:
            return await asyncio.wait_for(call(), self._timeout_s)
        except TimeoutError:
            reason = f"it took longer than {self._timeout_s:g} s"
            advice = "Check the object store, or give more time: --timeout."
        except (BaseError, OSError, ValueError) as error:
            reason = sanitize(str(error).partition("\n\nDebug source")[0].strip(), REASON_MAX)
            advice = "Check the object store and the credentials in the environment."
        raise ArchiveError(f"{path} was not {done}: {reason}", advice=advice, object=path)


async def _end_others(grace_s: float) -> None:
    """End all calls. A call that outlives the interpreter would panic (a text on stderr)."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if tasks:
        await asyncio.wait(tasks, timeout=grace_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(DROP_S)


def _open(url: str, timeout_s: float, create: bool) -> ObjectStore:
    try:
        from obstore.exceptions import BaseError
        from obstore.store import LocalStore, from_url
    except ImportError:
        raise ConfigError(
            "archives need obstore, which is not installed here",
            advice="pip install 'obstore>=0.12', or install kvstore with its extra [archive].",
        ) from None
    try:
        if url.startswith("file:"):
            return LocalStore.from_url(url, mkdir=create)
        client_options: ClientConfig = {
            "connect_timeout": timedelta(seconds=min(CONNECT_S, timeout_s)),
            "timeout": timedelta(seconds=timeout_s / 2),  # one more request after a silent one
            "allow_http": any(os.environ.get(name, "") in ("1", "true") for name in PLAIN_HTTP),
        }
        retry_config: RetryConfig = {
            "max_retries": RETRIES,
            "retry_timeout": timedelta(seconds=timeout_s),
            "backoff": {"max_backoff": timedelta(seconds=BACKOFF_S)},
        }
        return from_url(url, client_options=client_options, retry_config=retry_config)
    except (BaseError, ValueError) as error:
        reason = str(error).partition("\n\nDebug source")[0].strip()
        if "Unable to canonicalize" in reason:
            raise FileNotFoundError(f"{url} does not exist") from error
        raise ConfigError(
            f"{url} is not a URL of an object store: {sanitize(reason, REASON_MAX)}",
            advice="Give s3://BUCKET/PREFIX, gs://..., az://... or file:///DIR.",
        ) from error

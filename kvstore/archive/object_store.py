"""The object store of an archive: obstore, with a deadline for each archive object."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvstore.errors import ArchiveError, ConfigError
from kvstore.runtime.formatting import sanitize
from kvstore.runtime.tasks import start_thread

try:
    import obstore
    from obstore.exceptions import BaseError
    from obstore.store import LocalStore, from_url
except ModuleNotFoundError:
    raise ConfigError(
        "archives need obstore, which is not installed here",
        advice="pip install 'obstore>=0.12', or install kvstore with its extra [archive].",
    ) from None

if TYPE_CHECKING:
    from obstore import ListResult, ObjectMeta
    from obstore.store import ObjectStore

ResultT = TypeVar("ResultT")

RETRIES: Final = 5
CLOSE_S: Final = 10.0
"""Time for calls to end after an interruption: files are complete or absent then."""
REASON_MAX: Final = 300

PLAIN_HTTP: Final = ("AWS_ALLOW_HTTP", "AZURE_ALLOW_HTTP", "GOOGLE_ALLOW_HTTP")
"""Variables of obstore that allow http://; options given in code would replace them."""


class ArchiveStore:
    """An object store below a URL, whose calls run on threads. They fail with an ``ArchiveError``
    that names the archive object, at the latest after ``timeout_s`` (files: no limit)."""

    def __init__(self, url: str, timeout_s: float, *, create: bool = False) -> None:
        """Open the store. ``create``: also the folder of a ``file://`` URL.

        Raises:
            ConfigError: obstore does not accept the URL.
            FileNotFoundError: the folder does not exist.
        """
        self.url = url.rstrip("/")
        self._store = _open(url, timeout_s, create)
        self._running: set[Future[Any]] = set()

    def close(self) -> None:
        wait(self._running, CLOSE_S)

    def put(self, path: str, content: bytes) -> Future[object]:
        """Write one archive object, at once or not at all."""
        # One request: an upload of several parts that is interrupted leaves parts behind.
        return self._start(
            path, "written", lambda: obstore.put(self._store, path, content, use_multipart=False)
        )

    def get(self, path: str, start: int = 0, end: int | None = None) -> Future[memoryview]:
        """Read one archive object, or some bytes of it (fewer if it is truncated)."""

        def get() -> memoryview:
            if end is None:
                return memoryview(obstore.get(self._store, path).bytes())
            return memoryview(obstore.get_range(self._store, path, start=start, end=end))

        return self._start(path, "read", get)

    def folders(self) -> list[str]:
        return sorted(self._list("")["common_prefixes"])

    def names(self, folder: str) -> list[str]:
        """Return the names of the archive objects in a folder; empty: there is none."""
        return [row["path"].rpartition("/")[2] for row in self._list(folder)["objects"]]

    def delete(self, paths: list[str]) -> None:
        self._start(paths[0], "deleted", lambda: obstore.delete(self._store, paths)).result()

    def _list(self, folder: str) -> ListResult[Sequence[ObjectMeta]]:
        call = partial(obstore.list_with_delimiter, self._store, folder or None)
        return self._start(folder, "listed", call).result()

    def path_text(self, path: str) -> str:
        return f"{self.url}/{path}".rstrip("/")

    def _start(self, path: str, done: str, call: Callable[[], ResultT]) -> Future[ResultT]:
        future: Future[ResultT] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - a panic of obstore, too
                failure = ArchiveError(
                    f"{self.path_text(path)} was not {done}: {_reason(error)}",
                    advice="Check the object store and the credentials in the environment, or "
                    "give more time: --timeout.",
                    object=self.path_text(path),
                )
                future.set_exception(failure)

        self._running.add(future)
        future.add_done_callback(self._running.discard)
        start_thread("archive", run)
        return future


def _open(url: str, timeout_s: float, create: bool) -> ObjectStore:
    half = timedelta(seconds=timeout_s / 2)  # the last retry begins in the first half
    try:
        if url.startswith("file:"):
            return LocalStore.from_url(url, mkdir=create)
        return from_url(
            url,
            client_options={
                "timeout": half,
                "allow_http": any(os.environ.get(name) in ("1", "true") for name in PLAIN_HTTP),
            },
            retry_config={"max_retries": RETRIES, "retry_timeout": half},
        )
    except (BaseError, ValueError) as error:
        if "Unable to canonicalize" in str(error):
            raise FileNotFoundError(f"{url} does not exist") from error
        raise ConfigError(
            f"{url} is not a URL of an object store: {_reason(error)}",
            advice="Give s3://BUCKET/PREFIX, gs://..., az://... or file:///DIR.",
        ) from error


def _reason(error: BaseException) -> str:
    return sanitize(str(error).partition("\n\nDebug source")[0].strip(), REASON_MAX)

"""What the paths of ``/api/v1`` have in common: how a question is read, how an error is told, and
the document that describes them all (OpenAPI 3.1)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Annotated, Any, Final, NamedTuple, TypeVar, get_origin

from aiohttp import web
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, WithJsonSchema

from kvstore.errors import (
    BatchTooLargeError,
    ClosedError,
    InvalidArgumentError,
    KVStoreError,
    NoSpaceError,
    PutRefusedError,
    StaleReadError,
    UnavailableError,
    UsageError,
    ValueTooLargeError,
)
from kvstore.limits import KEY_BYTES_MAX
from kvstore.web.server.access import HEADERS
from kvstore.web.server.doors import RETRY_AFTER_S, Handler
from kvstore.web.server.serving import BODY_BYTES_MAX, at_work, read_body

PATH: Final = "/api/v1/openapi.json"

ANSWER_S: Final = 10.0
"""Of one question, which may need several calls to the store."""

JSON: Final = "application/json"
BYTES: Final = "application/octet-stream"

STATUSES: Final[Mapping[type[KVStoreError], int]] = {
    UsageError: 400,
    ValueTooLargeError: 413,
    BatchTooLargeError: 413,
    UnavailableError: 503,
    ClosedError: 503,
    PutRefusedError: 503,
    StaleReadError: 503,
    NoSpaceError: 507,
    KVStoreError: 500,
}
"""The status of each error, or of the nearest class above it."""


# --- questions ------------------------------------------------------------------------------------


def _hex(bytes_min: int) -> str:
    """The pattern of that many bytes in hexadecimal, up to ``KEY_BYTES_MAX``."""
    return f"([0-9a-fA-F]{{2}}){{{bytes_min},{KEY_BYTES_MAX}}}"


def _from_hex(text: object) -> bytes:
    """Raises ValueError. What ``bytes.fromhex`` takes beside that is no key: white space."""
    if not isinstance(text, str):
        raise ValueError("a key is text, in hexadecimal")
    if re.fullmatch(_hex(0), text) is None:
        raise ValueError(f"{text[:64]!r} is no key of up to {KEY_BYTES_MAX} bytes in hexadecimal")
    return bytes.fromhex(text)


def _key_from_hex(text: object) -> bytes:
    """Raises ValueError."""
    if text == "":
        raise ValueError("a key has at least one byte")
    return _from_hex(text)


HexKey = Annotated[
    bytes,
    BeforeValidator(_key_from_hex),
    WithJsonSchema({"type": "string", "pattern": f"^{_hex(1)}$"}),
]
HexPrefix = Annotated[
    bytes,
    BeforeValidator(_from_hex),
    WithJsonSchema({"type": "string", "pattern": f"^{_hex(0)}$"}),
]


class Question(BaseModel):
    """A body of JSON, or what follows the ``?``."""

    model_config = ConfigDict(extra="forbid")


QuestionT = TypeVar("QuestionT", bound=Question)


async def body_of(request: web.Request, kind: type[QuestionT]) -> QuestionT:
    """Raises InvalidArgumentError, BusyError."""
    if request.content_type != JSON:  # no form of another site can send it
        raise InvalidArgumentError("the body must be application/json")
    text = await read_body(request)
    return _checked(lambda: kind.model_validate_json(text), "the body")


def query_of(request: web.Request, kind: type[QuestionT]) -> QuestionT:
    """A parameter that is a list may be repeated. Raises InvalidArgumentError."""
    query = request.query
    lists = [
        name for name, field in kind.model_fields.items() if get_origin(field.annotation) is list
    ]
    given: dict[str, object] = {
        name: query.getall(name) if name in lists else query[name] for name in query
    }
    if any(len(query.getall(name)) > 1 for name in query if name not in lists):
        raise InvalidArgumentError("a parameter is given twice")
    return _checked(lambda: kind.model_validate(given), "the address")


def _checked(read: Callable[[], QuestionT], whole: str) -> QuestionT:
    try:
        return read()
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))[:64]
        raise InvalidArgumentError(
            f"{place or whole}: {first['msg'].removeprefix('Value error, ')}"
        ) from None


# --- answers --------------------------------------------------------------------------------------

Answer = Callable[[web.Request], Awaitable[BaseModel | web.StreamResponse]]


def answered(answer: Answer, *, moves_bytes: bool = False) -> Handler:
    """The answer as JSON, unless it is a response; an error as a status and a line of text.

    ``moves_bytes``: ``answer`` waits for its client, and has bounds and deadlines of its own.
    """

    async def handler(request: web.Request) -> web.StreamResponse:
        try:
            if moves_bytes:
                found = await answer(request)
            else:
                await read_body(request)
                async with asyncio.timeout(ANSWER_S), at_work(request):
                    found = await answer(request)
        except TimeoutError:
            return refusal(503, f"no answer within {ANSWER_S:g} s")
        except KVStoreError as error:
            return refusal(status_of(error), str(error))
        return as_json(found) if isinstance(found, BaseModel) else found

    return handler


def status_of(error: KVStoreError) -> int:
    return next(STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES)


def refusal(status: int, text: str) -> web.Response:
    headers = {**HEADERS, "Retry-After": str(RETRY_AFTER_S)} if status == 503 else HEADERS
    return web.Response(status=status, text=text + "\n", headers=headers)


def as_json(found: BaseModel, *, status: int = 200) -> web.Response:
    body = found.model_dump_json().encode()
    return web.Response(status=status, body=body, content_type=JSON, headers=HEADERS)


# --- the document ---------------------------------------------------------------------------------

Content = type[BaseModel] | str | None
"""JSON of this shape, or a type of content, or nothing."""


class Described(NamedTuple):
    """One path and method."""

    method: str
    path: str
    summary: str
    answers: Mapping[int, tuple[str, Content]]
    """By status; those that all may have are added."""
    query: type[Question] | None = None
    body: Content = None
    is_trusted: bool = False
    """Whether it needs the token, or loopback."""


_ALWAYS: Final[Mapping[int, tuple[str, Content]]] = {
    400: ("A wrong question.", "text/plain"),
    415: ("The body has a Content-Encoding.", "text/plain"),
    421: ("It came by a name that is not known here.", "text/plain"),
    503: ("No master answers now, or something is full: ask again.", "text/plain"),
}
_WITH_JSON: Final[Mapping[int, tuple[str, Content]]] = {
    413: (f"The body has more than {BODY_BYTES_MAX} bytes.", "text/plain"),
}
_GUARDED: Final[Mapping[int, tuple[str, Content]]] = {
    401: ("It needs the token.", "text/plain"),
    403: ("It does not come from loopback, or a page of another site sent it.", "text/plain"),
}


def document(described: Iterable[Described]) -> dict[str, Any]:
    """All of them, by OpenAPI 3.1."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for each in described:
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvstore", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(each: Described, schemas: dict[str, Any]) -> dict[str, Any]:
    guarded = _GUARDED if each.is_trusted else {401: _GUARDED[401]}
    of_body = {} if each.body is None or isinstance(each.body, str) else _WITH_JSON
    answers = {**_ALWAYS, **guarded, **of_body, **each.answers}
    operation: dict[str, Any] = {
        "summary": each.summary,
        "security": [{"token": []}, {}],  # the token, or none where this server needs none
        "responses": {
            str(status): {"description": text, **_content(kind, schemas)}
            for status, (text, kind) in sorted(answers.items())
        },
    }
    if each.query is not None:
        shape = _schema(each.query, schemas)
        operation["parameters"] = [
            {
                "name": name,
                "in": "query",
                "required": name in shape.get("required", ()),
                "description": field.get("description", ""),
                "schema": field,
            }
            for name, field in shape["properties"].items()
        ]
    if each.body is not None:
        operation["requestBody"] = {"required": True, **_content(each.body, schemas)}
    return operation


def _content(kind: Content, schemas: dict[str, Any]) -> dict[str, Any]:
    if kind is None:
        return {}
    if isinstance(kind, str):
        return {"content": {kind: {"schema": {"type": "string"}}}}
    schemas[kind.__name__] = _schema(kind, schemas)
    reference = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"content": {JSON: {"schema": reference}}}


def _schema(kind: type[BaseModel], schemas: dict[str, Any]) -> dict[str, Any]:
    made = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(made.pop("$defs", {}))
    return made

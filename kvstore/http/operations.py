"""Operations of ``/api/v1``: methods, with the path in their decorator ``endpoint``.

Requests are validated against the annotations of the method. Annotations and docstring are also the
source of the OpenAPI 3.1 document (``OpenApiDocument``).
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Annotated, Any, Final, NamedTuple, TypeVar, get_args, get_origin

from aiohttp import web
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, WithJsonSchema

from kvstore.errors import (
    BatchTooLargeError,
    ClosedError,
    InvalidArgumentError,
    KVStoreError,
    NoSpaceError,
    PermissionDeniedError,
    PutRefusedError,
    StaleReadError,
    UnavailableError,
    UsageError,
    ValueTooLargeError,
)
from kvstore.http.access_control import HEADERS
from kvstore.http.connection_limiter import RETRY_AFTER_S
from kvstore.http.serving import BODY_BYTES_MAX, processing_slot, read_body
from kvstore.limits import KEY_BYTES_MAX

PATH: Final = "/api/v1/openapi.json"

ANSWER_S: Final = 10.0
"""Timeout of one request, which may need several calls to the store."""

JSON: Final = "application/json"

STATUSES: Final[Mapping[type[KVStoreError], int]] = {
    UsageError: 400,
    PermissionDeniedError: 403,
    ValueTooLargeError: 413,
    BatchTooLargeError: 413,
    UnavailableError: 503,
    ClosedError: 503,
    PutRefusedError: 503,
    StaleReadError: 503,
    NoSpaceError: 507,
    KVStoreError: 500,
}
"""The status of each error, or of its nearest base class."""


# --- questions ------------------------------------------------------------------------------------


_KEY: Final = f"([0-9a-fA-F]{{2}}){{1,{KEY_BYTES_MAX}}}"


def _key_from_hex(text: object) -> bytes:
    """Parse a key. Raises ValueError. ``bytes.fromhex`` would accept white space."""
    if not isinstance(text, str) or re.fullmatch(_KEY, text) is None:
        shown = repr(text[:64]) if isinstance(text, str) else "this"
        raise ValueError(f"{shown} is no key of 1 to {KEY_BYTES_MAX} bytes in hexadecimal")
    return bytes.fromhex(text)


HexKey = Annotated[
    bytes,
    BeforeValidator(_key_from_hex),
    WithJsonSchema({"type": "string", "pattern": f"^{_KEY}$"}),
]


class ApiRequest(BaseModel):
    """The fields of a request: its JSON body or its query."""

    model_config = ConfigDict(extra="forbid")


QuestionT = TypeVar("QuestionT", bound=ApiRequest)


async def _body_of(request: web.Request, kind: type[QuestionT]) -> QuestionT:
    """Parse the body. Raises InvalidArgumentError, BusyError."""
    if request.content_type != JSON:  # a form on a page of another site cannot send this type
        raise InvalidArgumentError("the body must be application/json")
    text = await read_body(request)
    return _checked(lambda: kind.model_validate_json(text), "the body")


def _query_of(request: web.Request, kind: type[QuestionT]) -> QuestionT:
    """Parse the query; a list parameter may be repeated. Raises InvalidArgumentError."""
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


def _checked(read: Callable[[], QuestionT], subject: str) -> QuestionT:
    try:
        return read()
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))[:64]
        raise InvalidArgumentError(
            f"{place or subject}: {first['msg'].removeprefix('Value error, ')}"
        ) from None


# --- answers --------------------------------------------------------------------------------------

Answer = BaseModel | dict[str, Any] | web.StreamResponse | None
"""Result of an endpoint: JSON, a response, or None (no body)."""


class Operation(NamedTuple):
    """One path and method."""

    method: str
    path: str
    summary: str
    responses: Mapping[int, str]
    """The meaning of each status, besides those of all endpoints."""
    response: Callable[..., Awaitable[Answer]]
    request: type[ApiRequest] | None
    """Fields of the query; of a POST, of the body."""
    takes_request: bool
    content: type[BaseModel] | str | None
    """Content of a successful response: JSON of this model, or a content type, or none."""
    is_trusted: bool
    """Whether requests require the token or loopback."""
    is_of_all: bool
    """Whether the response includes all namespaces regardless of the identity. Other responses come
    from calls that are authorized for the requester."""
    has_own_bounds: bool
    """Whether the method has its own limits and deadlines, because it waits for its client or uses
    only data of this process."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Process a request; an error becomes a status and a line of text."""
        try:
            if self.has_own_bounds:
                found = await self._respond(request)
            else:
                await read_body(request)
                async with asyncio.timeout(ANSWER_S), processing_slot(request):
                    found = await self._respond(request)
        except TimeoutError:
            return _refusal(503, f"no answer within {ANSWER_S:g} s")
        except KVStoreError as error:
            return _refusal(status_of(error), str(error))
        if isinstance(found, web.StreamResponse):
            return found
        status = min(self.responses)
        if found is None:
            return web.Response(status=status, headers=HEADERS)
        if isinstance(found, dict):
            return web.json_response(found, status=status, headers=HEADERS)
        body = found.model_dump_json().encode()
        return web.Response(status=status, body=body, content_type=JSON, headers=HEADERS)

    async def _respond(self, request: web.Request) -> Answer:
        given: list[Any] = [request] if self.takes_request else []
        if self.request is not None and self.method == "POST":
            given.append(await _body_of(request, self.request))
        elif self.request is not None:
            given.append(_query_of(request, self.request))
        return await self.response(*given)


AnswerT = TypeVar("AnswerT", bound=Callable[..., Awaitable[Answer]])


def endpoint(
    method: str,
    path: str,
    answers: Mapping[int, str],
    *,
    content: str | None = None,
    is_trusted: bool = False,
    is_of_all: bool = False,
    has_own_bounds: bool = False,
) -> Callable[[AnswerT], AnswerT]:
    """Decorate a method as an endpoint. It may take the ``request``, then an ``ApiRequest``; its
    docstring is the summary. For the arguments see ``Operation``.

    ``content``: the content type if the method returns no JSON. The model of JSON is the return
    annotation; of a ``dict``, ``Annotated[dict[str, Any], Model]``.
    """

    def described(answer: AnswerT) -> AnswerT:
        signature = inspect.signature(answer, eval_str=True)
        _, *taken = (parameter.annotation for parameter in signature.parameters.values())
        told = [signature.return_annotation, *get_args(signature.return_annotation)]
        answer.__dict__["endpoint"] = Operation(
            method, path, " ".join((answer.__doc__ or "").split()), answers, answer,
            next(filter(_is_model, taken), None), web.Request in taken,
            content or next(filter(_is_model, told), None), is_trusted, is_of_all,
            has_own_bounds,
        )  # fmt: skip
        return answer

    return described


def endpoints_of(owner: object) -> list[Operation]:
    """Return the endpoints of an object; those of a class serve only as descriptions."""
    kind = owner if isinstance(owner, type) else type(owner)
    return [
        var.endpoint._replace(response=getattr(owner, name))
        for name, var in vars(kind).items()
        if hasattr(var, "endpoint")
    ]


def _is_model(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def status_of(error: KVStoreError) -> int:
    return next(STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES)


def _refusal(status: int, text: str) -> web.Response:
    headers = {**HEADERS, "Retry-After": str(RETRY_AFTER_S)} if status == 503 else HEADERS
    return web.Response(status=status, text=text + "\n", headers=headers)


# --- the document ---------------------------------------------------------------------------------

_ALWAYS: Final[Mapping[int, str]] = {
    400: "A wrong question.",
    415: "The body has a Content-Encoding.",
    421: "It came by a name that is not known here.",
    503: "No master answers now, or something is full: ask again.",
}
_WITH_JSON: Final[Mapping[int, str]] = {
    413: f"The body has more than {BODY_BYTES_MAX} bytes.",
}
_GUARDED: Final[Mapping[int, str]] = {
    401: "It needs the token.",
    403: "It does not come from loopback, or a page of another site sent it.",
}


class OpenApiDocument:
    """The OpenAPI document of all endpoints, including its own."""

    def __init__(self, endpoints: Iterable[Operation]) -> None:
        schemas: dict[str, Any] = {}
        paths: dict[str, Any] = {}
        for each in [*endpoints, *endpoints_of(self)]:
            paths.setdefault(each.path, {})[each.method.lower()] = _operation(each, schemas)
        self.document = {
            "openapi": "3.1.0",
            "info": {"title": "kvstore", "version": "1"},
            "paths": paths,
            "components": {
                "schemas": schemas,
                "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            },
        }

    @endpoint("GET", PATH, {200: "OpenAPI 3.1."}, content=JSON, has_own_bounds=True)
    async def _describe(self) -> dict[str, Any]:
        """This document."""
        return self.document


def _operation(each: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    is_body = each.method == "POST"
    guarded = _GUARDED if each.is_trusted else {401: _GUARDED[401]}
    answers = {**_ALWAYS, **guarded, **(_WITH_JSON if is_body else {}), **each.responses}
    operation: dict[str, Any] = {
        "summary": each.summary,
        "security": [{"token": []}, {}],  # the token, or none where this server needs none
        "responses": {
            str(status): {
                "description": text,
                **_content(each.content if status < 400 else "text/plain", schemas),
            }
            for status, text in sorted(answers.items())
        },
    }
    if is_body:
        operation["requestBody"] = {"required": True, **_content(each.request, schemas)}
    elif each.request is not None:
        shape = _schema(each.request, schemas)
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
    return operation


def _content(kind: type[BaseModel] | str | None, schemas: dict[str, Any]) -> dict[str, Any]:
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

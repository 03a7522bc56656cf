"""``/api/v1`` for programs: how much of a chain is stored and where, what exists, one object.

It only reads. Keys are bytes, so they travel in hexadecimal.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, Final, TypeVar

from aiohttp import web
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
)

from kvstore.cli.show import key_text
from kvstore.client.aio import AsyncClient
from kvstore.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    KVStoreError,
    MasterUnreachableError,
    UnavailableError,
)
from kvstore.limits import BATCH_KEYS_MAX, DEFAULT_NAMESPACE, NAMESPACES_MAX
from kvstore.web.serving import Routes

TIMEOUT_MS: Final = 2_000
"""Of one call to the store."""

ANSWER_S: Final = 10.0
"""Of one request, which may need a call for each namespace."""

MATCH_PATH: Final = "/api/v1/match"
EXISTS_PATH: Final = "/api/v1/exists"
STAT_PATH: Final = "/api/v1/stat"
OPENAPI_PATH: Final = "/api/v1/openapi.json"


def _key(text: object) -> bytes:
    """Raises ValueError."""
    try:
        return bytes.fromhex(str(text))
    except ValueError:
        raise ValueError(f"{str(text)[:64]!r} is not hexadecimal") from None


HexKey = Annotated[
    bytes,
    BeforeValidator(_key),
    WithJsonSchema({"type": "string", "pattern": "^([0-9a-fA-F]{2})+$"}),
]


class _Question(BaseModel):
    model_config = ConfigDict(extra="forbid")


class MatchQuestion(_Question):
    """How many of these keys, from the first on, are stored?"""

    keys: list[HexKey] = Field(
        max_length=BATCH_KEYS_MAX, description="Of a chain, from its root; in hexadecimal."
    )
    namespaces: list[str] = Field(
        default=[DEFAULT_NAMESPACE],
        min_length=1,
        max_length=NAMESPACES_MAX,
        description="Where to look; each has an answer of its own.",
    )


class ExistsQuestion(_Question):
    """Which of these keys are stored?"""

    keys: list[HexKey] = Field(max_length=BATCH_KEYS_MAX, description="In hexadecimal.")
    namespace: str = DEFAULT_NAMESPACE


class MatchAnswer(BaseModel):
    """Of one namespace."""

    namespace: str
    matched: int = Field(description="Leading keys that are stored; they are leased by this.")
    being_written: int = Field(description="Keys after those that are being written now.")
    nodes: list[str] = Field(description="Nodes that hold the last matched block.")


class MatchAnswers(BaseModel):
    matches: list[MatchAnswer]


class ExistsAnswer(BaseModel):
    exists: list[bool] = Field(description="Per key.")


class Place(BaseModel):
    node: str
    segment: int
    offset: int


class StatAnswer(BaseModel):
    """One object."""

    namespace: str
    key: str = Field(description="In hexadecimal.")
    text: str = Field(description="The key as kvstore ls shows it.")
    size: int = Field(description="Payload bytes.")
    replicas: int
    depth: int = Field(description="Ancestors, as far as known.")
    leased_ms: int
    state: str
    parent: str | None = Field(description="Its key, in hexadecimal.")
    children: int
    version: str
    idle_ms: int = Field(description="Time since its last use.")
    places: list[Place]


QuestionT = TypeVar("QuestionT", bound=_Question)


class Api:
    """Answers programs, as a client of the master does. Use it in one event loop."""

    def __init__(
        self, client: AsyncClient, known: Callable[[], Awaitable[Mapping[int, str]]]
    ) -> None:
        """``known``: the node of each segment, of a moment ago."""
        self._client = client
        self._known = known

    def gets(self) -> Routes:
        return {STAT_PATH: _answered(self._stat), OPENAPI_PATH: _answered(self._openapi)}

    def posts(self) -> Routes:
        return {MATCH_PATH: _answered(self._match), EXISTS_PATH: _answered(self._exists)}

    async def _match(self, request: web.Request) -> BaseModel:
        asked = await _question(request, MatchQuestion)
        found = await self._client.matches(
            asked.keys, namespaces=asked.namespaces, timeout_ms=TIMEOUT_MS
        )
        segments = [
            await self._segments(namespace, asked.keys[match.matched - 1]) if match.matched else []
            for namespace, match in zip(asked.namespaces, found, strict=True)
        ]
        names = await self._nodes(chain.from_iterable(segments))
        return MatchAnswers(
            matches=[
                MatchAnswer(
                    namespace=namespace,
                    matched=match.matched,
                    being_written=match.being_written,
                    nodes=[names[each] for each in holding if each in names],
                )
                for namespace, match, holding in zip(asked.namespaces, found, segments, strict=True)
            ]
        )

    async def _exists(self, request: web.Request) -> BaseModel:
        asked = await _question(request, ExistsQuestion)
        found = await self._client.exists_many(
            asked.keys, namespace=asked.namespace, timeout_ms=TIMEOUT_MS
        )
        return ExistsAnswer(exists=found)

    async def _stat(self, request: web.Request) -> BaseModel:
        namespace = request.query.get("namespace", DEFAULT_NAMESPACE)
        try:
            key = _key(request.query.get("key", ""))
        except ValueError as error:
            raise InvalidArgumentError(str(error)) from None
        found = await self._client.stat(key, namespace=namespace, timeout_ms=TIMEOUT_MS)
        if found is None or found.detail.row is None:
            raise web.HTTPNotFound(text="no such object\n")
        detail, row = found.detail, found.detail.row
        names = await self._nodes(detail.placements.segments)
        places = zip(detail.placements.segments, detail.placements.offsets, strict=True)
        return StatAnswer(
            namespace=row.namespace,
            key=row.key.hex(),
            text=key_text(row.key),
            size=row.size,
            replicas=row.replicas,
            depth=row.depth,
            leased_ms=row.leased_ms,
            state=row.state,
            parent=detail.parent.hex() if detail.parent else None,
            children=detail.children,
            version=f"{detail.version.epoch}.{detail.version.counter}",
            idle_ms=detail.idle_ms,
            places=[
                Place(node=names.get(segment, ""), segment=segment, offset=offset)
                for segment, offset in places
            ],
        )

    async def _openapi(self, request: web.Request) -> dict[str, Any]:
        del request
        return openapi()

    async def _segments(self, namespace: str, key: bytes) -> Sequence[int]:
        """Where the object is."""
        found = await self._client.stat(key, namespace=namespace, timeout_ms=TIMEOUT_MS)
        return [] if found is None else found.detail.placements.segments

    async def _nodes(self, segments: Iterable[int]) -> Mapping[int, str]:
        """The nodes of these segments, among others. Asks the master only for new ones."""
        names = await self._known()
        if not names.keys() >= set(segments):
            names = (await self._client.status(timeout_ms=TIMEOUT_MS)).nodes_by_segment()
        return names


async def _question(request: web.Request, kind: type[QuestionT]) -> QuestionT:
    """Raises InvalidArgumentError."""
    if request.content_type != "application/json":  # no form of another site can send it
        raise InvalidArgumentError("the body must be application/json")
    try:
        return kind.model_validate_json(await request.read())
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise InvalidArgumentError(f"{place or 'the body'}: {first['msg']}") from None


def _answered(
    answer: Callable[[web.Request], Awaitable[BaseModel | dict[str, Any]]],
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """The answer as JSON; an error of the store as a status and a line of text."""

    async def handler(request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(ANSWER_S):
                found = await answer(request)
        except TimeoutError:
            return web.Response(status=503, text=f"no answer within {ANSWER_S:g} s\n")
        except (UnavailableError, MasterUnreachableError, DeadlineExceededError) as error:
            return web.Response(status=503, text=f"{error}\n")
        except KVStoreError as error:
            return web.Response(status=400, text=f"{error}\n")
        body = found.model_dump_json() if isinstance(found, BaseModel) else json.dumps(found)
        return web.Response(body=body.encode(), content_type="application/json")

    return handler


def openapi() -> dict[str, Any]:
    """The description of these paths, by OpenAPI 3.1."""
    from kvstore.web import chains  # which answers with the functions of this module

    definitions: dict[str, Any] = {}

    def schema(kind: type[BaseModel]) -> dict[str, str]:
        made = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        definitions.update(made.pop("$defs", {}))
        definitions[kind.__name__] = made
        return {"$ref": f"#/components/schemas/{kind.__name__}"}

    def content(kind: type[BaseModel]) -> dict[str, Any]:
        return {"application/json": {"schema": schema(kind)}}

    def answers(kind: type[BaseModel], **more: str) -> dict[str, Any]:
        texts = {"400": "A wrong question.", "503": "No master answers.", **more}
        return {
            "200": {"description": kind.__doc__ or "The answer.", "content": content(kind)},
            **{status: {"description": text} for status, text in sorted(texts.items())},
        }

    def asked(summary: str, question: type[BaseModel], answer: type[BaseModel]) -> dict[str, Any]:
        body = {"required": True, "content": content(question)}
        return {"post": {"summary": summary, "requestBody": body, "responses": answers(answer)}}

    def parameter(name: str, text: str, *, required: bool) -> dict[str, Any]:
        kind = {"type": "string"}
        return {
            "name": name, "in": "query", "required": required, "description": text, "schema": kind
        }  # fmt: skip

    stat = {
        "summary": "One object.",
        "parameters": [
            parameter("key", "In hexadecimal.", required=True),
            parameter("namespace", f"Without it: {DEFAULT_NAMESPACE}.", required=False),
        ],
        "responses": answers(StatAnswer, **{"404": "No such object."}),
    }
    description = {"summary": "This document.", "responses": {"200": {"description": "OpenAPI."}}}
    paths = {
        MATCH_PATH: asked("The longest stored prefix.", MatchQuestion, MatchAnswers),
        EXISTS_PATH: asked("What is stored.", ExistsQuestion, ExistsAnswer),
        STAT_PATH: {"get": stat},
        OPENAPI_PATH: {"get": description},
        **chains.described(asked, parameter, answers),
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvstore", "version": "1"},
        "paths": paths,
        "components": {"schemas": definitions},
    }

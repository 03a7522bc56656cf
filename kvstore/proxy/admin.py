"""The admin API ``/admin/instances``: add, drain and remove instances while the proxy runs.

Access as for changes on all of kvstore's HTTP ports (``kvstore.http.access_control``): a request
needs ``--admin-token`` or, if none is set, a connection from this host.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from aiohttp import web

from kvstore.errors import InvalidArgumentError
from kvstore.http.access_control import AccessControl, AccessHints, AllowedHosts
from kvstore.proxy import bodies
from kvstore.proxy.health import HealthChecks
from kvstore.proxy.instances import ROLES, Instance, Instances, Role
from kvstore.proxy.metrics import clock_ms
from kvstore.proxy.request_context import REQUEST_ID, error_response, request_id_of
from kvstore.runtime.addresses import join_address, split_address
from kvstore.runtime.formatting import field_text

log = logging.getLogger("kvstore.proxy")

INSTANCES_MAX: Final = 1_024
"""Limit of all instances, because all get their health checks at the same time."""

_ADVICE: Final = AccessHints("or localhost.", "KVSTORE_PROXY_ADMIN_TOKEN.")

Handler = Callable[[web.Request], Awaitable[web.Response]]


def rows(instances: Instances) -> list[dict[str, Any]]:
    """Return all instances as JSON."""
    return [view._asdict() for view in instances.views(clock_ms())]


class AdminHandlers:
    def __init__(self, instances: Instances, health: HealthChecks, *, token: str) -> None:
        self._instances = instances
        self._health = health
        # With a token, requests may use any host name: no page of another site has the token.
        self._access = AccessControl(
            None if token else AllowedHosts(()), token=token, advice=_ADVICE
        )

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_get("/admin/instances", self._guarded(self._list))
        router.add_post("/admin/instances", self._guarded(self._add))
        router.add_post("/admin/instances/{address}/drain", self._guarded(self._drain))
        router.add_delete("/admin/instances/{address}", self._guarded(self._remove))

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: web.Request) -> web.Response:
            request_id = request_id_of(request)
            refusal = self._access.check_trusted(request)
            if refusal is not None:
                log.warning(
                    "admin_refused id=%s peer=%s path=%s status=%d",
                    request_id, request.remote, field_text(request.path), refusal.status,
                )  # fmt: skip
                said = (refusal.text or "").strip()
                response = error_response(refusal.status, said, "permission_denied")
            else:
                try:
                    response = await handler(request)
                except InvalidArgumentError as error:
                    response = error_response(400, str(error), "invalid_request_error")
            response.headers[REQUEST_ID] = request_id
            return response

        return guarded

    async def _list(self, request: web.Request) -> web.Response:
        del request
        return web.json_response({"instances": rows(self._instances)})

    async def _add(self, request: web.Request) -> web.Response:
        """Add an instance and check its health, so that the response can report it."""
        body = bodies.parse(await request.read())
        role = _role(body.get("role"))
        if role is None:
            raise InvalidArgumentError(f"role is one of {', '.join(ROLES)}")
        address = _address(body.get("address"))
        if not self._instances.at(address, role) and len(list(self._instances)) >= INSTANCES_MAX:
            raise InvalidArgumentError(f"there are {INSTANCES_MAX} instances, which is the limit")
        instance, is_new = self._instances.add(role, address)
        log.info("instance_added id=%s role=%s instance=%s", request_id_of(request), role, address)
        await self._health.check(instance)
        return web.json_response(instance.view(clock_ms())._asdict(), status=201 if is_new else 200)

    async def _drain(self, request: web.Request) -> web.Response:
        found = self._named(request)
        for instance in found:
            self._instances.drain(instance)
            _tell("instance_drains", request, instance)
        views = [each.view(clock_ms())._asdict() for each in found]
        return web.json_response({"instances": views}, status=202) if found else _unknown()

    async def _remove(self, request: web.Request) -> web.Response:
        found = self._named(request)
        for instance in found:
            self._instances.remove(instance)
            _tell("instance_removed", request, instance)
        views = [each.view(clock_ms())._asdict() for each in found]
        return web.json_response({"instances": views}) if found else _unknown()

    def _named(self, request: web.Request) -> list[Instance]:
        """Return the instances at the request's address, in every role or in that of ``?role=``."""
        given = request.query.get("role")
        role = _role(given)
        if given is not None and role is None:
            raise InvalidArgumentError(f"role is one of {', '.join(ROLES)}")
        return self._instances.at(_address(request.match_info["address"]), role)


def _tell(event: str, request: web.Request, instance: Instance) -> None:
    log.info(
        "%s id=%s role=%s instance=%s in_flight=%d",
        event, request_id_of(request), instance.role, instance.address, instance.in_flight,
    )  # fmt: skip


def _unknown() -> web.Response:
    return error_response(404, "no such instance", "not_found")


def _role(value: object) -> Role | None:
    return next((role for role in ROLES if role == value), None)


def _address(value: object) -> str:
    if not isinstance(value, str):
        raise InvalidArgumentError("address is HOST:PORT")
    host, port = split_address(value)
    if not port:
        raise InvalidArgumentError("address must name a port")
    return join_address(host, port)

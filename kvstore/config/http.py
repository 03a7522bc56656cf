"""The settings of a server's port for HTTP, except its number, which differs from kind to kind."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from kvstore.config.base import Config
from kvstore.config.values import (
    AuthFile,
    File,
    HttpCert,
    HttpKey,
    HttpReads,
    RefusedValueError,
    check_https,
)


class HttpConfig(Config):
    """The settings of a server: its port for HTTP, and who may use it and its other ports."""

    auth: AuthFile = ""
    auth_revoked: File = Field(
        default="",
        description="File with the numbers of revoked identities, which kvstore auth revoke "
        "writes. It is looked at once a second.",
    )

    http_token_file: File = Field(
        default="",
        description="File with a token. Over HTTP, requests that change something or fetch bytes "
        "need it (Authorization: Bearer TOKEN). Empty: such requests are answered from loopback "
        "only.",
    )
    http_reads: HttpReads = Field(
        default="all",
        description="Who may read status, metrics and the dashboard over HTTP: all, or requests "
        "with the token. /healthz and /readyz answer all.",
    )
    http_cert: HttpCert = ""
    http_key: HttpKey = ""

    @model_validator(mode="after")
    def _http_rules(self) -> Self:
        if self.http_reads == "token" and not self.http_token_file:
            raise RefusedValueError(
                "is token, and there is none", "Give --http-token-file.", key="http_reads"
            )
        check_https(self.http_cert, self.http_key)
        return self

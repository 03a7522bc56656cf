"""The command ``kvstore-proxy``."""

from __future__ import annotations

from typing import NoReturn

from kvstore.cli.options import run
from kvstore.cli.servers import serves
from kvstore.config import ProxyConfig
from kvstore.errors import StartupError
from kvstore.runtime import memory_protection
from kvstore.runtime.child_process import ParentLink

EXAMPLE = """\b
Examples:
  kvstore-proxy --prefill 10.0.0.1:8100 --decode 10.0.0.2:8200,10.0.0.3:8200
  kvstore-proxy --master 10.0.0.7:50001 --affinity prefix ...

\b
Requests from this host add and remove engines while the proxy runs:
  curl localhost:8000/admin/instances
  curl localhost:8000/admin/instances -d '{"role": "decode", "address": "10.0.0.4:8200"}'
  curl -X POST localhost:8000/admin/instances/10.0.0.4:8200/drain
  curl -X DELETE localhost:8000/admin/instances/10.0.0.4:8200"""

EXTRA = ("aiohttp", "cbor2", "multidict", "prometheus_client")


@serves(
    ProxyConfig,
    EXAMPLE,
    "Run a proxy for clients of OpenAI's API: prefillers compute prompts, decoders answer, and the "
    "store passes the KV cache between them.",
)
def command(config: ProxyConfig, parent: ParentLink) -> int:
    del parent
    if config.cache_salt_from:
        memory_protection.hide_memory()
    try:
        from kvstore.proxy.main import (
            run as serve,  # imported after the settings are checked
        )
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRA:
            raise
        raise StartupError(
            f"the proxy needs {error.name}, which is not installed",
            advice="pip install 'aiohttp>=3.12' 'prometheus-client>=0.21' 'cbor2>=5.6', or install "
            "kvstore with its extra [proxy].",
        ) from None
    return serve(config)


def main() -> NoReturn:
    run(command, "kvstore-proxy")


if __name__ == "__main__":
    main()

"""The archive rule of a node: ``kvstore archive export`` in a child process, at intervals."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Sequence
from functools import partial
from typing import Final

from kvstore.config import NodeConfig
from kvstore.runtime import interpreter
from kvstore.runtime.child_process import inherited_environment
from kvstore.runtime.formatting import field_text, sanitize
from kvstore.runtime.tasks import start_thread

log = logging.getLogger("kvstore.node")

COMMAND: Final = """\
from kvstore.runtime.child_process import end_with_parent
end_with_parent({pid})
from kvstore.cli.main import main
main()
"""
NOTHING_TO_EXPORT: Final = 3
"""An exit code that is no failure: the archive is as it was."""
OUTPUT_MAX: Final = 500


def start_exports(config: NodeConfig, arguments: Sequence[str]) -> None:
    """Start a thread that exports at intervals, with the node's identity.

    Args:
        arguments: of ``kvstore archive export``. The child process ends with this one.

    Raises:
        ConfigError: obstore is missing.
    """
    import kvstore.archive.object_store  # noqa: F401 - raises it

    start_thread("archive", partial(_export_at_intervals, config, arguments))


def _export_at_intervals(config: NodeConfig, arguments: Sequence[str]) -> None:
    code = COMMAND.format(pid=os.getpid())
    command = interpreter.command("-c", code, "archive", "export", "--config", "", *arguments)
    # In the environment, because a location in etcd may have a password.
    settings = {
        "KVSTORE_MASTER": config.master,
        "KVSTORE_CLUSTER": config.cluster,
        "KVSTORE_AUTH": config.auth,
        "KVSTORE_DATA_ENCRYPTION": config.data_encryption,
    }
    environ = interpreter.environment(inherited_environment() | settings)
    while True:
        time.sleep(config.archive_interval_s)
        began = time.monotonic()
        try:
            ended = subprocess.run(
                command, env=environ, check=False, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            )  # fmt: skip
        except OSError as error:
            log.warning("archive_export_failed reason=%s", error)
            continue
        is_failure = ended.returncode not in (0, NOTHING_TO_EXPORT)
        log.log(
            logging.WARNING if is_failure else logging.INFO,
            "archive_export_ended status=%d seconds=%.1f output=%s",
            ended.returncode,
            time.monotonic() - began,
            field_text(sanitize("; ".join(ended.stdout.splitlines()[-5:]), OUTPUT_MAX)),
        )

"""Settings of every kind of process.

The value of a setting comes from the first of these sources that has one:

1. a flag of the command line, or an argument in a program (``--lease-ms``, ``lease_ms=``);
2. the environment: ``KVSTORE_MASTER_LEASE_MS``, ``KVSTORE_NODE_MEMORY``, ``KVSTORE_CLIENT_LANE``;
   ``KVSTORE_MASTER`` says to all of them where the master is, ``KVSTORE_CLUSTER`` is the name of
   the cluster, and ``KVSTORE_AUTH`` and ``KVSTORE_DATA_ENCRYPTION`` are of all of them, too;
3. a TOML file with the sections ``[master]``, ``[node]``, ``[client]``, ``[connector]`` and
   ``[proxy]``: the one that ``--config`` or ``KVSTORE_CONFIG`` names, else ``./kvstore.toml``,
   else ``~/.config/kvstore/kvstore.toml``; files are never merged, and an empty name means none;
4. the default written here.

Invalid values, and unknown flags or arguments, raise ``ConfigError`` with the setting and its
origin. Unknown variables and file keys may belong to a later release that was rolled back: they are
logged once per process, with the nearest known name; with ``KVSTORE_STRICT_CONFIG`` they raise,
too. The description of a field is also its ``--help`` text.

``servers`` and ``clients`` define the settings, ``setting_types`` their types; ``loader`` reads the
sources.

pydantic-settings neither reports the origin of a value nor rejects unknown variables.
"""

from __future__ import annotations

from kvstore.config.base import *  # noqa: F403  # all public names; the same below
from kvstore.config.clients import *  # noqa: F403
from kvstore.config.loader import *  # noqa: F403
from kvstore.config.servers import *  # noqa: F403
from kvstore.config.setting_types import *  # noqa: F403

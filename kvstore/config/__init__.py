"""Settings of every kind of process, and the one place that reads them.

The value of a setting comes from the first of these sources that has one:

1. a flag of the command line, or an argument in a program (``--lease-ms``, ``lease_ms=``);
2. the environment: ``KVSTORE_MASTER_LEASE_MS``, ``KVSTORE_NODE_MEMORY``, ``KVSTORE_CLIENT_LANE``;
   ``KVSTORE_MASTER`` says to all of them where the master is, ``KVSTORE_CLUSTER`` is the name of
   the cluster, and ``KVSTORE_AUTH`` and ``KVSTORE_DATA_ENCRYPTION`` are of all of them, too;
3. a TOML file with the sections ``[master]``, ``[node]``, ``[client]``, ``[connector]`` and
   ``[proxy]``: the one that ``--config`` or ``KVSTORE_CONFIG`` names, else ``./kvstore.toml``,
   else ``~/.config/kvstore/kvstore.toml``; files are never merged, and an empty name means none;
4. the default written here.

A value that is unreadable or out of range is refused with ``ConfigError``, which names the setting
and where it was found; so is an unknown flag or argument. An unknown variable or key of the file
may belong to a later release that was rolled back: a warning names it and the nearest right
spelling, once per process; with ``KVSTORE_STRICT_CONFIG`` it is refused, too. The description of a
field is its comment and its ``--help`` text.

``servers`` and ``clients`` hold the settings, ``values`` the types that they are made of,
``reading`` the way from the sources to a value.

pydantic-settings can neither say where a value came from nor refuse an unknown variable.
"""

from __future__ import annotations

from kvstore.config.base import *  # noqa: F403  # all that they have
from kvstore.config.clients import *  # noqa: F403
from kvstore.config.loader import *  # noqa: F403
from kvstore.config.servers import *  # noqa: F403
from kvstore.config.setting_types import *  # noqa: F403

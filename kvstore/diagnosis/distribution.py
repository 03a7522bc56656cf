"""What pip knows of kvstore: its distribution, and another project's of nearly the same name.

The distribution is called ``kvstore-llm``: ``kvstore`` on the public index is another project, a
client of etcd and consul, whose module is called ``kvstore``, too. Releases until 0.1.0 were
installed as ``kvstore``; an environment that still has one of them works as before.
"""

from __future__ import annotations

from importlib import metadata
from typing import Final

NAME: Final = "kvstore-llm"
NAME_BEFORE: Final = "kvstore"

_ENTRY_POINT: Final = "kvstore.cli.master:main"
"""An entry point that only our distribution has."""


def ours() -> metadata.Distribution | None:
    """Our distribution, the first on the path; None: pip did not install what is imported here."""
    for name in (NAME, NAME_BEFORE):
        for found in metadata.distributions(name=name):
            if _is_ours(found):
                return found
    return None


def strangers() -> list[str]:
    """Name and version of each distribution ``kvstore`` that is another project's."""
    found = metadata.distributions(name=NAME_BEFORE)
    return sorted({f"{NAME_BEFORE} {each.version}" for each in found if not _is_ours(each)})


def requirements() -> list[str]:
    """What our distribution needs without extras, as pip takes it; empty where nothing is known."""
    distribution = ours()
    needed = (distribution.requires if distribution is not None else None) or []
    return [each for each in needed if "extra ==" not in each]


def _is_ours(distribution: metadata.Distribution) -> bool:
    return any(each.value == _ENTRY_POINT for each in distribution.entry_points)

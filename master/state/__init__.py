"""The master's state: pure decisions, compiled where that is possible (docs/adr/0015)."""

from kvstore.native import compiled

compiled.choose(__path__[0])

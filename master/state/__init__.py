"""The master's state: pure decisions. Compiled where that is possible; see docs/adr/0015."""

from kvstore.native import compiled

compiled.choose(__path__[0])

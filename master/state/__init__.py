"""The master's state: pure decisions. Compiled where that is possible."""

from kvstore.native import compiled

compiled.choose(__path__[0])

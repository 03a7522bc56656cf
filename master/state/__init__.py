"""The master's state: pure decisions. Compiled where that is possible."""

from kvstore.native import compiled

compiled.select_compiled_or_source(__path__[0])

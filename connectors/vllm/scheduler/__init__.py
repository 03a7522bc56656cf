"""The scheduler side, in the engine core: lookups, and decisions about loads and saves."""

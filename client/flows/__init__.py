"""Flows of the client: pure generators that yield calls and transfers."""

"""Read-only views of the state for operators."""

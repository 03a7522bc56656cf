"""Memory of accelerators, and copies between it and the pool."""

"""Memory of accelerators: copies between a device's memory and the memory of the pool."""

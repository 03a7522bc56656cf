"""Object events: the journal that keeps them, and their delivery by HTTP and ZeroMQ."""

"""Events of a master's objects: the journal that keeps them, and how HTTP and ZeroMQ send them."""

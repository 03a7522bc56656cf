"""Events of a master's objects: their journal, and those who follow them by HTTP or ZeroMQ."""

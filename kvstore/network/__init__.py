"""Hosts and how to reach them: addresses, names, ports, and the sockets servers listen on."""

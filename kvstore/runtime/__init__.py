"""The runtime of every process: tasks, threads, children, logs, addresses and sockets."""

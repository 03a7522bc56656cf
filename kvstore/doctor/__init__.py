"""What ``kvstore doctor`` looks at: this host, the programs on it, the cluster as seen from here.

A check is a function that returns findings. It needs no master, no package beyond those that
kvstore needs, and no right beyond those of the user who runs it: what it may not see it says.
"""

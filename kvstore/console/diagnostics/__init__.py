"""The checks of ``kvstore doctor``: this host, its software, and the cluster as seen from here.

A check is a function that returns findings. It needs no master, no optional package and no
privilege; a check without permission reports that.
"""

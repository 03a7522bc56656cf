"""The checks of ``kvstore doctor``: this host, its programs, and the cluster as seen from here.

A check is a function that returns findings. It needs no master, no package that kvstore does not
need, and no permission that the user lacks: a check that is not permitted to look says so.
"""

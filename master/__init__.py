"""The master: pure decisions in ``state``, the shell around them in ``service``, its carriers, ``app``."""

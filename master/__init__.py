"""The master: pure decisions in ``state``, the shell around them, its carriers, the process."""

"""The master: pure decisions in ``state``, the shell around them, the carriers, the process."""

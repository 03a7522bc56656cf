"""The master: ``state`` decides and is pure; around it are the shell, the carriers, the process."""

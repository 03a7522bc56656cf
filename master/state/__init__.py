"""Every decision of the master. Pure: no clock, thread, socket, log; see ``master_state``."""

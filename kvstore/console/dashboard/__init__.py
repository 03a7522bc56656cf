"""The dashboard: its page, the last hour of the store, and what is wrong now."""

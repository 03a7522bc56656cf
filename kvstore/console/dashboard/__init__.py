"""The dashboard: its files, the last hour of the store, and current problems."""

"""HTTP servers: connection limits, access control, operations, metrics for Prometheus."""

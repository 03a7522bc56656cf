"""Authentication and authorization: certificates, permissions, TLS, descriptor passing."""

"""Authentication and authorization: certificates, identities, permissions, TLS, and the passing of
file descriptors to authenticated clients."""

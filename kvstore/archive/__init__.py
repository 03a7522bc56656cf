"""Archives of namespaces in an object store (S3, GCS, Azure, files), by an ordinary client."""

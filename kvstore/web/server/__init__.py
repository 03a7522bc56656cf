"""A port for HTTP: connections, who may ask what, reading of questions; the link to the parent."""

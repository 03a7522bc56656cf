"""A port for HTTP: its connections, who may ask what over it, and how requests are read."""

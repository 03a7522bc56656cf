"""In the processes of the workers: pages of the KV cache, and their transfers."""

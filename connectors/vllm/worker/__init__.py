"""The worker side, in each worker: pages of the KV cache, and their transfers."""

"""In the process of the scheduler: what is looked up, loaded and saved, and what vLLM is told."""

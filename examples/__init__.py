"""Examples that run from a checkout: ``demo`` (``make demo``) and ``demo_vllm``; not installed."""

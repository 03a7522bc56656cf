"""Skipped where vLLM is not installed."""

from __future__ import annotations

import importlib.util
import warnings

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    with warnings.catch_warnings():  # of vLLM and torch, to each other
        warnings.simplefilter("ignore")
        import kvstore.connectors.vllm  # noqa: F401  # once, before the tests do

"""Lets torchvision be imported beside a torch without CUDA. The package index has it for CUDA only.

Its Python code registers two operators that its library defines, and that library does not load
here. Copied into the environment of SGLang's tests, whose interpreter imports it at its start.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from typing import Any

_kept: list[Any] = []
"""The objects that defined operators; the operators end with them."""


class _Definer(MetaPathFinder):
    """Defines the operators when torchvision is imported, and finds nothing itself."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        if torch.version.cuda is None:
            library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
            signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            for operator in ("nms", "qnms"):
                library.define(operator + signature)
            _kept.append(library)


sys.meta_path.insert(0, _Definer())

"""Lets torchvision be imported beside a torch without CUDA. The package index has it for CUDA only.

Its Python code registers two operators that its library defines, and that library does not load
here. Copied into the environment of SGLang's tests, whose interpreter imports it at its start.
"""

import sys
from importlib.abc import MetaPathFinder

_kept = []
"""Operators are gone with the object that has defined them."""


class _Definer(MetaPathFinder):
    """Defines the operators when torchvision is imported, and finds nothing itself."""

    def find_spec(self, name, path=None, target=None):
        if name != "torchvision":
            return None
        sys.meta_path.remove(self)
        import torch

        if torch.version.cuda is None:
            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _kept.append(library)
        return None


sys.meta_path.insert(0, _Definer())

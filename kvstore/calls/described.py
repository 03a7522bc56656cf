"""What docstrings say of the fields of classes: for ``proto`` and for the OpenAPI document."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import sys
from typing import Any


def field_texts(kind: Any) -> dict[str, str]:
    """The docstrings below the fields of a class, in one line each; "" has that of the class."""
    body = _classes(kind.__module__)[kind.__name__]
    texts = {"": ast.get_docstring(ast.Module(body, [])) or ""}
    for field, after in itertools.pairwise(body):
        match field, after:
            case (
                ast.AnnAssign(target=ast.Name(name)) | ast.Assign(targets=[ast.Name(name)]),
                (ast.Expr(ast.Constant(str(text)))),
            ):
                texts[name] = " ".join(text.split())
    return texts


@functools.cache
def _classes(module: str) -> dict[str, list[ast.stmt]]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {each.name: each.body for each in tree.body if isinstance(each, ast.ClassDef)}

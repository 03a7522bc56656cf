"""Descriptions of classes for ``proto``, for JSON and for the OpenAPI document."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import sys
import typing
from typing import Any


def field_texts(kind: Any) -> dict[str, str]:
    """Return the docstrings of the fields and properties of a class, in one line each; key "": its
    own."""

    def line(text: str) -> str:
        return " ".join(text.split()).replace("``", "`")

    body = _classes(kind.__module__)[kind.__name__]
    texts = {"": line(ast.get_docstring(ast.Module(body, [])) or "")}
    for field, after in itertools.pairwise([*body, ast.Pass()]):
        match field, after:
            case ast.FunctionDef(name=name), _:
                texts[name] = line(ast.get_docstring(field) or "")
            case (
                (ast.AnnAssign(target=ast.Name(name)) | ast.Assign(targets=[ast.Name(name)])),
                ast.Expr(ast.Constant(str(text))),
            ):
                texts[name] = line(text)
    return texts


def properties(kind: Any) -> tuple[str, ...]:
    """Return the names of the properties of a class."""
    return tuple(name for name, value in vars(kind).items() if isinstance(value, property))


def types_of(kind: Any) -> dict[str, Any]:
    """Return the types of fields and properties, without the annotations that bound them."""
    computed = {
        name: typing.get_type_hints(vars(kind)[name].fget)["return"] for name in properties(kind)
    }
    return typing.get_type_hints(kind) | computed


@functools.cache
def _classes(module: str) -> dict[str, list[ast.stmt]]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}

"""Does a value fit a recorded annotation? `Optional[int]`, `Literal['CPP','PYTHON']`, `Union[bool, 'auto']` and so on.

Annotations are text as it was read. Scalars, literals, lists and unions are checked; the name of a class that kvtool
does not know stands for whatever is passed, but never for a number where the class is none.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import PurePath
from typing import Any

_SCALARS: dict[str, Callable[[Any], bool]] = {
    "int": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "float": lambda v: isinstance(v, (int, float)) and not isinstance(v, bool),
    "bool": lambda v: isinstance(v, bool),
    "str": lambda v: isinstance(v, str),
    "bytes": lambda v: isinstance(v, bytes),
    "None": lambda v: v is None,
    "Path": lambda v: isinstance(v, (str, PurePath)),
    "PositiveInt": lambda v: isinstance(v, int) and not isinstance(v, bool) and v > 0,
    "NonNegativeInt": lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 0,
    "NonNegativeFloat": lambda v: isinstance(v, (int, float)) and not isinstance(v, bool) and v >= 0,
}
_ANYTHING = ("Any", "object")
_GENERIC = ("Optional", "Union", "List", "list", "Sequence", "Dict", "dict", "Mapping", "Literal")


def fits(annotation: str | None, value: Any) -> bool:
    """True where `value` may be passed for `annotation`, or where the annotation says nothing that can be checked."""
    tree = _tree(annotation)
    return True if tree is None else _fits(tree, value)


def nested_class(annotation: str | None) -> str | None:
    """The class that a table passed for `annotation` stands for: KvCacheConfig of Optional[KvCacheConfig]."""
    tree = _tree(annotation)
    names = [n.id for n in ast.walk(tree) if isinstance(n, ast.Name)] if tree is not None else []
    classes = [n for n in names if n not in _SCALARS and n not in (*_ANYTHING, *_GENERIC)]
    return classes[0] if len(classes) == 1 else None


@cache
def _tree(annotation: str | None) -> ast.expr | None:
    if annotation is None:
        return None
    try:
        return ast.parse(annotation, mode="eval").body
    except SyntaxError:
        return None


def _fits(tree: ast.expr, value: Any) -> bool:
    if isinstance(tree, ast.Constant):
        return tree.value is value if tree.value is None else bool(tree.value == value)
    if isinstance(tree, ast.Name):
        return _fits_name(tree.id, value)
    if isinstance(tree, ast.BoolOp):  # "str or List[str]"
        return any(_fits(one, value) for one in tree.values)
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.BitOr):
        return _fits(tree.left, value) or _fits(tree.right, value)
    if isinstance(tree, ast.Attribute):
        return _fits_name(tree.attr, value)
    if isinstance(tree, ast.Subscript) and isinstance(tree.value, ast.Name):
        inner = tree.slice.elts if isinstance(tree.slice, ast.Tuple) else [tree.slice]
        return _fits_generic(tree.value.id, inner, value)
    return True


def _fits_name(name: str, value: Any) -> bool:
    if name in _SCALARS:
        return _SCALARS[name](value)
    if name in _ANYTHING:
        return True
    if name in ("Dict", "dict"):
        return isinstance(value, Mapping)
    if name in ("List", "list"):
        return isinstance(value, (list, tuple))
    return value is not None and not isinstance(value, (bool, int, float, list))  # a class, an enum's name, a table


def _fits_generic(name: str, inner: list[ast.expr], value: Any) -> bool:
    if name == "Optional":
        return value is None or _fits(inner[0], value)
    if name in ("Union", "Literal"):
        return any(_fits(one, value) for one in inner)
    if name in ("List", "list", "Sequence"):
        return isinstance(value, (list, tuple)) and all(_fits(inner[0], one) for one in value)
    if name in ("Dict", "dict", "Mapping"):
        return isinstance(value, Mapping) and all(_fits(inner[0], k) and _fits(inner[1], v) for k, v in value.items())
    return True

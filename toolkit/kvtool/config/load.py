"""Reading a spec file: flags over file over default, and where each value came from.

Every refusal names file, line and key. YAML quietly keeps the last of two equal keys; here the second is refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from kvtool.config.spec import Spec
from kvtool.errors import SpecRefused

_PATH_KEYS = (
    "engine",
    "run_dir",
    "pool.file_dir",
    "tritonserver",
    "tensorrt_llm.prefill.engine",
    "tensorrt_llm.decode.engine",
)


@dataclass(frozen=True)
class Origin:
    """Where one value was set: `source` is "flag", "default" or a file name; `line` from 1, for files."""

    source: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


DEFAULT, FLAG = Origin("default"), Origin("flag")


def load_spec(path: Path, overrides: Mapping[str, str] | None = None) -> tuple[Spec, dict[str, Origin]]:
    """The spec in `path` with `overrides` ("pool.ranks" -> "3", as YAML text) on top, and the origin of each value.

    Paths from the file are relative to the file, paths from flags to the working directory; all come out absolute.

    Raises:
        SpecRefused: unreadable, not YAML, or any key, type, unit or value that does not fit; one sentence for each.
    """
    values, lines = _read(path)
    origins = {key: Origin(path.name, line) for key, line in lines.items()}
    _make_absolute(values, path.resolve().parent)
    flags: dict[str, Any] = {}
    for key, text in (overrides or {}).items():
        try:
            _insert(flags, key, yaml.safe_load(text))
        except (yaml.YAMLError, KeyError):
            raise SpecRefused(f"--set {key}={text}: wanted KEY=VALUE such as pool.ranks=2") from None
    _make_absolute(flags, Path.cwd())
    for key, value in _leaves(flags):
        _insert(values, key, value)
        origins[key] = FLAG
    try:
        spec = Spec.model_validate(values)
    except ValidationError as error:
        raise SpecRefused("\n".join(_sentences(error, path, origins))) from None
    return spec, {key: origins.get(key, DEFAULT) for key, _ in flat(spec)}


def flat(spec: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """("pool.ranks", 2), ... in the order of the spec."""
    for name in type(spec).model_fields:
        value = getattr(spec, name)
        if isinstance(value, BaseModel):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _read(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Nested values and the line of each dotted key."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SpecRefused(f"{path}: no such file; write one with: kvtool config init {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecRefused(f"{path}: cannot be read as UTF-8 text: {error}") from None
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        lines: dict[str, int] = {}
        if node is None:
            return {}, lines
        if not isinstance(node, yaml.MappingNode):
            raise SpecRefused(f"{path}:1: wanted keys such as `engine: PATH`, found a {_kind(node)}")
        return _mapping(loader, node, "", path, lines), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise SpecRefused(f"{where}: not YAML: {error.problem or error}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise SpecRefused(f"{path}: not YAML: {error}") from None
    finally:
        loader.dispose()


def _mapping(
    loader: yaml.SafeLoader, node: yaml.MappingNode, prefix: str, path: Path, lines: dict[str, int]
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = loader.construct_object(key_node)
        dotted = f"{prefix}{key}"
        if not isinstance(key, str):
            raise SpecRefused(f"{path}:{line}: {dotted}: wanted a word as key, found {key!r}")
        if dotted in lines:
            raise SpecRefused(
                f"{path}:{line}: {dotted}: given twice, first on line {lines[dotted]}; keep one of the two"
            )
        lines[dotted] = line
        if isinstance(value_node, yaml.MappingNode):
            values[key] = _mapping(loader, value_node, f"{dotted}.", path, lines)
        else:
            values[key] = loader.construct_object(value_node, deep=True)
    return values


def _kind(node: yaml.Node) -> str:
    return "list" if isinstance(node, yaml.SequenceNode) else "single value"


def _insert(values: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, last = dotted.split(".")
    if not all((*sections, last)):
        raise KeyError(dotted)
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            inner = values[section] = {}
        values = inner
    values[last] = value


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _make_absolute(values: dict[str, Any], base: Path) -> None:
    for key, value in list(_leaves(values)):
        bare_name = key == "tritonserver" and "/" not in str(value)
        if key in _PATH_KEYS and isinstance(value, str) and value.strip() and not bare_name:
            _insert(values, key, str((base / Path(value).expanduser()).resolve()))


def _sentences(error: ValidationError, path: Path, origins: Mapping[str, Origin]) -> Iterator[str]:
    for fault in error.errors():
        key = ".".join(str(part) for part in fault["loc"])
        yield f"{_place(path, key, _nearest(origins, key))}: {_reason(fault, key)}"


def _nearest(origins: Mapping[str, Origin], key: str) -> Origin | None:
    """That of `key`, or of the list or section around it; a key that is missing altogether has none."""
    while key and key not in origins:
        outer, _, part = key.rpartition(".")
        if not part.isdigit():
            return None
        key = outer
    return origins.get(key)


def _place(path: Path, key: str, origin: Origin | None) -> str:
    if origin is FLAG:
        return f"--set {key}"
    return f"{path}:{origin.line}: {key}" if origin else f"{path}: {key}"


def _reason(fault: Any, key: str) -> str:
    if fault["type"] == "extra_forbidden":
        names = sorted(_fields(key))
        near = difflib.get_close_matches(key.rpartition(".")[2], names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known here are {', '.join(names)}"
        return f"unknown key; {hint}"
    if fault["type"] == "missing":
        return "missing; it has no default"
    if fault["type"] == "value_error":
        return str(fault["msg"]).removeprefix("Value error, ")
    message = str(fault["msg"])
    return f"{message[0].lower()}{message[1:]}, found {fault['input']!r}"


def _fields(key: str) -> list[str]:
    """Names that may stand beside `key`."""
    model: type[BaseModel] = Spec
    for section in key.split(".")[:-1]:
        kind = model.model_fields[section].annotation
        assert isinstance(kind, type) and issubclass(kind, BaseModel)
        model = kind
    return list(model.model_fields)

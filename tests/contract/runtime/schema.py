"""Classes with exactly the recorded fields: pydantic models and dataclasses. Another keyword is an error."""

from __future__ import annotations

import dataclasses
import json
import typing
from functools import lru_cache
from pathlib import Path
from typing import Any

import pydantic
from pydantic import BaseModel, ConfigDict, Field, create_model

API: dict[str, Any] = json.loads((Path(__file__).parent / "api.json").read_text(encoding="utf-8"))
VERSION: str = API["version"]
RELEASE = tuple(int(part) for part in VERSION.split("rc")[0].split(".")[:2])


class _Open(BaseModel):
    """A class whose fields are not recorded, such as MoeConfig: any keyword."""

    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True, protected_namespaces=())


class _Names(dict[str, Any]):
    """For annotations: typing's and pydantic's names, recorded classes, anything else is Any."""

    def __missing__(self, name: str) -> Any:
        for module in (typing, pydantic):
            if hasattr(module, name):
                return getattr(module, name)
        if name in ("int", "str", "bool", "float", "bytes", "object", "dict", "list", "tuple"):
            raise KeyError(name)  # Python's own
        found = recorded(name)
        return Any if found is None or not isinstance(found, type) else found


_EXTRA = {
    "CudaGraphConfig": "batch_sizes max_batch_size enable_padding",
    "SchedulerConfig": "capacity_scheduler_policy context_chunking_policy dynamic_batch_config",
}
_OWN_DEFAULTS = {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT", "enable_padding": False, "max_batch_size": None}


@lru_cache(None)
def recorded(name: str) -> Any:
    """The class `name` of this version, None where there is none."""
    if name == "LlmArgs":
        return recorded("TorchLlmArgs")
    if name in _EXTRA:
        fields = {field: (Any, _OWN_DEFAULTS.get(field)) for field in _EXTRA[name].split()}
        return create_model(name, __base__=_Strict, **fields)  # type: ignore[call-overload]
    record = API.get(name)
    if not isinstance(record, dict):
        return None
    kind, fields = record.get("kind", ""), record.get("fields")
    if kind.startswith("pydantic") or name == "BuildConfig":
        return _model(name, record) if isinstance(fields, list) else _Open
    if kind.startswith("dataclass") and name not in ("RequestData", "SchedulerOutput", "KvCacheLayout"):
        return _dataclass(name, fields, kw_only="kw_only" in kind)
    return None


class _Strict(BaseModel):
    model_config = ConfigDict(
        extra="forbid", arbitrary_types_allowed=True, protected_namespaces=(), populate_by_name=True
    )


class _Ignoring(BaseModel):
    model_config = ConfigDict(
        extra="ignore", arbitrary_types_allowed=True, protected_namespaces=(), validate_assignment=True
    )


def _model(name: str, record: dict[str, Any]) -> Any:
    base: Any = _Ignoring if record.get("extra") == "ignore" else _Strict
    if record.get("base"):
        base = recorded(record["base"])
    if name == "BaseLlmArgs":
        from .ranks import Parallel

        base = type("_Args", (Parallel, _Strict), {})
    fields: dict[str, Any] = {}
    presets = name == "KvCacheConnectorConfig" and any(entry["name"] == "connector" for entry in record["fields"])
    for entry in record["fields"]:
        field = entry["name"]
        if presets and entry.get("required"):  # a preset fills the three names
            entry = {**entry, "required": False, "default": None}
        more = {"alias": entry["alias"]} if "alias" in entry else {}
        fields[field] = (_annotation(entry), Field(**_default(entry), **more))
    return create_model(name, __base__=base, **fields)


def _annotation(entry: dict[str, Any]) -> Any:
    text = (
        entry.get("annotation", "Any")
        .replace(" or ", " | ")
        .replace("Union[bool, 'auto']", "Union[bool, Literal['auto']]")
    )
    if isinstance(entry.get("default"), str) and "Literal[" in text:  # a later default may be another word
        text = text.replace("Literal[", f"Literal[{entry['default']!r},")
    if "default" in entry and entry["default"] is None and not text.startswith("Optional"):
        text = f"Optional[{text}]"
    try:
        return eval(text, {"__builtins__": __builtins__}, _Names())
    except (TypeError, NameError, SyntaxError):
        return Any


def _default(entry: dict[str, Any]) -> dict[str, Any]:
    if entry.get("required"):
        return {"default": ...}
    default = entry.get("default")
    if isinstance(default, dict) and "factory" in default:
        made = default["factory"]
        if made in ("list", "dict"):
            return {"default_factory": {"list": list, "dict": dict}[made]}
        return {"default_factory": recorded(made) or _Open}
    return {"default": default}


def _dataclass(name: str, entries: list[dict[str, Any]], *, kw_only: bool) -> Any:
    fields: list[Any] = []
    for entry in entries:
        how = _default(entry)
        if "default_factory" in how:
            fields.append((entry["name"], Any, dataclasses.field(default_factory=how["default_factory"])))
        elif how["default"] is ...:
            fields.append((entry["name"], Any))
        else:
            fields.append((entry["name"], Any, dataclasses.field(default=how["default"])))
    return dataclasses.make_dataclass(name, fields, kw_only=kw_only, slots=kw_only)


def record_of(name: str) -> dict[str, Any]:
    return dict(API[name])

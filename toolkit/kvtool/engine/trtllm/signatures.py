"""The recorded signatures of TensorRT-LLM, and the check of every keyword that kvtool passes.

TensorRT-LLM's own classes cannot check on a machine without a GPU (some ask CUDA for the device as they validate), and
one of them ignores what it does not know (`PluginConfig`). `api.json` holds what was read of each class: fields with
type, default, and the release that brought or dropped them.

Records are not always exact about the release. A field that came "after 1.2" or in "newer" ones is taken to be there
from 1.3, one that came with "1.3.0rc27 or earlier" from rc27, and one dropped "about 1.3.0rc27" to be gone in all of
1.3: what is passed under this reading is understood in any case.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

from kvtool.engine.trtllm.annotation import fits, nested_class
from kvtool.engine.trtllm.release import Release, first_of_series, parse_release
from kvtool.errors import EngineRefused


@dataclass(frozen=True)
class Field:
    """One keyword. `default` is a value, or "Class()" where a new one is made; None too where it is `required`."""

    name: str
    annotation: str | None
    required: bool = False
    default: Any = None
    values: tuple[str, ...] = ()
    constraint: str | None = None
    note: str | None = None


@cache
def api() -> dict[str, Any]:
    """api.json. The table is shared: do not change it."""
    text = files("kvtool.engine.trtllm").joinpath("api.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


@cache
def fields(name: str, version: str) -> Mapping[str, Field]:
    """Keywords that the class `name` takes in `version`, those of its bases included. "LLM" has its own and those of
    its TorchLlmArgs.

    Raises:
        EngineRefused: not recorded, or not in that version.
    """
    entry, release = _entry(name, version), parse_release(version)
    if entry.get("fields") == "not recorded":
        raise EngineRefused(f"{name}: its fields are not recorded, so kvtool passes none")
    found: dict[str, Field] = {}
    if name == "LLM":
        found |= fields("TorchLlmArgs", version)
    if "base" in entry:
        found |= fields(entry["base"], version)
    raw = entry.get("fields")
    if not isinstance(raw, list):
        return {**found, **parameters(name, "__init__", version)}
    for one in [*raw, *entry.get("added_later", ()), *entry.get("changed_later", ())]:
        _put(found, {"name": one} if isinstance(one, str) else one, release)
    return found


def parameters(name: str, method: str, version: str) -> Mapping[str, Field]:
    """Parameters of a method, self left out.

    Raises:
        EngineRefused: class or method not recorded, or not in that version.
    """
    entry, found = _entry(name, version), dict[str, Field]()
    for one in _parameters(entry, method):
        _put(found, one, parse_release(version))
    return found


def flags(command: str, version: str) -> frozenset[str]:
    """Flags of a command line, such as "trtllm-build" or "trtllm-serve serve".

    Raises:
        EngineRefused: not recorded, or not in that version.
    """
    for name, listed in api()["cli"].items():
        title, _, until = name.partition(" (")
        if title == command:
            if until and not _available(until, parse_release(version)):
                raise EngineRefused(f"{command}: not in TensorRT-LLM {version} ({until.rstrip(')')})")
            return frozenset(flag for text in listed for flag in text.split(" (")[0].split("/"))
    raise EngineRefused(f"{command}: its flags are not recorded")


def check_flags(command: str, argv: list[str], version: str) -> None:
    """Refuse a flag in `argv` that `command` does not take.

    Raises:
        EngineRefused: with the flags that are like it.
    """
    known = flags(command, version)
    for word in argv:
        flag = word.split("=")[0]
        if flag.startswith("-") and not re.fullmatch(r"-\d.*", flag) and flag not in known:
            raise EngineRefused(f"{command}: {flag} is no flag of TensorRT-LLM {version}{_like(flag, known)}")


def check_keywords(name: str, mapping: Mapping[str, Any], version: str, where: str) -> None:
    """Refuse what the class `name` would not take in `version`: an unknown keyword, one missing, or a value of another
    type. Tables within are checked against the class that their keyword names.

    Raises:
        EngineRefused: `where` (a file, or a phrase) and the key, with what was found and what is near.
    """
    known = fields(name, version)
    for key, value in mapping.items():
        at = f"{where}: {key}"
        if key not in known:
            raise EngineRefused(f"{at}: {name} of TensorRT-LLM {version} has no such keyword{_hint(name, key, known)}")
        field = known[key]
        inner = nested_class(field.annotation)
        if isinstance(value, Mapping) and inner in api():
            assert inner is not None
            check_keywords(inner, value, version, at)
            continue
        _check_value(name, field, value, version, at)
    for key, field in known.items():
        if field.required and key not in mapping:
            raise EngineRefused(f"{where}: {key} is missing; {name} of TensorRT-LLM {version} wants {field.annotation}")


def unchecked(version: str, name: str) -> bool:
    """True where the class is not recorded, so that nothing passed to it can be checked."""
    return name not in api() or api()[name].get("fields") == "not recorded"


def _check_value(name: str, field: Field, value: Any, version: str, at: str) -> None:
    wanted = field.annotation or "anything"
    if field.values and value is not None and value not in field.values:
        raise EngineRefused(f"{at}: wanted one of {', '.join(field.values)}, found {value!r} ({name}, {version})")
    if not fits(field.annotation, value):
        raise EngineRefused(f"{at}: wanted {wanted}, found {value!r} ({name} of TensorRT-LLM {version})")
    bounds = re.match(r"(\d+)<=x<=(\d+)", field.constraint or "")
    if bounds and value is not None and not int(bounds[1]) <= value <= int(bounds[2]):
        raise EngineRefused(f"{at}: wanted {bounds[1]} to {bounds[2]}, found {value!r} ({name})")


def _entry(name: str, version: str) -> dict[str, Any]:
    entry = api().get(name)
    if not isinstance(entry, dict):
        raise EngineRefused(f"{name}: no such class is recorded, so what is passed to it cannot be checked")
    release = parse_release(version)
    until, since = entry.get("available"), entry.get("since")
    if (until and not _available(until, release)) or (since and release < came_in(since)):
        raise EngineRefused(f"{name}: not in TensorRT-LLM {version} ({until or 'since ' + str(since)})")
    return entry


def _parameters(entry: dict[str, Any], method: str) -> list[dict[str, Any]]:
    for one in [*entry.get("methods", ()), *entry.get("added_later", ())]:
        if one.get("name") == method:
            return [p for p in one.get("params", ()) if p.get("kind") != "var_keyword"]
    raise EngineRefused(f"{method}: no such method is recorded")


def _put(found: dict[str, Field], raw: dict[str, Any], release: Release) -> None:
    name = raw["name"]
    if "since" in raw and release < came_in(raw["since"]):
        return
    if "removed" in raw and release >= _went_in(raw["removed"]):
        found.pop(name, None)
        return
    given = raw.get("default")
    default = f"{given['factory']}()" if isinstance(given, dict) and "factory" in given else given
    values = raw.get("values", ())
    values = tuple(re.split(r",\s*", values)) if isinstance(values, str) else tuple(values)
    old = found.get(name)
    if old is not None and "annotation" not in raw:
        # a later release changed the default; "auto" was added to the Literal of one
        annotation = old.annotation
        if isinstance(default, str) and annotation and annotation.startswith("Optional[Literal["):
            annotation = annotation if repr(default) in annotation else f"Union[{annotation}, Literal[{default!r}]]"
        found[name] = replace(old, annotation=annotation, default=default)
        return
    found[name] = Field(
        name, raw.get("annotation"), bool(raw.get("required")), default, values, raw.get("constraint"), raw.get("note")
    )
    if values and name == "connector":  # presets fill the three names
        for other in ("connector_module", "connector_scheduler_class", "connector_worker_class"):
            found[other] = replace(found[other], annotation="Optional[str]", required=False)


def came_in(text: str) -> Release:
    """The first release that surely has what came "since" `text`."""
    match = re.search(r"\d+\.\d+(?:\.\d+)?(?:rc\d*)?", text)
    if match is None or text.startswith("after"):
        return first_of_series("1.3")
    found = match[0]
    return first_of_series(f"{found}0" if found.endswith("rc") else found)


def _went_in(text: str) -> Release:
    """The first release that may lack it: the whole series where the record says "about"."""
    match = re.search(r"\d+\.\d+(?:\.\d+)?(?:rc\d+)?", text)
    assert match is not None, text
    return first_of_series(".".join(match[0].split(".")[:2]) if text.startswith("about") else match[0])


def _available(text: str, release: Release) -> bool:
    match = re.match(r"<=(\d+)\.(\d+)", text)
    if match is None:
        return True
    return release < first_of_series(f"{match[1]}.{int(match[2]) + 1}")


def _hint(name: str, key: str, known: Mapping[str, Field]) -> str:
    elsewhere = [v for v in _versions() if _has(name, key, v)]
    if elsewhere:
        return f"; {', '.join(elsewhere)} {'has' if len(elsewhere) == 1 else 'have'}"
    return _like(key, known)


def _like(word: str, known: Any) -> str:
    near = get_close_matches(word, list(known), 3, 0.6)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _has(name: str, key: str, version: str) -> bool:
    try:
        return key in fields(name, version)
    except EngineRefused:
        return False


def _versions() -> tuple[str, ...]:
    from kvtool.engine.trtllm.version import KNOWN

    return KNOWN

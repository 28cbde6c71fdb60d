"""The abstract pair that a connector subclasses, with exactly the methods recorded for this version."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any

from .schema import API, RELEASE, _dataclass

RequestData = _dataclass("RequestData", API["RequestData"]["fields"], kw_only=False)
SchedulerOutput = _dataclass("SchedulerOutput", API["SchedulerOutput"]["fields"], kw_only=False)
for _data in (RequestData, SchedulerOutput):
    _data.__module__ = "tensorrt_llm._fake.connector"  # metadata that holds one must pickle


def _method(entry: dict[str, Any]) -> Any:
    """A method of the recorded name and parameters that does nothing; abstract where the record says so."""
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    parameters += [
        inspect.Parameter(given if isinstance(given, str) else given["name"], inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for given in entry.get("params", ())
    ]

    def empty(self: Any, *args: Any, **kwargs: Any) -> None:
        inspect.signature(method).bind(self, *args, **kwargs)

    method: Any = empty
    method.__name__ = entry["name"]
    method.__signature__ = inspect.Signature(parameters)
    return abstractmethod(method) if entry.get("abstract") else method


class _Init(ABC):  # noqa: B024
    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        super().__init__()


class _Held(_Init):
    """What the recorded worker does itself."""

    _metadata: Any = None

    def bind_connector_meta(self, metadata: object) -> None:
        self._metadata = metadata

    def get_connector_meta(self) -> object:
        return self._metadata

    def _clear_connector_meta(self) -> None:
        self._metadata = None


def _grouped(flat: str) -> Any:
    """The form for layer groups, which hands one group on to the flat form and refuses several."""

    def by_group(self: Any, request: Any, pages: list[list[int]]) -> Any:
        if len(pages) != 1:
            raise NotImplementedError(f"{type(self).__name__} implements {flat} only, for {len(pages)} layer groups")
        return getattr(self, flat)(request, pages[0])

    return by_group


def _register_layout(self: Any, layout: Any) -> None:
    tensor = layout.as_single_pool_tensor()
    if tensor is None:
        raise NotImplementedError(f"{type(self).__name__} does not implement register_kv_cache_layout")
    self.register_kv_caches(tensor)


def _base(name: str) -> Any:
    record = API[name]
    own = {"__init__", "bind_connector_meta", "get_connector_meta", "_clear_connector_meta"}
    body: dict[str, Any] = {e["name"]: _method(e) for e in record["methods"] if e["name"] not in own}
    for entry in record["added"]:
        method = entry["name"]
        if entry.get("kind") == "class attribute":
            body[method] = entry["default"]
        elif method.endswith("_by_layer_group"):
            body[method] = _grouped(method.removesuffix("_by_layer_group"))
        elif method == "register_kv_cache_layout":
            body[method] = _register_layout
        elif "optional" not in entry.get("since", ""):  # the optional ones are called where a connector has them
            body[method] = _method(entry)
    held = _Held if name.endswith("Worker") else _Init
    return type(name, (held,), {**body, "__module__": "tensorrt_llm._fake.connector"})


KvCacheConnectorWorker = _base("KvCacheConnectorWorker")
KvCacheConnectorScheduler = _base("KvCacheConnectorScheduler")
HAS_LAYOUT = RELEASE >= (1, 3)

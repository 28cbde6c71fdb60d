"""The door to `tensorrt_llm.LLM`: the one place that imports TensorRT-LLM to serve with it.

The order matters, and is why this is a door. What an MPI launcher left in the environment goes first, or TensorRT-LLM
takes this process for a rank of a job that is not its own and hangs. Then the GPUs are named, since importing
tensorrt_llm opens every one that is visible and processes started later inherit that. Only then is it imported. A start
that hangs is given up after a deadline, with what to look at.

Above this file nobody knows TensorRT-LLM's classes: requests go in as plain values, and what comes back is read by
attribute (`serve.trtllm`).
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from kvtool.engine.trtllm.release import first_of_series, parse_release
from kvtool.engine.trtllm.signatures import api, check_keywords, fields
from kvtool.engine.trtllm.version import Adapter, can, installed
from kvtool.errors import EngineFailed, EngineRefused, Missing

log = logging.getLogger(__name__)

GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "TRTLLM_VISIBLE_DEVICES")


def clean_environment(environ: MutableMapping[str, str]) -> list[str]:
    """Remove what an MPI launcher left in `environ`, as TensorRT-LLM's own Triton model does; the names that went.

    Settings of MPI (OMPI_MCA_*, PMIX_MCA_*) stay: they say how to communicate, not who this process is.
    """
    recorded = api()["triton_llmapi_env"]
    exact, families = set[str](), list[str]()
    for entry in recorded["removed_before_import"]:
        family = re.match(r"(\w+_)\*", entry)  # "PMIX_* job variables"
        if family:
            families.append(family[1])
        else:
            exact.add(entry)
    prefixes = tuple(recorded["removed_prefixes"])
    gone = [
        name
        for name in environ
        if name in exact
        or name.startswith(prefixes)
        or any(name.startswith(family) and not name.startswith(f"{family}MCA_") for family in families)
    ]
    for name in gone:
        del environ[name]
    return sorted(gone)


def read_llm_args(path: Path) -> dict[str, Any]:
    """The keyword arguments of LLM() in a bundle's or a rendered llm.yaml.

    Raises:
        EngineRefused: no such file, or no table with a model in it.
    """
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise EngineRefused(f"{path}: wanted the arguments of LLM() ({why}); build or render it again") from None
    if not isinstance(found, dict) or not isinstance(found.get("model"), str):
        raise EngineRefused(f"{path}: wanted a table of LLM() arguments with a model; build or render it again")
    return found


class Llm:
    """One `tensorrt_llm.LLM` in this process. `generate` belongs to one asyncio loop; `close` to any thread."""

    def __init__(
        self,
        args: Mapping[str, Any],
        gpus: Sequence[int],
        *,
        start_timeout_s: float,
        where: str,
        tells: Sequence[str] = (),
    ) -> None:
        """`gpus`: ids on this host, none: leave the environment's choice. `where` names the arguments in errors.
        `tells`: variables of the environment that every rank must have. What starts the ranks inherits them; versions
        that can are asked to set them there as well.

        Raises:
            Missing: tensorrt_llm is not installed here.
            EngineRefused: an argument that this version does not take, or a model that it refuses.
            EngineFailed: it did not start in time, or failed at that.
        """
        version = installed()
        if version is None:
            raise Missing(
                "tensorrt_llm is not installed in the Python that Triton's stub runs (the one that PATH finds first); "
                "start the server in NVIDIA's TensorRT-LLM container"
            )
        self.can = can(version)
        args = dict(args)
        recorded = parse_release(version) >= first_of_series("1.2")  # nobody read it in 1.1
        if tells and recorded and "env_overrides" in fields("LLM", version):
            args["env_overrides"] = {name: os.environ[name] for name in tells if name in os.environ}
        check_keywords("LLM", args, version, where)
        gone = clean_environment(os.environ)
        if gone:
            log.info("environment cleaned variables=%s", ",".join(gone))
        if gpus:
            visible = ",".join(map(str, gpus))
            os.environ.update(dict.fromkeys(GPU_VARIABLES, visible))
        self._llm = _within(start_timeout_s, lambda: _start(args), where)

    @property
    def own_ids(self) -> bool:
        """Whether context requests are to have ids that no other server gives (`disagg_request_id`): with 1.3 the
        Python transceiver came, which knows a request by that."""
        return self.can.adapter is Adapter.PYTORCH_1_3

    def generate(
        self,
        tokens: Sequence[int],
        sampling: Mapping[str, Any],
        *,
        streaming: bool,
        handoff: Mapping[str, Any] | None = None,
        salt: str = "",
    ) -> Any:
        """Start a request; TensorRT-LLM's RequestOutput, to be iterated in the running loop.

        `sampling`: keywords of SamplingParams, `handoff`: of DisaggregatedParams; both are checked.
        """
        from tensorrt_llm import DisaggregatedParams, SamplingParams

        check_keywords("SamplingParams", sampling, self.can.version, "sampling")
        extra: dict[str, Any] = {"cache_salt": salt} if salt else {}
        if handoff is not None:
            check_keywords("DisaggregatedParams", handoff, self.can.version, "hand-off")
            extra["disaggregated_params"] = DisaggregatedParams(**handoff)
        return self._llm.generate_async(list(tokens), SamplingParams(**sampling), streaming=streaming, **extra)

    def close(self) -> None:
        self._llm.shutdown()


def _start(args: Mapping[str, Any]) -> Any:
    from tensorrt_llm import LLM

    return LLM(**args)


def _within(seconds: float, start: Any, where: str) -> Any:
    """What `start` returns, from a thread that is left behind when it takes longer: nothing can stop it."""
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["llm"] = start()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=run, name="tensorrt-llm-start", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise EngineFailed(
            f"{where}: TensorRT-LLM did not start within {seconds:g} s; look at the log above for MPI or GPU messages, "
            "at nvidia-smi for memory that another process holds, or raise supervise.start_timeout"
        )
    error = outcome.get("error")
    if error is None:
        return outcome["llm"]
    log.error("TensorRT-LLM failed at start", exc_info=error)
    kind = EngineRefused if isinstance(error, (ValueError, TypeError)) else EngineFailed
    raise kind(f"{where}: TensorRT-LLM failed at start: {type(error).__name__}: {str(error).strip()[:500]}") from None

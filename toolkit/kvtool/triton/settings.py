"""What a served model is told: parameters of its config.pbtxt, and what differs between instances by environment.

Rendered repositories are the same on every machine, so name and addresses come from the environment that the
supervisor (or whoever starts the server) sets.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvtool.errors import EngineRefused, Missing
from kvtool.serve.open import LlmPlace
from kvtool.serve.options import DecodeOptions, LlmOptions, PoolOptions, PrefillOptions
from kvtool.triton.asked import Limits

INSTANCE = "KVTOOL_INSTANCE"
PEERS = "KVTOOL_PEERS"
POOL = "KVTOOL_POOL"
TRITON = "TRITON_SERVER_VERSION"
"""Set in Triton's containers, and by kvtool for the server of nvidia-pytriton."""
NUMPY_2_FAULT = (2, 51)
"""The Triton whose Python stub was seen to corrupt tensors under numpy 2; it came with nvidia-pytriton 0.7."""


@dataclass(frozen=True)
class Settings:
    """Parameters of one model, as text; readers below give them types."""

    parameters: Mapping[str, str]
    folder: Path = Path()
    """Where the model's own files lie."""

    @classmethod
    def of(cls, args: Mapping[str, str]) -> Settings:
        """From what Triton gives to `initialize`. Checks what would silently corrupt tensors, and starts logging.

        Raises:
            Missing: numpy 2 or newer is what this process imported, in a Triton that cannot have it.
        """
        check_numpy(np.__version__, os.environ.get(TRITON, ""))
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True)
        declared = json.loads(args["model_config"]).get("parameters", {})
        folder = Path(args.get("model_repository", "."), args.get("model_version", "1"))
        return cls({key: value["string_value"] for key, value in declared.items()}, folder)

    def text(self, key: str) -> str:
        """Raises EngineRefused: the config has no such parameter."""
        if key not in self.parameters:
            raise EngineRefused(f"config.pbtxt has no parameter {key!r}; render the repository again")
        return self.parameters[key]

    def count(self, key: str) -> int:
        return int(self.text(key))

    def seconds(self, key: str) -> float:
        return float(self.text(key))

    @property
    def engine(self) -> Path:
        return Path(self.text("engine"))

    @property
    def instance(self) -> str:
        return os.environ.get(INSTANCE, "instance-0")

    @property
    def index(self) -> int:
        """Of the instance among those of its role: 1 of decode-1."""
        number = self.instance.rpartition("-")[2]
        return int(number) if number.isdecimal() else 0

    @property
    def gpus(self) -> tuple[int, ...]:
        """This instance's, of the lists for all: "0,1;2,3". None where the environment chooses.

        Raises:
            EngineRefused: there is no list for this instance.
        """
        text = self.parameters.get("gpus", "")
        if not text:
            return ()
        lists = text.split(";")
        if self.index >= len(lists):
            raise EngineRefused(
                f"{self.instance}: GPUs are named for {len(lists)} instances ({text}); give {INSTANCE} a name that "
                f"ends in 0 to {len(lists) - 1}, or render the repository again"
            )
        return tuple(int(each) for each in lists[self.index].split(","))

    @property
    def pool_state(self) -> Path | None:
        state = os.environ.get(POOL, "")
        return Path(state) if state else None

    @property
    def peers(self) -> Path:
        """Raises Missing: nobody said where the address file is."""
        path = os.environ.get(PEERS, "")
        if not path:
            raise Missing(f"the front model needs {PEERS}=FILE in its environment; kvtool deploy up sets it")
        return Path(path)

    def prefill_options(self) -> PrefillOptions:
        return PrefillOptions(
            threads=self.count("threads"),
            kv_blocks=self.count("kv_blocks"),
            chunk_tokens=self.count("chunk_tokens"),
            pool=self._pool_options(),
        )

    def decode_options(self) -> DecodeOptions:
        return DecodeOptions(
            threads=self.count("threads"),
            prompt_threads=self.count("prompt_threads"),
            kv_blocks=self.count("kv_blocks"),
            batch_max=self.count("batch_max"),
            pool=self._pool_options(),
        )

    def llm_options(self) -> LlmOptions:
        handoff = self.text("handoff")
        assert handoff in ("pool", "transceiver"), f"rendered wrongly: handoff {handoff}"
        return LlmOptions(
            handoff="pool" if handoff == "pool" else "transceiver",
            queue_max=self.count("queue_max"),
            start_timeout_s=self.seconds("start_timeout_s"),
            match_budget_s=self.seconds("match_budget_s"),
            put_budget_s=self.seconds("put_budget_s"),
        )

    def llm_place(self) -> LlmPlace:
        return LlmPlace(
            engine=self.engine,
            llm_file=self.folder / "llm.yaml",
            connector_file=self.folder / "connector.yaml",
            gpus=self.gpus,
            pool_state=self.pool_state,
            name=self.instance,
        )

    def limits(self) -> Limits:
        return Limits(
            max_tokens_default=self.count("max_tokens_default"),
            max_tokens_max=self.count("max_tokens_max"),
            deadline_s=self.seconds("deadline_s"),
            concurrent_max=self.count("concurrent_max"),
        )

    def _pool_options(self) -> PoolOptions:
        return PoolOptions(
            path=self.text("pool_path"),
            match_budget_s=self.seconds("match_budget_s"),
            fetch_budget_s=self.seconds("fetch_budget_s"),
            put_budget_s=self.seconds("put_budget_s"),
        )


def check_numpy(numpy: str, triton: str) -> None:
    """Refuse numpy 2 under a Triton that corrupts its tensors, or that does not say which it is.

    Raises:
        Missing: with the line that installs another.
    """
    if int(numpy.partition(".")[0]) < 2:
        return
    numbers = tuple(int(part) for part in triton.split(".")[:2] if part.isdecimal())
    if len(numbers) == 2 and numbers > NUMPY_2_FAULT:
        return
    known = f"Triton {triton}" if triton else f"a Triton of unknown version ({TRITON} is not set)"
    raise Missing(
        f"numpy {numpy} in the Python stub of {known} silently corrupts tensors; "
        "run: pip install 'numpy>=1.26,<2', or use a newer Triton's container"
    )

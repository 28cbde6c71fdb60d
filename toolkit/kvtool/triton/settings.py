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
from kvtool.serve.options import DecodeOptions, PoolOptions, PrefillOptions
from kvtool.triton.asked import Limits

INSTANCE = "KVTOOL_INSTANCE"
PEERS = "KVTOOL_PEERS"
POOL = "KVTOOL_POOL"


@dataclass(frozen=True)
class Settings:
    """Parameters of one model, as text; readers below give them types."""

    parameters: Mapping[str, str]

    @classmethod
    def of(cls, args: Mapping[str, str]) -> Settings:
        """From what Triton gives to `initialize`. Checks what would silently corrupt tensors, and starts logging.

        Raises:
            Missing: numpy 2 or newer is what this process imported.
        """
        if int(np.__version__.partition(".")[0]) >= 2:
            raise Missing(
                f"numpy {np.__version__} in Triton's Python stub silently corrupts tensors; "
                "run: pip install 'numpy>=1.26,<2'"
            )
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True)
        declared = json.loads(args["model_config"]).get("parameters", {})
        return cls({key: value["string_value"] for key, value in declared.items()})

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

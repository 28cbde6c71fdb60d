"""`python -m kvtool_trtllm.gpucheck STEP WORK OPTIONS`: one step, by the check that started it."""

from __future__ import annotations

import json
import sys
import traceback
from importlib import import_module
from pathlib import Path

from kvtool.errors import KvtoolError, Missing
from kvtool_trtllm.gpucheck.account import Context, Show, Skip, Wrong, tell

MODULES = {
    "versions": "versions:show_versions",
    "import": "versions:show_import",
    "build": "bundle:show_build",
    "connector": "connector:show_connector",
    "kernels": "kernels:show_kernels",
    "equality": "serving:show_equality",
    "pair": "serving:show_pair",
    "transceiver": "transceiver:show_transceiver",
    "nixl": "nixl:show_nixl",
    "gds": "gds:show_gds",
}


def load(step: str) -> Show:
    module, _, name = MODULES[step].partition(":")
    found: Show = getattr(import_module(f"kvtool_trtllm.gpucheck.{module}"), name)
    return found


def main(step: str, work: Path, options: dict[str, str | None]) -> int:
    model = options.get("model")
    try:
        detail, evidence = load(step)(Context(work, Path(model) if model else None))
    except (Skip, Missing) as reason:
        tell(step, "skip", str(reason), {})
        return 0
    except (Wrong, KvtoolError) as found:
        tell(step, "fail", str(found), {})
        return 1
    except Exception as error:
        traceback.print_exc()
        tell(step, "fail", f"{type(error).__name__}: {error}", {})
        return 1
    tell(step, "pass", detail, evidence)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])))

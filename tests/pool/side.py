"""A client on one side of a network: reads and writes checked blocks, and for each line says what it saw."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from blocks import KEYS
from loaded import Load

if __name__ == "__main__":
    load = Load(Path(sys.argv[1]), [b"side" + key[4:] for key in KEYS[:48]], int(sys.argv[2]), threads=1, budget_s=0.5)
    load.start()
    for _ in sys.stdin:
        print(json.dumps({**load.seen, "wrong": len(load.wrong), "errors": list(map(repr, load.errors))}), flush=True)
    load.stop()

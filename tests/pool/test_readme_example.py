"""The README's lines on the pool as a library, run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from blocks import KEYS, LAYOUT, payload

README = Path(__file__).parents[2] / "README.md"

pytestmark = pytest.mark.real


def test_readmes_library_example_gives_back_what_was_put(pool, client):
    client.delete(KEYS)
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    (script,) = [block for block in blocks if "kvtool.pool" in block]
    assert script.count('"run/pool"') == 1
    keys, used = KEYS[:4], []
    buffers = [np.frombuffer(payload(key), np.uint8).copy() for key in keys]
    names = {"keys": keys, "buffers": buffers, "use": lambda blocks: used.extend(bytes(block.data) for block in blocks)}
    exec(script.replace("run/pool", str(pool.run_dir)), names)
    assert names["result"].count == 4 and used == [payload(key) for key in keys]
    assert all(buffer.nbytes == LAYOUT.block_size for buffer in buffers)

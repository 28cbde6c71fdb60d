"""Block keys: golden vectors that must hold on every machine and Python, and what must change them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtool.kv.block import KeySeed, block_keys, partial_key
from kvtool.kv.layout import KVLayout

LAYOUT = KVLayout(layers=30, kv_heads=3, head_dim=64, block_tokens=32)
SEED = KeySeed("default", "m", LAYOUT.fingerprint)
FULL = KeySeed("default", "m", LAYOUT.fingerprint, "n", "tenant-a", "lora", ("img1", "img2"))
GOLDEN = {
    "layout": "dc9f44149470f2e71844c02ad8c06811",
    "seed": "1241e81213e2f43809e10525f4b8580891cfca36c8050c93a25028fc4b2f1c0e",
    "full seed": "7a146abfc9fbac603f21cc0b80373863cee331eb8b6332ba217139eab045b234",
    "keys": [
        "3b57a2980f5457f60bf4a7a010aeeed12465bf82c5e7619abacc31e20cb65be0",
        "b78bdfc944431614c9fc438ded2321372c30d97a139578674066e0ad9164c957",
        "6dda0f0cef4dc784817c69f967202ae2e40271858d06f65e3a0cfde51ea97c9b",
    ],
    "partial after them": "9cbc49edc382688958b5bcbefdfd9ba78076daaee8c2a739aa6d0ffe84804127",
    "partial alone": "1e8df0adeee2dec2a4a8c88c64892c8538ef9df2b20c70f38ea93a920e721311",
}


def vectors() -> dict:
    seed = SEED.digest()
    keys = block_keys(seed, list(range(100)), 32)
    return {
        "layout": LAYOUT.fingerprint,
        "seed": seed.hex(),
        "full seed": FULL.digest().hex(),
        "keys": [key.hex() for key in keys],
        "partial after them": partial_key(seed, keys, [96, 97, 98, 99]).hex(),
        "partial alone": partial_key(seed, [], [1]).hex(),
    }


def test_keys_are_the_golden_ones():
    assert vectors() == GOLDEN


def test_keys_do_not_depend_on_the_process():
    """Other systems hashed with Python's own hash(): no hit ever crossed a process."""
    code = "import json, test_keys; print(json.dumps(test_keys.vectors()))"
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parent)}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
        assert json.loads(done.stdout) == GOLDEN, done.stderr


@pytest.mark.parametrize(
    "kind", [list, tuple, np.array, lambda t: np.array(t, dtype=np.int32), lambda t: np.array(t, ">i8")]
)
def test_keys_do_not_depend_on_how_tokens_are_held(kind):
    assert [key.hex() for key in block_keys(SEED.digest(), kind(range(100)), 32)] == GOLDEN["keys"]


def test_everything_that_decides_the_bytes_changes_the_seed():
    changed = [
        replace(FULL, **{name: "other"}) for name in ("namespace", "model", "layout", "numerics", "salt", "lora")
    ]
    changed += [replace(FULL, multimodal=("img2", "img1")), replace(FULL, multimodal=("img1img2",)), SEED]
    changed += [replace(FULL, salt="tenant-alora", lora=""), FULL]
    assert len({seed.digest() for seed in changed}) == len(changed)


def test_a_key_names_the_whole_prefix():
    tokens = list(range(96))
    keys = block_keys(SEED.digest(), tokens, 32)
    other = block_keys(SEED.digest(), [7, *tokens[1:]], 32)
    assert not set(keys) & set(other), "blocks with equal tokens after different prefixes must differ"
    assert block_keys(SEED.digest(), tokens[:64], 32) == keys[:2]


def test_a_partial_block_never_answers_for_a_whole_one():
    seed = SEED.digest()
    keys = block_keys(seed, list(range(64)), 32)
    assert partial_key(seed, keys[:1], list(range(32, 63))) != keys[1]
    assert partial_key(seed, keys[:1], [32]) != partial_key(seed, keys[:1], [32, 0])


def test_a_layout_that_differs_anywhere_has_another_fingerprint():
    fields = {"layers": 31, "kv_heads": 4, "head_dim": 65, "block_tokens": 33, "dtype": "float16"}
    prints = {replace(LAYOUT, **{name: value}).fingerprint for name, value in fields.items()} | {LAYOUT.fingerprint}
    assert len(prints) == 6

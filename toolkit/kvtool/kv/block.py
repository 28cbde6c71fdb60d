"""Block identity: which bytes may stand for which tokens.

A block's key says everything that its K and V depend on. It is a chain, `key[i] = H(key[i-1], tokens of block i)`,
so a key names a whole prefix and not only 32 tokens (Mooncake, FAST '25, section 4.1). The chain starts from a seed
over what else decides the bytes: namespace, model, KV layout, the numerics of the machine that computes, the tenant's
salt, LoRA and multimodal inputs. Two requests that differ in any of these can never meet on a key.

Keys are 256-bit BLAKE3: at 128 bits and more a collision is not a case to handle, and a salt can only isolate tenants
under a cryptographic hash. Nothing here depends on PYTHONHASHSEED, byte order or process: golden vectors in the tests
hold on every machine.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

KEY_SIZE = 32
BlockKey = bytes
"""32 bytes. The key of a block, and through the chain of all the tokens before it."""


@dataclass(frozen=True)
class KeySeed:
    """What a block's bytes depend on besides its tokens.

    `model`: digest over weights and config. `layout`: fingerprint of the `KVLayout`. `numerics`: digest of a fixed
    probe run through the engine; machines whose kernels round differently get different keys, so that a hit can not
    change an answer. `salt`: the tenant's, added by the server side. `lora`, `multimodal`: digests, in input order.
    """

    namespace: str
    model: str
    layout: str
    numerics: str = ""
    salt: str = ""
    lora: str = ""
    multimodal: tuple[str, ...] = field(default=())

    def digest(self) -> bytes:
        """32 bytes; every field is length-prefixed, so ("ab", "c") and ("a", "bc") differ."""
        h = blake3(b"kvtool block seed 1\0")
        fields = (self.namespace, self.model, self.layout, self.numerics, self.salt, self.lora, *self.multimodal)
        for text in fields:
            raw = text.encode()
            h.update(struct.pack("<Q", len(raw)))
            h.update(raw)
        return h.digest()


def chain_key(parent: bytes, tokens: bytes, token_count: int) -> BlockKey:
    """The key of the block that follows `parent`; `tokens` are little-endian uint32, `token_count` of them."""
    return blake3(parent + struct.pack("<I", token_count) + tokens).digest()


def block_keys(seed: bytes, tokens: Sequence[int] | npt.NDArray[np.integer[Any]], block_tokens: int) -> list[BlockKey]:
    """Keys of the whole blocks of `tokens`, in order; the trailing partial block has none.

    A prompt of n tokens gives n // block_tokens keys. About 1 us a block.
    """
    whole = len(tokens) // block_tokens
    raw = np.asarray(tokens[: whole * block_tokens], dtype="<u4").tobytes()
    keys, parent, step = [], seed, block_tokens * 4
    for at in range(0, len(raw), step):
        parent = chain_key(parent, raw[at : at + step], block_tokens)
        keys.append(parent)
    return keys


def partial_key(seed: bytes, keys: Sequence[BlockKey], tail: Sequence[int]) -> BlockKey:
    """The key of a trailing partial block that holds `tail`, after the whole blocks `keys`.

    The token count is hashed too, so a partial block never answers for a whole one.
    """
    parent = keys[-1] if keys else seed
    return chain_key(parent, np.asarray(tail, dtype="<u4").tobytes(), len(tail))

"""Which blocks of the pool a request's tokens stand for.

Keys are kvtool's own chains over token ids, seeded with namespace, model, layout and numerics, and with what else of
the request decides its KV: the tenant's salt, the digests of its LoRA adapter and of its images. The engine's own block
hashes are not used as keys: they differ between cache managers and releases, and 64 bits are too few for an identity.
A request whose KV depends on something that is none of these (images or adapters without digests, prompt tables) is
neither matched nor saved.

What a request has under which name differs between releases, and between the request that the C++ manager hands over
and the Python one; here is the one place that knows. Callbacks get the salt as `cache_salt` (1.3) or as a number
(`cache_salt_id`); the number is used wherever there is one, since it is there in all of them. At the match under the V1
manager only what C++ has is there, so the seed is asked for again with the allocation, before anything is saved.
"""

from __future__ import annotations

from typing import Any

from blake3 import blake3

from kvtool.engine.trtllm.connector import ConnectorSettings
from kvtool.kv.block import BlockKey, KeySeed, block_keys

_TABLES = ("prompt_embedding_table", "multimodal_embedding", "prompt_embedding_table_size")


def seed_of(request: Any, settings: ConnectorSettings) -> bytes | None:
    """The seed of the request's chain; None where token ids and digests do not tell its KV."""
    images = getattr(request, "multimodal_hashes", None)
    if not images and (any(getattr(request, name, None) is not None for name in _TABLES) or _pictured(request)):
        return None
    salt_id, salt = getattr(request, "cache_salt_id", None), getattr(request, "cache_salt", None)
    lora = first_of(request, "lora_task_id", "py_lora_task_id")
    if lora is not None and str(lora) not in settings.lora:
        return None
    return KeySeed(
        namespace=settings.namespace,
        model=settings.model_digest,
        layout=settings.kv.layout().fingerprint,
        numerics=settings.numerics,
        salt=f"id {salt_id}" if salt_id is not None else f"text {salt}" if salt is not None else "",
        lora="" if lora is None else settings.lora[str(lora)],
        multimodal=tuple(_digest(image) for image in images or ()),
    ).digest()


def keys_of(seed: bytes, tokens: list[int], block_tokens: int) -> list[BlockKey]:
    return block_keys(seed, tokens, block_tokens)


def first_of(request: Any, *names: str) -> Any:
    """The first of these attributes that the request has and that is not None."""
    for name in names:
        value = getattr(request, name, None)
        if value is not None:
            return value
    return None


def generation_only(request: Any) -> bool:
    """A property of the C++ request, a method of the Python one."""
    value = getattr(request, "is_generation_only_request", False)
    return bool(value() if callable(value) else value)


def request_id_of(request: Any) -> int:
    return int(first_of(request, "request_id", "py_request_id"))


def _pictured(request: Any) -> bool:
    """Whether it has images or the like whose content its tokens do not tell: the PyTorch backend carries them beside
    the request, and goes on without digests where it cannot make them. Rotary positions alone follow from the
    tokens."""
    found = getattr(request, "py_multimodal_data", None)
    return bool(set(found) - {"mrope_config"} if isinstance(found, dict) else found)


def _digest(image: Any) -> str:
    return blake3(repr(image).encode()).hexdigest()

"""Sizes and durations as people write them.

`512MiB` is 512 x 2**20 bytes, `512MB` is 512 x 10**6; a plain number is bytes (or seconds). Anything else is
refused with the text that was found, since a silently misread size is a cap that does not cap.
"""

from __future__ import annotations

import re

_SIZE = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_TIME = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str | int) -> int:
    """Bytes in `text`, such as 4096, "64KiB", "1.5GiB".

    Raises:
        ValueError: not a non-negative size with a known unit.
    """
    if isinstance(text, bool):
        raise ValueError(f"wanted a size such as 512MiB, found {text!r}")
    if isinstance(text, int):
        if text < 0:
            raise ValueError(f"a size cannot be negative, found {text}")
        return text
    match = _NUMBER.fullmatch(text)
    if not match or match[2].lower() not in _SIZE:
        raise ValueError(f"wanted a size such as 512MiB or 2GiB, found {text!r}")
    return int(float(match[1]) * _SIZE[match[2].lower()])


def parse_seconds(text: str | float) -> float:
    """Seconds in `text`, such as 0.5, "250ms", "2m".

    Raises:
        ValueError: not a non-negative duration with a known unit.
    """
    if isinstance(text, bool):
        raise ValueError(f"wanted a duration such as 250ms, found {text!r}")
    if isinstance(text, (int, float)):
        if text < 0:
            raise ValueError(f"a duration cannot be negative, found {text}")
        return float(text)
    match = _NUMBER.fullmatch(text)
    if not match or match[2].lower() not in _TIME:
        raise ValueError(f"wanted a duration such as 250ms, 30s or 2m, found {text!r}")
    return float(match[1]) * _TIME[match[2].lower()]


def show_size(size: int) -> str:
    """`size` bytes for people: 1572864 -> "1.5 MiB"."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"

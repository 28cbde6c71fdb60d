"""Releases of TensorRT-LLM, in order: 1.2.0rc8 < 1.2.0 < 1.2.0.post1 < 1.2.1 < 1.3.0rc0.

A small part of PEP 440, so that the order of two versions needs no package: epochs and the like have never been used
for these releases, and are refused.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from kvtool.errors import EngineRefused

_FORM = re.compile(
    r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:\.?(dev|a|alpha|b|beta|rc|c)\.?(\d*))?(?:\.?post\.?(\d+))?(?:\.dev\d+)?(?:\+[\w.]+)?"
)
_STAGE = {"dev": 0, "a": 1, "alpha": 1, "b": 2, "beta": 2, "rc": 3, "c": 3}
FINAL = 4


class Release(NamedTuple):
    """Compares as releases do. `stage`: 0 dev, 1 alpha, 2 beta, 3 candidate, 4 final."""

    major: int
    minor: int
    patch: int = 0
    stage: int = FINAL
    number: int = 0
    post: int = 0

    @property
    def series(self) -> str:
        return f"{self.major}.{self.minor}"


def parse_release(text: str) -> Release:
    """The release that `text` names, such as 1.2.1, 1.3.0rc15, 1.3.0rc22.post1; what follows a + is left out.

    Raises:
        EngineRefused: not a version.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise EngineRefused(f"TensorRT-LLM version: wanted one such as 1.2.1 or 1.4.0rc1, found {text!r}")
    major, minor, patch, stage, number, post = match.groups()
    return Release(
        int(major), int(minor), int(patch or 0), _STAGE[stage] if stage else FINAL, int(number or 0), int(post or 0)
    )


def first_of_series(text: str) -> Release:
    """The first pre-release that "1.3" may mean; a version with a patch or a stage means itself."""
    release = parse_release(text)
    whole = re.fullmatch(r"\d+\.\d+", text.strip()) is not None
    return release._replace(stage=0, number=0) if whole else release

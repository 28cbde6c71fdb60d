"""One thing that is wrong with a deployment: where it was said, and a sentence with found, wanted and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvtool.errors import SpecRefused


@dataclass(frozen=True)
class Fault:
    """`key`: of the spec, or a file with the key in it."""

    key: str
    says: str

    def __str__(self) -> str:
        return f"{self.key}: {self.says}"


def refuse(faults: Iterable[Fault]) -> None:
    """Raises SpecRefused: there is one; a sentence for each."""
    said = "\n".join(map(str, faults))
    if said:
        raise SpecRefused(said)

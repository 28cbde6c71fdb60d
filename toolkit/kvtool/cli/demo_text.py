"""A document for the demo: long enough that computing it takes seconds, made here so that nothing is downloaded."""

from __future__ import annotations

_PLACES = ("the north quay", "the old mill", "the upper lock", "the signal house", "the east bridge", "the dry dock")
_PEOPLE = ("Ines", "Marek", "Yuki", "Tobias", "Amara", "Leon", "Sofia", "Daan")
_GOODS = ("copper wire", "lamp oil", "winter wheat", "blue slate", "cedar planks", "salt", "spring tea")
_WEATHER = ("clear and still", "fog until noon", "rain from the west", "a hard frost", "wind from the sea")
QUESTION = "Write a short story about one day at this harbour. Name the people and what they brought."


def document(entries: int) -> str:
    """A harbour log of so many entries, about 33 tokens each, the same text every time."""
    lines = [
        "The harbour log, kept by the harbour master. Each entry says who came, what they brought, and the weather."
    ]
    for day in range(1, entries + 1):
        person, goods = _PEOPLE[day * 5 % len(_PEOPLE)], _GOODS[day * 3 % len(_GOODS)]
        place, weather = _PLACES[day * 7 % len(_PLACES)], _WEATHER[day * 2 % len(_WEATHER)]
        lines.append(f"Day {day}: {person} brought {10 + day * 13 % 90} crates of {goods} to {place}; {weather}.")
    return "\n".join(lines)

"""Thirty prompts that meet the edges of blocks, chunks, tokens and sharing.

Each is a text; where a length in tokens matters it is made with the engine's own tokenizer, so that it ends exactly
where it says.
"""

from __future__ import annotations

from collections.abc import Callable

_LIST = """river stone lantern harbour winter copper meadow signal engine garden bridge cloud paper silver forest
window market island thunder letter morning village anchor candle mirror orchard valley compass feather granite"""
WORDS = _LIST.split()


def prose(words: int, start: int = 0) -> str:
    """Plain words, a different text for each `start`."""
    step = 7 if start % 2 else 11
    return " ".join(WORDS[(start + i * step + i // 30) % len(WORDS)] for i in range(words))


def of_tokens(count: int, start: int, encode: Callable[[str], list[int]], decode: Callable[[list[int]], str]) -> str:
    """A text that the tokenizer makes into exactly `count` tokens."""
    ids = encode(prose(count + 8, start))
    text = decode(ids[:count])
    assert len(encode(text)) == count, f"{text!r} is {len(encode(text))} tokens, wanted {count}"
    return text


def thirty(
    block: int, chunk: int, encode: Callable[[str], list[int]], decode: Callable[[list[int]], str]
) -> list[tuple[str, str]]:
    """(name, text) of every prompt."""

    def exact(count: int, start: int) -> str:
        return of_tokens(count, start, encode, decode)

    shared = prose(120, 3)
    longer = prose(300, 5)
    return [
        ("one token", exact(1, 0)),
        ("two tokens", exact(2, 1)),
        ("short", "The capital of France is"),
        ("short question", "What is the largest planet?"),
        ("a block less one", exact(block - 1, 2)),
        ("exactly a block", exact(block, 4)),
        ("a block and one", exact(block + 1, 6)),
        ("two blocks less one", exact(2 * block - 1, 8)),
        ("exactly two blocks", exact(2 * block, 10)),
        ("two blocks and one", exact(2 * block + 1, 12)),
        ("five blocks", exact(5 * block, 14)),
        ("five blocks and seventeen", exact(5 * block + 17, 16)),
        ("shared, ending one", f"{shared}. Say the first word."),
        ("shared, ending two", f"{shared}. Count the words."),
        ("shared, ending three", f"{shared}. Repeat the list in another order, please."),
        ("shared alone", shared),
        ("shared and more shared", f"{shared} {longer}"),
        ("longer, ending one", f"{longer}. Now continue:"),
        ("longer, ending two", f"{longer}. Summarise:"),
        ("longer alone", longer),
        ("accents", "Übermäßig große Äpfel fallen früh; ça va? El niño comió piñata. " * 3),
        ("Chinese and Japanese", "今天天气很好，我们去公园散步。日本語のテキストも含まれています。" * 3),
        ("emoji", "Family 👨‍👩‍👧‍👦 and flags 🇫🇷🇯🇵, then 🤖🔥 " * 4),
        ("code", "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + " * 3),
        ("whitespace", "a\n\n\n   b\t\tc   \n" * 8),
        ("digits", " ".join(str(n * n) for n in range(60))),
        ("a chunk less one", exact(chunk - 1, 18)),
        ("exactly a chunk", exact(chunk, 20)),
        ("a chunk and one", exact(chunk + 1, 22)),
        ("over two chunks", exact(2 * chunk + block // 2, 24)),
    ]

"""`kvtool chat`: a conversation; each turn says how much of it was in the pool."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated, Any

import typer

from kvtool.cli import console
from kvtool.cli.generate import UrlOption, usage_line
from kvtool.cli.where import RunDirOption, SpecOption, run_dir_of
from kvtool.errors import KvtoolError


def chat(
    spec: SpecOption = None,
    run_dir: RunDirOption = None,
    url: UrlOption = None,
    system: Annotated[str, typer.Option(help="System message; none when empty.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of one answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
) -> None:
    """Talk to a deployment. Ctrl-C stops an answer, Ctrl-D (or an empty line) ends the conversation."""
    from kvtool.triton.state import front_url

    address = url or front_url(run_dir_of(spec, run_dir))
    messages = [{"role": "system", "content": system}] if system else []
    while True:
        said = _ask()
        if not said:
            return
        turn = [*messages, {"role": "user", "content": said}]
        try:
            answer = _answer(address, turn, {"max_tokens": max_tokens, "temperature": temperature})
        except KvtoolError as error:
            console.fail(str(error))
            continue
        messages = [*turn, {"role": "assistant", "content": answer}]


def _ask() -> str:
    if sys.stdin.isatty():
        console.err().print("[bold]you>[/] ", end="")
    try:
        return sys.stdin.readline().strip()
    except KeyboardInterrupt:
        return ""


def _answer(url: str, messages: list[dict[str, str]], options: dict[str, Any]) -> str:
    """Stream one answer to stdout; what came of it before Ctrl-C counts as the answer."""
    from kvtool.triton.client import stream

    text, last = "", None
    with contextlib.closing(stream(url, messages, **options)) as pieces:
        try:
            for piece in pieces:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
                text, last = text + piece.text, piece
        except KeyboardInterrupt:
            console.warn("stopped")
    sys.stdout.write("\n")
    if last is not None and last.finish_reason:
        console.err().print(f"[dim]{usage_line(dict(last.usage), last.finish_reason)}[/]")
    return text

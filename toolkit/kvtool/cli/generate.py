"""`kvtool generate`: one prompt, its answer streamed to stdout, what it used on stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtool.cli import console
from kvtool.cli.where import RunDirOption, SpecOption, run_dir_of
from kvtool.errors import RequestRefused

UrlOption = Annotated[str | None, typer.Option("--url", help="gRPC address of a front server.", show_default=False)]


def generate(
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt; - or none reads stdin.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt through the model's chat template.")] = False,
    spec: SpecOption = None,
    run_dir: RunDirOption = None,
    url: UrlOption = None,
    local: Annotated[
        Path | None, typer.Option("--local", help="Run this engine directory here, without servers or pool.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens to generate; the deployment's default if unset.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Same seed, same answer.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text. Repeatable.")] = None,
    deadline_ms: Annotated[int | None, typer.Option(help="Give up after this many milliseconds.")] = None,
    priority: Annotated[int, typer.Option(min=0, max=100, help="Higher goes first.")] = 50,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end-of-text token.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object at the end instead of a stream.")] = False,
) -> None:
    """Send one prompt and stream the answer. Ctrl-C cancels it on the servers too."""
    text = sys.stdin.read() if prompt in (None, "-") else str(prompt)
    if not text:
        raise RequestRefused("the prompt is empty; give --prompt TEXT or text on stdin")
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "deadline_ms": deadline_ms,
        "priority": priority,
        "ignore_eos": ignore_eos,
    }
    question: Any = [{"role": "user", "content": text}] if chat else text
    if local is not None:
        pieces = _local(local, question, list(stop or ()), options)
    else:
        pieces = _remote(url or _url(spec, run_dir), question, list(stop or ()), options)
    _print(pieces, as_json)


def _url(spec: Path | None, run_dir: Path | None) -> str:
    from kvtool.triton.state import front_url

    return front_url(run_dir_of(spec, run_dir))


def _remote(url: str, prompt: Any, stop: list[str], options: dict[str, Any]) -> Iterator[Any]:
    from kvtool.triton.client import stream

    return stream(url, prompt, stop=stop, **options)


@dataclass(frozen=True)
class _Said:
    """A piece of a local answer, as client.Piece."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    usage: dict[str, Any]


def _local(engine: Path, prompt: Any, stop: list[str], options: dict[str, Any]) -> Iterator[_Said]:
    """In this process: the same engine and the same worker, without servers and pool."""
    from kvtool.serve.local import generate as generate_here
    from kvtool.serve.request import Sampling

    sampling = Sampling(options["temperature"], options["top_k"], options["top_p"], options["seed"])
    given: dict[str, Any] = {"stop": stop, "sampling": sampling, "ignore_eos": options["ignore_eos"]}
    if options["max_tokens"] is not None:
        given["max_tokens"] = options["max_tokens"]
    if options["deadline_ms"] is not None:
        given["deadline_s"] = options["deadline_ms"] / 1e3
    with contextlib.closing(generate_here(engine, prompt, **given)) as pieces:  # type: ignore[type-var]
        for piece in pieces:
            usage: dict[str, Any] = {}
            if piece.usage is not None:
                usage = asdict(piece.usage)
                usage |= {f"{name}_ms": 1e3 * s for name, s in piece.usage.seconds.items() if name in ("ttft", "total")}
            yield _Said(piece.text, piece.tokens, piece.finish.value if piece.finish else "", usage)


def _print(pieces: Iterator[Any], as_json: bool) -> None:
    """`pieces` have text, tokens, finish_reason and usage; closing the iterator cancels the request."""
    text, tokens, last = "", [], None
    with contextlib.closing(pieces) as stream:  # type: ignore[type-var]
        for piece in stream:
            text += piece.text
            tokens.extend(piece.tokens)
            last = piece
            if not as_json:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
    assert last is not None, "a stream has at least its last piece"
    if as_json:
        console.print_json(
            {"text": text, "token_ids": tokens, "finish_reason": last.finish_reason, "usage": dict(last.usage)}
        )
        return
    sys.stdout.write("\n")
    console.err().print(f"[dim]{usage_line(dict(last.usage), last.finish_reason)}[/]")


def usage_line(usage: dict[str, Any], finish: str) -> str:
    hits = sum((usage.get("hit_tokens") or {}).values())
    said = [
        f"{usage.get('prompt_tokens', 0)} prompt tokens ({hits} hit, {usage.get('computed_tokens', 0)} computed)",
        f"{usage.get('completion_tokens', 0)} generated",
    ]
    if "ttft_ms" in usage:
        said.append(f"TTFT {usage['ttft_ms']:.0f} ms")
    if "total_ms" in usage:
        said.append(f"total {usage['total_ms']:.0f} ms")
    return ", ".join([*said, f"finish: {finish}"])

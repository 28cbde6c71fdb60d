"""`kvtool engine`: look at engine directories."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from kvtool.cli.console import done, out, print_json, table
from kvtool.units import show_size

app = typer.Typer(help="Look at engine directories.")

Directory = Annotated[Path, typer.Argument(help="An engine directory, as kvtool build printed it.")]


@app.command()
def show(
    directory: Directory,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
) -> None:
    """Print what an engine is: model, KV layout, digests, files."""
    from kvtool.engine.manifest import read_manifest

    manifest = read_manifest(directory)
    if as_json:
        print_json(manifest.model_dump())
        return
    layout = manifest.layout
    rows = [
        ("name", manifest.name),
        ("target", manifest.target),
        ("architecture", manifest.architecture),
        ("weights", f"{manifest.dtype}; decode {manifest.decode_weights}"),
        ("context", f"{manifest.context_tokens_max} tokens, vocabulary {manifest.vocab_size}"),
        ("KV block", f"{layout}: {show_size(layout.block_size)}"),
        ("KV fingerprint", manifest.kv_fingerprint),
        ("model digest", manifest.model_digest),
        ("EOS, BOS", f"{', '.join(map(str, manifest.eos_token_ids)) or 'none'}; {manifest.bos_token_id}"),
        ("chat template", "yes" if manifest.chat_template else "no"),
        ("built with", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())),
    ]
    out().print(table("", ("what", "value"), rows))
    files = [(name, show_size(size), manifest.digests[name][:16]) for name, size in manifest.files.items()]
    out().print(table("", ("file", "size", "BLAKE3"), files, right=(1,)))


@app.command()
def verify(directory: Directory) -> None:
    """Read every file again and compare it with its digest."""
    from kvtool.engine.build import verify as verify_engine

    began_s = time.monotonic()
    manifest = verify_engine(directory)
    size = sum(manifest.files.values())
    done(f"{manifest.name}: {len(manifest.files)} files whole, {show_size(size)} in {time.monotonic() - began_s:.1f} s")

"""`kvtool engine`: look at engine directories."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtool.cli.console import done, out, print_json, table, warn
from kvtool.units import show_size

if TYPE_CHECKING:
    from kvtool.engine.manifest import Manifest

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
    out().print(table("", ("what", "value"), rows + _trtllm_rows(manifest)))
    files = [(name, show_size(size), manifest.digests[name][:16]) for name, size in manifest.files.items()]
    out().print(table("", ("file", "size", "BLAKE3"), files, right=(1,)))


@app.command()
def verify(directory: Directory) -> None:
    """Read every file again and compare it with its digest; an engine for TensorRT-LLM with what is installed, too."""
    from kvtool.engine.build import verify as verify_engine

    began_s = time.monotonic()
    manifest = verify_engine(directory)
    size = sum(manifest.files.values())
    done(f"{manifest.name}: {len(manifest.files)} files whole, {show_size(size)} in {time.monotonic() - began_s:.1f} s")
    if manifest.tensorrt_llm is not None:
        _compare_with_installed(manifest, directory)


def _compare_with_installed(manifest: Manifest, directory: Path) -> None:
    from kvtool.engine.trtllm.check import check_gpu_arch, check_installed
    from kvtool.engine.trtllm.tools import gpu_arch_here
    from kvtool.engine.trtllm.version import installed

    if installed() is None:
        warn("tensorrt_llm is not installed here: version and GPU were not compared")
        return
    check_installed(manifest, str(directory))
    arch = gpu_arch_here()
    if arch is None:
        warn("no GPU here: its architecture was not compared")
        return
    check_gpu_arch(manifest, str(directory), arch)
    done(f"fits tensorrt_llm {installed()} on {arch}")


def _trtllm_rows(manifest: Manifest) -> list[tuple[str, str]]:
    fields = manifest.tensorrt_llm
    if fields is None:
        return []
    tensorrt = f", TensorRT {fields.tensorrt_version}" if fields.tensorrt_version else ""
    sizes = f"{fields.tensor_parallel}, {fields.pipeline_parallel}, {fields.context_parallel}"
    return [
        ("TensorRT-LLM", f"{fields.version} ({fields.adapter}){tensorrt}, {fields.gpu_arch}"),
        (
            "ranks",
            f"{fields.world_size}: tensor, pipeline, context parallel {sizes}",
        ),
        ("KV dtype", fields.kv_dtype),
        (
            "at most",
            f"{fields.max_seq_len} tokens a sequence; {fields.max_batch_size} sequences and {fields.max_num_tokens} "
            "tokens a step",
        ),
        ("checkpoint", f"{fields.checkpoint.path} ({fields.checkpoint.kind})"),
        ("its digest", f"{fields.checkpoint.digest} over {fields.checkpoint.covers}"),
    ]

"""Building: a checkpoint becomes an engine directory, whole or not at all.

Everything is written to a hidden sibling directory, flushed to disk and renamed, and the manifest is the last file, so
what a reader finds under the engine's name is complete however the build ended. The hidden directory is locked while
its build lives; one without a lock is what a killed build left behind, and the next build removes it.

A target is a `Builder`: it fills the directory and says what it wrote. The rest (finding the checkpoint, refusing to
overwrite, digests, the manifest) is the same for all.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata as packages
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from blake3 import blake3

from kvtool import __version__
from kvtool.engine.manifest import FILE, LayoutFields, Manifest, read_manifest
from kvtool.engine.recipe import recipe_for, recipe_names
from kvtool.errors import CheckpointRefused, EngineRefused
from kvtool.kv.layout import KVLayout

if TYPE_CHECKING:
    from kvtool.engine.checkpoint import Checkpoint

FORMAT = "2"
"""Part of the source digest: raise it when the same input gives another engine."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is (0 when unknown)."""


@dataclass(frozen=True)
class Built:
    """What a builder wrote. `weights`: the files that decide answers, besides config.json."""

    weights: list[str]
    decode_weights: str


class Builder(Protocol):
    """One target's part of a build."""

    target: str

    def check(self, checkpoint: Checkpoint, block_tokens: int) -> None:
        """Refuse what this target cannot serve, before anything is written."""
        ...

    def write(self, checkpoint: Checkpoint, directory: Path, progress: Progress) -> Built:
        """Write every file of the engine but the manifest to `directory`, which is empty."""
        ...


@dataclass(frozen=True)
class BuildResult:
    """`built` is False when the directory already held this very engine."""

    directory: Path
    manifest: Manifest
    built: bool
    seconds: float


TARGETS = ("torch", "tensorrt_llm")


def builder(target: str) -> Builder:
    """The builder for `target`.

    Raises:
        EngineRefused: unknown, or not buildable by this version.
    """
    if target == "torch":
        from kvtool.engine.torch.builder import TorchBuilder

        return TorchBuilder()
    raise EngineRefused(f"--target: wanted one of {', '.join(TARGETS)}, found {target!r}")


def build(
    source: str | Path,
    out: Path | None = None,
    *,
    name: str | None = None,
    target: str | None = None,
    block_tokens: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> BuildResult:
    """Build the engine of `source` (a recipe's name or file, a Hugging Face directory or a GGUF file) in `out`.

    `out` is ./build/<name> when it is None. Building the same inputs again does nothing. `force` replaces another
    engine that is there, in one step.

    Raises:
        CheckpointRefused: the checkpoint cannot become an engine of this target.
        EngineRefused: the target is not buildable here, or `out` is taken.
        Missing: a recipe's package, or a package that the target needs.
    """
    from kvtool.engine.checkpoint import open_checkpoint

    began_s, tell = time.monotonic(), progress or _silent
    recipe = recipe_for(source)
    if recipe is None and not Path(source).exists():
        raise CheckpointRefused(
            f"{source}: wanted a Hugging Face directory, a GGUF file or a recipe ({', '.join(recipe_names())}), "
            "found nothing of that name"
        )
    name = name or (recipe.name if recipe else _name_of(Path(source)))
    target = target or (recipe.target if recipe else "torch")
    block_tokens = block_tokens or (recipe.block_tokens if recipe else 32)
    out = (out or Path("build") / name).absolute()
    if target == "tensorrt_llm":
        raise EngineRefused(
            f"{name}: target tensorrt_llm is built by kvtool.engine.trtllm.build, which needs settings for GPUs: "
            f"kvtool build {source} --target tensorrt_llm"
        )
    made = builder(target)
    path = recipe.source() if recipe else Path(source)
    tell("reading the checkpoint", 0, 0)
    checkpoint = open_checkpoint(path)
    made.check(checkpoint, block_tokens)
    source_digest = checkpoint.digest(FORMAT, target, name, str(block_tokens))
    there = engine_at(out, source_digest, force)
    if there is not None:
        return BuildResult(out, there, built=False, seconds=time.monotonic() - began_s)
    with workplace(out) as directory:
        parts = made.write(checkpoint, directory, tell)
        manifest = _manifest(checkpoint, parts, directory, name, target, block_tokens, source_digest)
        (directory / FILE).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
        tell("flushing to disk", 0, 0)
        flush(directory)
        move(directory, out)
    return BuildResult(out, manifest, built=True, seconds=time.monotonic() - began_s)


def verify(directory: Path) -> Manifest:
    """Read every file of the engine in `directory` and compare its digest with the manifest.

    Raises:
        EngineRefused: no engine, or a file whose bytes changed, by name.
    """
    from kvtool.engine.checkpoint import file_digest

    manifest = read_manifest(directory)
    for name, wanted in manifest.digests.items():
        found = file_digest(directory / name).hex()
        if found != wanted:
            raise EngineRefused(
                f"{directory / name}: wanted BLAKE3 {wanted[:16]}…, found {found[:16]}…; the file was changed or is "
                "damaged, build the engine again with --force"
            )
    return manifest


def _silent(what: str, done: int, total: int) -> None:
    pass


def _name_of(path: Path) -> str:
    stem = path.resolve().stem if path.is_file() else path.resolve().name
    return re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-.") or "engine"


def engine_at(out: Path, source_digest: str, force: bool) -> Manifest | None:
    """The engine of these very inputs if `out` holds it; None if `out` may be written.

    Raises:
        EngineRefused: `out` holds something else.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not (out / FILE).is_file():
        raise EngineRefused(
            f"{out}: wanted an engine directory or nothing there, found other files; choose another --out"
        )
    try:
        there = read_manifest(out)
    except EngineRefused:
        if force:
            return None
        raise
    if there.source_digest == source_digest:
        return there
    if not force:
        raise EngineRefused(
            f"{out}: holds another engine ({there.name}, {there.target}, model {there.model_digest[:12]}); "
            "choose another --out, or replace it with --force"
        )
    return None


def _manifest(
    checkpoint: Checkpoint, parts: Built, directory: Path, name: str, target: str, block_tokens: int, source: str
) -> Manifest:
    from kvtool.engine.checkpoint import file_digest

    family = checkpoint.family
    layout = KVLayout(family.layers, family.kv_heads, family.head_dim, block_tokens)
    files = sorted(path.name for path in directory.iterdir())
    digests = {file: file_digest(directory / file).hex() for file in files}
    model = blake3(b"kvtool model 1\0")
    for file in sorted([*parts.weights, "config.json"]):
        model.update(f"{file} {digests[file]}\n".encode())
    template = (directory / "chat_template.jinja").is_file()
    settings = directory / "tokenizer_config.json"
    return Manifest(
        name=name,
        target=target,
        architecture=family.architecture,
        dtype="bfloat16",
        decode_weights=parts.decode_weights,
        kv=LayoutFields(
            layers=layout.layers,
            kv_heads=layout.kv_heads,
            head_dim=layout.head_dim,
            block_tokens=block_tokens,
            dtype=layout.dtype,
        ),
        kv_fingerprint=layout.fingerprint,
        model_digest=model.hexdigest(),
        source_digest=source,
        vocab_size=family.vocab,
        context_tokens_max=family.context,
        eos_token_ids=checkpoint.eos_token_ids,
        bos_token_id=checkpoint.bos_token_id,
        chat_template=template or (settings.is_file() and b'"chat_template"' in settings.read_bytes()),
        versions={"kvtool": __version__, **{p: packages.version(p) for p in ("torch", "safetensors", "tokenizers")}},
        files={file: (directory / file).stat().st_size for file in files},
        digests=digests,
    )


@contextmanager
def workplace(out: Path) -> Iterator[Path]:
    """A locked, hidden, empty directory beside `out`; gone afterwards unless it was moved away.

    Raises:
        EngineRefused: another process builds the same engine right now.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{out.name}.building-"
    parent = os.open(out.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(parent, fcntl.LOCK_EX)  # held for moments: while leftovers are told from live builds
        for old in out.parent.glob(f"{prefix}*"):
            _remove_leftover(old, out)
        directory = Path(tempfile.mkdtemp(prefix=prefix, dir=out.parent))
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    finally:
        os.close(parent)
    try:
        directory.chmod(0o755)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _remove_leftover(old: Path, out: Path) -> None:
    descriptor = os.open(old, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise EngineRefused(
            f"{out}: another process builds this engine right now; wait for it, then try again"
        ) from None
    finally:
        os.close(descriptor)
    shutil.rmtree(old)


def flush(directory: Path) -> None:
    for path in [*directory.iterdir(), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def move(directory: Path, out: Path) -> None:
    """Put `directory` in the place of `out` in one step; what was there ends under the hidden name, and is removed."""
    if out.exists() and not _exchange(directory, out):
        shutil.rmtree(out)  # a file system without RENAME_EXCHANGE: a moment without an engine
    if directory.exists() and not out.exists():
        directory.rename(out)
    descriptor = os.open(out.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> bool:
    """renameat2(2) with RENAME_EXCHANGE; False where the system has none."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    at_cwd, exchange = -100, 2
    return rename is not None and rename(at_cwd, bytes(one), at_cwd, bytes(other), exchange) == 0

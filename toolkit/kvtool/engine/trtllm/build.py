"""`kvtool build --target tensorrt_llm`: a plan of files and commands, printed or carried out whole or not at all.

PyTorch backend: nothing is compiled, the plan is a bundle (bundle.py), and needs neither a GPU nor tensorrt_llm.
TensorRT engines: the plan converts the checkpoint and runs trtllm-build, in a scratch folder inside the hidden
workplace; the engine is then compared with what was asked for, since TensorRT-LLM ignores what it does not know.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvtool import __version__
from kvtool.engine.build import BuildResult, Progress, engine_at, flush, move, workplace
from kvtool.engine.manifest import FILE, CheckpointReference, Manifest, TensorRTLLMFields
from kvtool.engine.trtllm import files as written
from kvtool.engine.trtllm.bundle import CONNECTOR_FILE, LLM_FILE
from kvtool.engine.trtllm.commands import EXAMPLES, EXAMPLES_ENV, Command, commands
from kvtool.engine.trtllm.digest import kv_scales
from kvtool.engine.trtllm.gpus import gpu
from kvtool.engine.trtllm.llm import clean_environment
from kvtool.engine.trtllm.request import UNKNOWN_DIGEST, Request
from kvtool.engine.trtllm.run import Log, run
from kvtool.engine.trtllm.source import kind_of, read_table, special_ids
from kvtool.engine.trtllm.tools import check_tools
from kvtool.engine.trtllm.version import tensorrt_installed
from kvtool.errors import BuildFailed, CheckpointRefused, Missing

FORMAT = "trtllm-1"
SCRATCH = ".scratch"


@dataclass(frozen=True)
class Plan:
    """What a build does, with `directory` standing for the place that it works in. `texts`: file -> content."""

    request: Request
    directory: Path
    texts: dict[str, str]
    copies: dict[str, bytes]
    commands: list[Command]
    environment: dict[str, str]
    """What commands have beside this process's own, without its MPI job."""


def plan(request: Request, directory: Path) -> Plan:
    """Every file and command of the build of `request`. Nothing is started or written.

    Raises:
        EngineRefused: a keyword or flag that the version does not take.
    """
    source, settings = request.source, request.settings
    if not request.able.engine_build:
        texts = {
            LLM_FILE: written.llm_yaml(source, settings, request.block_tokens, request.version),
            CONNECTOR_FILE: written.connector_yaml(
                source,
                settings,
                written.layout_of(source, settings, request.block_tokens),
                model_digest(request),
                rounding(request),
                request.stored_parallel,
            ),
        }
        if source.config is not None:
            texts["config.json"] = written.as_json(source.config)
        return Plan(request, directory, texts, source.files, [], {})
    config = written.build_config(source, settings, request.block_tokens, request.version)
    scratch = directory / SCRATCH
    steps = commands(
        source,
        settings,
        config["plugin_config"],
        request.version,
        config=directory / written.BUILD_FILE,
        converted=scratch / "checkpoint",
        engine=directory,
        examples=Path(os.environ.get(EXAMPLES_ENV, EXAMPLES)),
    )
    environment = {"LD_PRELOAD": ":".join(settings.plugins)} if settings.plugins else {}
    texts = {} if source.kind == "engine" else {written.BUILD_FILE: written.as_json(config)}
    return Plan(request, directory, texts, source.files, steps, environment)


def model_digest(request: Request, scales: str = "") -> str:
    """Equal for engines whose KV is the same, however they are split over ranks: prefill and decode share blocks.
    `scales`: of KV that this very build quantised; those of a checkpoint are in its digest."""
    if request.digest == UNKNOWN_DIGEST:
        return UNKNOWN_DIGEST
    whole = blake3(b"kvtool trtllm model 1\0")
    for text in (request.digest, request.settings.quantisation, request.source.dtype, *([scales] if scales else [])):
        whole.update(f"{text}\0".encode())
    return whole.hexdigest()


def rounding(request: Request) -> str:
    return written.numerics(request.able.adapter, gpu(request.settings.gpu).arch, request.settings)


def source_digest(request: Request) -> str:
    """Over everything that decides the files; a second build of the same is recognised by it."""
    if request.digest == UNKNOWN_DIGEST:
        return UNKNOWN_DIGEST
    whole = blake3(f"kvtool {FORMAT}\0".encode())
    settings = request.settings.model_dump_json()
    for text in (request.digest, request.name, settings, request.version, request.block_tokens, request.source.name):
        whole.update(f"{text}\0".encode())
    whole.update(str(request.stored_parallel).encode())
    return whole.hexdigest()


def build(
    request: Request, out: Path, *, force: bool = False, progress: Progress | None = None, log: Log | None = None
) -> BuildResult:
    """Carry out the plan of `request` in `out`, whole or not at all. Building the same again does nothing.

    `log` gets the lines of the commands. A killed build leaves a hidden directory, which the next one removes.

    Raises:
        EngineRefused: `out` is taken, or TensorRT-LLM cannot build here.
        BuildFailed: a command failed, or the engine is not what was asked for.
        Missing: the checkpoint, or a script of TensorRT-LLM, is not on this machine.
    """
    began_s, tell, say = time.monotonic(), progress or _silent, log or _mute
    if request.source.path is None:
        raise Missing(f"{request.source.name}: the checkpoint is not on this machine; name it with --checkpoint")
    if request.able.engine_build and request.source.kind != "engine":
        check_tools(request, plan(request, out).commands)
    identity = source_digest(request)
    there = engine_at(out, identity, force)
    if there is not None:
        return BuildResult(out, there, built=False, seconds=time.monotonic() - began_s)
    with workplace(out) as directory:
        todo = plan(request, directory)
        for name, text in todo.texts.items():
            (directory / name).write_text(text, encoding="utf-8")
        for name, raw in todo.copies.items():
            (directory / name).write_bytes(raw)
        scales = _make_engine(todo, tell, say) if request.able.engine_build else ""
        manifest = manifest_of(todo, identity, scales)
        (directory / FILE).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
        tell("flushing to disk", 0, 0)
        flush(directory)
        move(directory, out)
    return BuildResult(out, manifest, built=True, seconds=time.monotonic() - began_s)


def check_engine(directory: Path, request: Request) -> None:
    """Compare the engine in `directory` with what was asked for.

    Raises:
        BuildFailed: config.json cannot be read or says something else, or a rank's engine is missing.
    """
    path = directory / "config.json"
    try:
        config = read_table(path)
    except CheckpointRefused as error:
        raise BuildFailed(f"trtllm-build made no engine: {error}") from None
    if kind_of(config) != "engine":
        raise BuildFailed(f"{path}: wanted pretrained_config and build_config, found {', '.join(sorted(config))}")
    settings = request.settings
    mapping = config["pretrained_config"].get("mapping") or {}
    built, plugins = config["build_config"], config["build_config"].get("plugin_config") or {}
    wanted: dict[str, tuple[Any, Any]] = {
        "version": (request.version, config.get("version")),
        "mapping.tp_size": (settings.tensor_parallel, mapping.get("tp_size", 1)),
        "mapping.pp_size": (settings.pipeline_parallel, mapping.get("pp_size", 1)),
        "mapping.cp_size": (settings.context_parallel, mapping.get("cp_size", 1)),
        "build_config.max_batch_size": (settings.max_batch_size, built.get("max_batch_size")),
        "build_config.max_num_tokens": (settings.max_num_tokens, built.get("max_num_tokens")),
        "build_config.max_seq_len": (settings.max_seq_len, built.get("max_seq_len")),
        "plugin_config.tokens_per_block": (request.block_tokens, plugins.get("tokens_per_block")),
        "plugin_config.use_paged_context_fmha": (True, plugins.get("use_paged_context_fmha")),
    }
    for key, (asked, found) in wanted.items():
        if asked != found:
            raise BuildFailed(f"{path}: {key}: asked for {asked!r}, the engine has {found!r}; it was not kept")
    for rank in range(settings.world_size):
        engine = directory / f"rank{rank}.engine"
        if not engine.is_file() or not engine.stat().st_size:
            raise BuildFailed(f"{engine}: missing or empty; the engine of {settings.world_size} ranks was not kept")


def manifest_of(todo: Plan, identity: str, scales: str = "") -> Manifest:
    """The manifest over the files that are in the plan's directory."""
    from kvtool.engine.checkpoint import file_digest

    request, directory = todo.request, todo.directory
    names = sorted(path.name for path in directory.iterdir())
    return describe(
        request,
        identity,
        files={name: (directory / name).stat().st_size for name in names},
        digests={name: file_digest(directory / name).hex() for name in names},
        scales=scales,
    )


def describe(
    request: Request, identity: str, files: dict[str, int], digests: dict[str, str], scales: str = ""
) -> Manifest:
    source, settings = request.source, request.settings
    layout = written.layout_of(source, settings, request.block_tokens)
    eos, bos = special_ids(source)
    engine = request.able.engine_build
    experts = settings.expert_parallel if source.facts.experts is not None else None
    return Manifest(
        name=request.name,
        target="tensorrt_llm",
        architecture=source.facts.architecture,
        dtype=source.dtype,
        decode_weights=source.dtype if settings.quantisation == "none" else settings.quantisation,
        kv=written.layout_fields(layout),
        kv_fingerprint=layout.fingerprint,
        model_digest=model_digest(request, scales),
        source_digest=identity,
        vocab_size=source.facts.vocab,
        context_tokens_max=settings.max_seq_len,
        eos_token_ids=eos,
        bos_token_id=bos,
        chat_template="chat_template.jinja" in source.files
        or b'"chat_template"' in source.files.get("tokenizer_config.json", b""),
        plugins=list(settings.plugins),
        versions={"kvtool": __version__, "tensorrt_llm": request.version},
        files=files,
        digests=digests,
        tensorrt_llm=TensorRTLLMFields(
            adapter=request.able.adapter.value,
            version=request.version,
            tensorrt_version=(tensorrt_installed() or request.able.tensorrt) if engine else None,
            gpu_arch=gpu(settings.gpu).arch,
            tensor_parallel=settings.tensor_parallel,
            pipeline_parallel=settings.pipeline_parallel,
            context_parallel=settings.context_parallel,
            moe_tensor_parallel=settings.tensor_parallel // experts if experts else None,
            moe_expert_parallel=experts,
            kv_dtype=written.kv_word(settings),
            quantisation=None if settings.quantisation == "none" else settings.quantisation,
            checkpoint=CheckpointReference(
                path=source.name, kind=source.kind, digest=request.digest, covers=request.covers
            ),
            max_batch_size=settings.max_batch_size,
            max_num_tokens=settings.max_num_tokens,
            max_seq_len=settings.max_seq_len,
            block_reuse=settings.block_reuse,
        ),
    )


def _make_engine(todo: Plan, tell: Progress, say: Log) -> str:
    """Run the commands and check what they made. Returns the digest of KV scales that a conversion found, or ""."""
    request, directory = todo.request, todo.directory
    scratch = directory / SCRATCH
    (scratch / "checkpoint").mkdir(parents=True)
    environment = dict(os.environ)
    clean_environment(environment)
    environment |= todo.environment
    for command in todo.commands:
        tell(command.title, 0, command.ranks)
        run(command, environment, scratch, say, _counting(tell, command))
    if request.source.kind == "engine":
        assert request.source.path is not None
        _copy_engine(request.source.path, directory, tell)
    scales = _scales(request, scratch / "checkpoint")
    shutil.rmtree(scratch)
    check_engine(directory, request)
    folders = [path.name for path in directory.iterdir() if path.is_dir()]
    if folders:
        raise BuildFailed(f"trtllm-build left a folder that kvtool does not know, {folders[0]}; nothing was kept")
    return scales


def _scales(request: Request, converted: Path) -> str:
    if request.source.kind == "engine" or request.settings.kv_dtype == request.source.dtype:
        return ""
    checkpoint = request.source.path if request.source.kind == "trtllm" else converted
    assert checkpoint is not None
    return kv_scales(checkpoint, request.settings.tensor_parallel * request.settings.context_parallel)


def _counting(tell: Progress, command: Command) -> Callable[[int], None]:
    return lambda done: tell(command.title, done, command.ranks)


def _copy_engine(path: Path, directory: Path, tell: Progress) -> None:
    names = ["config.json", *sorted(p.name for p in path.glob("rank*")), "quant_cfg.json"]
    there = [path / name for name in names if (path / name).is_file()]
    done, total = 0, sum(file.stat().st_size for file in there)
    for file in there:
        shutil.copyfile(file, directory / file.name)
        done += file.stat().st_size
        tell("copying the engine", done, total)


def _silent(what: str, done: int, total: int) -> None:
    pass


def _mute(line: str) -> None:
    pass

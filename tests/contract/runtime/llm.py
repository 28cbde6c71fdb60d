"""`LLM`: recorded arguments, checked; behind it one executor in a thread, with the connector that they name."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import ranks
from .executor import Commands, Executor, Setup
from .model import DTYPE_SIZE, Model
from .params import SamplingParams
from .request import WORDS, FinishReason, Given, State
from .result import RequestOutput
from .schema import RELEASE, record_of, recorded
from .transceiver import Offers, pull

IDLE_S, END_S = 0.02, 30.0


def _signature(method: str) -> inspect.Signature:
    """As recorded, so that a keyword of another version is refused by name."""
    record = next(entry for entry in record_of("LLM")["methods"] if entry["name"] == method)
    kinds = {
        "positional_or_keyword": inspect.Parameter.POSITIONAL_OR_KEYWORD,
        "var_keyword": inspect.Parameter.VAR_KEYWORD,
    }
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for entry in record["params"]:
        kind = kinds[entry["kind"]]
        default = (
            entry["default"]
            if "default" in entry and kind is not inspect.Parameter.VAR_KEYWORD
            else inspect.Parameter.empty
        )
        parameters.append(inspect.Parameter(entry["name"], kind, default=default))
    return inspect.Signature(parameters)


def model_of(directory: Path, args: Any) -> Model:
    """From config.json of a checkpoint (or of what engine.json says beside it)."""
    config: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if not config:
        raise ValueError(f"{directory}: no config.json of a model here")
    config = config.get("text_config", config)
    heads = config.get("num_attention_heads", 4)
    dtype = args.kv_cache_config.dtype
    dtype = {"auto": config.get("torch_dtype") or config.get("dtype") or "bfloat16", "fp8": "float8_e4m3fn"}.get(
        dtype, dtype
    )
    mla = config.get("kv_lora_rank")
    wide = mla + config["qk_rope_head_dim"] if mla else config.get("head_dim") or config["hidden_size"] // heads
    return Model(
        layers=config["num_hidden_layers"],
        kv_heads=1 if mla else config.get("num_key_value_heads", heads),
        head_dim=wide,
        block_tokens=args.kv_cache_config.tokens_per_block,
        dtype=dtype if dtype in DTYPE_SIZE else "bfloat16",
        kv_factor=1 if mla else 2,
        vocab_size=config.get("vocab_size", 997),
        name=str(config.get("_name_or_path") or config.get("model_type") or "fake"),
    )


class LLM:
    """See `generate_async`; the keywords of every method are those recorded for this version."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = _signature("__init__").bind(self, *args, **kwargs)
        given = {name: value for name, value in bound.arguments.items() if name not in ("self", "kwargs")}
        more = dict(bound.arguments.get("kwargs", {}))
        if more.get("backend", "pytorch") != "pytorch":
            raise ValueError(f"backend {more['backend']!r}: this class is the PyTorch backend's")
        self.args = recorded("TorchLlmArgs")(**given, **more)
        self._refuse()
        self._model = model_of(Path(str(self.args.model)), self.args)
        self.llm_id = f"fake-{id(self):x}"
        self._tokenizer = _tokenizer(self.args)
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._next, self._stopping = 1, False
        self._submitted: list[Given] = []
        self._cancelled: list[int] = []
        self._results: dict[int, RequestOutput] = {}
        self._handed: dict[int, Any] = {}
        self.failure: BaseException | None = None
        self._offers = self._transceiver()
        self._begin()

    def _refuse(self) -> None:
        args = self.args
        if args.pipeline_parallel_size * args.context_parallel_size > 1:
            raise NotImplementedError("the fake has tensor parallel ranks only")
        config = args.kv_cache_config
        if config.tokens_per_block < 2 or config.tokens_per_block & (config.tokens_per_block - 1):
            raise ValueError(f"tokens_per_block must be a power of two above 1, got {config.tokens_per_block}")
        transceiver = args.cache_transceiver_config
        both = transceiver is not None and transceiver.backend is not None and args.kv_connector_config is not None
        if both and RELEASE < (1, 3):
            raise NotImplementedError("KV Cache Connector is not supported with the cache transceiver")

    def _transceiver(self) -> Offers | None:
        config = self.args.cache_transceiver_config
        if config is None or config.backend is None:
            return None
        timeout_ms = config.kv_transfer_timeout_ms or 60_000
        return Offers(self._facts(), timeout_ms / 1000)

    def _facts(self) -> dict[str, Any]:
        model, config = self._model, self.args.cache_transceiver_config
        names = ("layers", "kv_heads", "head_dim", "block_tokens", "dtype", "kv_factor", "name")
        facts = {name: getattr(model, name) for name in names}
        return {**facts, "backend": config.backend, "max_tokens_in_buffer": config.max_tokens_in_buffer}

    # the executor's threads

    def _begin(self) -> None:
        size, args = self.args.tensor_parallel_size, self.args
        setup = Setup(
            self._model,
            v2=args.kv_cache_config.use_kv_cache_manager_v2 is True,
            pages=self._page_count(),
            batch=min(args.max_batch_size or 16, 16),
            chunk=args.max_num_tokens if args.enable_chunked_prefill else None,
            graphs=args.cuda_graph_config is not None,
            overlap=not args.disable_overlap_scheduler,
            keep=1.0 if args.kv_cache_config.enable_block_reuse else 0.0,
        )
        every = ranks.threaded(size) if size > 1 else [ranks.alone()]
        ready = threading.Barrier(size + 1, timeout=120)
        self._threads = [
            threading.Thread(target=self._rank, args=(setup, rank, ready), daemon=True, name=f"fake-rank-{rank.rank}")
            for rank in every
        ]
        for thread in self._threads:
            thread.start()
        with contextlib.suppress(threading.BrokenBarrierError):
            ready.wait()
        if self.failure is not None:
            raise self.failure

    def _page_count(self) -> int:
        config = self.args.kv_cache_config
        tokens = config.max_tokens or 16 * (self.args.max_seq_len or 2048)
        return int(min(max(tokens // config.tokens_per_block, 8), 4096))

    def _connector(self) -> tuple[Any, Any] | None:
        config = self.args.kv_connector_config
        if config is None:
            return None
        module = importlib.import_module(config.connector_module)
        return getattr(module, config.connector_worker_class), getattr(module, config.connector_scheduler_class)

    def _rank(self, setup: Setup, rank: ranks.Rank, ready: threading.Barrier) -> None:
        executor = None
        try:
            hooks = {"on_token": self._token, "on_done": self._done} if rank.rank == 0 else {}
            source = self._commands
            executor = Executor(setup, source, rank=rank, connector=self._connector(), llm_args=self.args, **hooks)
            if rank.rank == 0:
                self._executor = executor
            ready.wait()
            executor.run()
        except BaseException as error:
            self.failure = self.failure or error
            ready.abort()
            self._fail(error)
        finally:
            if executor is not None:
                executor.close()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            results, self._results = self._results, {}
        for result in results.values():
            result._end(None, error=RuntimeError(f"the executor stopped: {error}"))

    def _commands(self, executor: Executor) -> Commands:
        if not (executor.active or executor.waiting or executor.held or executor.previous or self._stopping):
            self._wake.wait(IDLE_S)
        with self._lock:
            submit, self._submitted = self._submitted, []
            cancel, self._cancelled = self._cancelled, []
            self._wake.clear()
        return Commands(tuple(submit), tuple(cancel), stop=self._stopping)

    def _token(self, state: State, token: int) -> None:
        result = self._results.get(state.request_id)
        if result is None:
            return
        result._push(token)
        if state.given.kind == "context_only":
            assert self._offers is not None
            opaque = self._offers.offer(state.request_id, self._executor.packed(state))
            params = recorded("DisaggregatedParams")
            self._handed[state.request_id] = params(
                request_type="context_only",
                first_gen_tokens=[token],
                ctx_request_id=state.request_id,
                opaque_state=opaque,
                draft_tokens=None,
            )

    def _done(self, state: State) -> None:
        self._executor.known.pop(state.request_id, None)
        with self._lock:
            result = self._results.pop(state.request_id, None)
        if result is not None:
            result.cached_tokens = state.cached_blocks * self._model.block_tokens
            reason = WORDS[state.finished]
            if state.given.more and state.finished is FinishReason.LENGTH:
                reason = "not_finished"
            result._end(reason, self._handed.pop(state.request_id, None))

    # requests

    def generate_async(self, *args: Any, **kwargs: Any) -> RequestOutput:
        bound = _signature("generate_async").bind(self, *args, **kwargs)
        bound.apply_defaults()
        asked = dict(bound.arguments)
        sampling = asked["sampling_params"] or SamplingParams()
        tokens = self._tokens(asked["inputs"])
        result_id = self._claim()
        given = self._given(result_id, tokens, sampling, asked)
        result = RequestOutput(result_id, asked["inputs"], tokens, bool(asked["streaming"]), self._abort)
        with self._lock:
            if self.failure is not None:
                raise RuntimeError(f"the executor stopped: {self.failure}")
            if self._stopping:
                raise RuntimeError("this LLM is shut down")
            self._results[result_id] = result
            self._submitted.append(given)
            self._wake.set()
        return result

    def _claim(self) -> int:
        with self._lock:
            self._next += 1
            return self._next - 1

    def _given(self, request_id: int, tokens: list[int], sampling: Any, asked: dict[str, Any]) -> Given:
        params = asked["disaggregated_params"]
        kind = (params.request_type if params is not None else None) or "context_and_generation"
        if kind not in ("context_only", "generation_only", "context_and_generation"):
            raise ValueError(f"request_type {kind!r} is unknown")
        first: tuple[int, ...] = ()
        handed: bytes | None = None
        if kind != "context_and_generation" and self._offers is None:
            raise ValueError("disaggregated requests need cache_transceiver_config with a backend")
        if kind == "generation_only":
            if not params.first_gen_tokens or params.opaque_state is None or params.ctx_request_id is None:
                raise ValueError("a generation_only request needs first_gen_tokens, ctx_request_id and opaque_state")
            first = tuple(params.first_gen_tokens)
            timeout_ms = self.args.cache_transceiver_config.kv_transfer_timeout_ms or 60_000
            handed = pull(bytes(params.opaque_state), self._facts(), timeout_ms / 1000)
        limit = self.args.max_seq_len
        if limit is not None and len(tokens) + 1 > limit:
            raise ValueError(f"the prompt has {len(tokens)} tokens, max_seq_len is {limit}")
        most = sampling.max_tokens if limit is None else min(sampling.max_tokens, limit - len(tokens))
        end = None if sampling.ignore_eos else sampling.end_id
        lora = asked["lora_request"]
        salt, retention = asked["cache_salt"], asked["kv_cache_retention_config"]
        if salt == "":
            raise ValueError("cache_salt must not be empty")
        return Given(
            request_id, tokens, 1 if kind == "context_only" else most, end, salt, lora.adapter_id if lora else None,
            retention=retention, kind=kind, first_tokens=first, more=kind == "context_only" and most > 1, handed=handed,
        )  # fmt: skip

    def _tokens(self, inputs: Any) -> list[int]:
        if isinstance(inputs, dict):
            inputs = inputs.get("prompt_token_ids", inputs.get("prompt"))
        if isinstance(inputs, str):
            if self._tokenizer is None:
                raise ValueError("a text prompt needs a tokenizer, and this LLM has skip_tokenizer_init")
            return list(self._tokenizer.encode(inputs).ids)
        tokens = [int(token) for token in inputs]
        if not tokens:
            raise ValueError("the prompt has no tokens")
        return tokens

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        bound = _signature("generate").bind(self, *args, **kwargs)
        bound.apply_defaults()
        asked = dict(bound.arguments)
        inputs = asked["inputs"]
        many = (
            isinstance(inputs, Sequence) and not isinstance(inputs, str) and not (inputs and isinstance(inputs[0], int))
        )
        names = ["sampling_params", "lora_request", "kv_cache_retention_config", "disaggregated_params", "cache_salt"]

        def of(name: str, at: int) -> Any:
            return asked[name][at] if many and isinstance(asked[name], (list, tuple)) else asked[name]

        started = [
            self.generate_async(one, **{name: of(name, at) for name in names})
            for at, one in enumerate(inputs if many else [inputs])
        ]
        ended = [result.result(300) for result in started]
        return ended if many else ended[0]

    def _abort(self, request_id: int) -> None:
        with self._lock:
            self._cancelled.append(request_id)
            self._wake.set()

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    def get_kv_cache_events(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        return []

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        return [
            {"iter": self._executor.iterations, "numActiveRequests": len(self._executor.active), **self._executor.stats}
        ]

    def shutdown(self) -> None:
        with self._lock:
            self._stopping = True
            self._cancelled.extend(self._results)
            self._wake.set()
        for thread in self._threads:
            thread.join(END_S)
        if self._offers is not None:
            self._offers.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: Any) -> None:
        self.shutdown()


def _tokenizer(args: Any) -> Any:
    if args.skip_tokenizer_init:
        return None
    path = Path(str(args.tokenizer or args.model)) / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{path}: no tokenizer here; give one, or skip_tokenizer_init=True")
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))

"""Every keyword and flag that kvtool passes is in the recorded signature of that version: found in what is really
written and run, recipe by recipe and version by version, and not by asking the code that checks it."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from trtllm_samples import asked, checkpoint, request

from kvtool.engine.recipe import find_recipe, recipe_names
from kvtool.engine.sampling import Sampling
from kvtool.engine.trtllm import files, signatures
from kvtool.engine.trtllm.build import Plan, plan
from kvtool.engine.trtllm.request import prepare, roles_of
from kvtool.engine.trtllm.version import KNOWN, can
from kvtool.errors import EngineRefused
from kvtool.serve.request import Request as ServeRequest
from kvtool.serve.trtllm_terms import context_keywords, generation_keywords, sampling_keywords

RECIPES = [name for name in recipe_names() if (found := find_recipe(name)) and found.target == "tensorrt_llm"]
NESTED = {"kv_cache_config": "KvCacheConfig", "plugin_config": "PluginConfig"}


def recorded(name: str, version: str) -> set[str]:
    """Keywords of a class in a version, read from the record by plain means: what `since` and `removed` say in full."""
    table = signatures.api()
    entry = table[name]
    names = recorded(entry["base"], version) if "base" in entry else set()
    if name == "LLM":
        names = {p["name"] for p in entry["methods"][0]["params"]} | recorded("TorchLlmArgs", version)
    late = version.startswith(("1.3", "1.4"))
    for one in [*entry.get("fields", ()), *entry.get("added_later", ()), *entry.get("changed_later", ())]:
        if ("since" not in one or late or one["since"] == "1.2") and not ("removed" in one and not version < "1.2"):
            names.add(one["name"])
    return names


def assert_known(table: dict[str, Any], name: str, version: str) -> int:
    unknown = set(table) - recorded(name, version)
    assert not unknown, f"{name} of {version} has no {unknown}"
    count = len(table)
    for key, inner in NESTED.items():
        if isinstance(table.get(key), dict):
            count += assert_known(table[key], inner, version)
    return count


def check(todo: Plan) -> int:
    version, count = todo.request.version, 0
    for name, text in todo.texts.items():
        if name == "llm.yaml":
            count += assert_known(yaml.safe_load(text), "LLM", version)
        if name == files.BUILD_FILE:
            count += assert_known(json.loads(text), "BuildConfig", version)
    for command in todo.commands:
        title = Path(command.argv[1]).name if command.argv[0] == "python3" else command.argv[0]
        listed = [flags for name, flags in signatures.api()["cli"].items() if name.startswith(title)]
        flags = {word for word in command.argv if word.startswith("--")}
        assert any(flags <= set(one) for one in listed), f"{title}: {flags}"
        count += len(flags)
    return count


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_pass_only_what_is_recorded(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for role in roles_of(asked(name, version=None)):
        assert check(plan(prepare(asked(name, version=None), role, rehearse=True), Path("/out"))) > 15


@pytest.mark.parametrize("version", KNOWN)
def test_versions_get_only_what_is_recorded(tmp_path: Path, version: str) -> None:
    for family in ("LlamaForCausalLM", "Qwen3ForCausalLM", "MixtralForCausalLM", "DeepseekV3ForCausalLM"):
        source = checkpoint(tmp_path / family, family, hidden_size=128, intermediate_size=256)
        assert check(plan(request(source, "kv_dtype=fp8", version=version), Path("/out"))) > 15
        for changes in ((), ("quantisation=fp8", "kv_dtype=fp8"), ("quantisation=w4a16_awq",), ("kv_dtype=int8",)):
            try:
                wanted = request(source, "backend=tensorrt", *changes, version=version)
            except EngineRefused as refusal:
                assert "removed in 1.3" in str(refusal) or family == "DeepseekV3ForCausalLM"
                continue
            assert check(plan(wanted, Path("/out"))) > 75, "BuildConfig and PluginConfig are not spelled out"


def test_engine_configuration_is_spelled_out(tmp_path: Path) -> None:
    """Every recorded field of both is written, but those that JSON cannot carry."""
    todo = plan(request(checkpoint(tmp_path / "m"), "backend=tensorrt"), Path("/out"))
    table = json.loads(todo.texts[files.BUILD_FILE])
    assert recorded("BuildConfig", "1.2.1") - set(table) == {"speculative_decoding_mode", "lora_config"}
    assert recorded("PluginConfig", "1.2.1") == set(table["plugin_config"])


def test_unknown_keyword_fails_this_test_and_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    todo = plan(request(checkpoint(tmp_path / "m")), Path("/out"))
    with pytest.raises(AssertionError, match=r"has no .'enable_block_reusage'"):
        assert_known({"kv_cache_config": {"enable_block_reusage": True}}, "LLM", "1.2.1")
    assert check(todo)
    monkeypatch.setattr(files, "kv_word", lambda settings: 8)
    with pytest.raises(EngineRefused, match=r"llm\.yaml: kv_cache_config: dtype: wanted str, found 8"):
        plan(request(tmp_path / "m"), Path("/out"))


def test_flags_of_plugins_say_what_the_file_says(tmp_path: Path) -> None:
    todo = plan(request(checkpoint(tmp_path / "m"), "backend=tensorrt", "tensor_parallel=2"), Path("/out"))
    argv = todo.commands[-1].argv
    given = dict(zip(argv[1::2], argv[2::2], strict=True))
    plugins = json.loads(todo.texts[files.BUILD_FILE])["plugin_config"]
    words = {True: "enable", False: "disable", None: "disable"}
    spelled = {key: value for key, value in plugins.items() if f"--{key}" in given}
    assert len(spelled) == 28 and "use_paged_context_fmha" in spelled and "tokens_per_block" in spelled
    for key, value in spelled.items():
        wanted = words[value] if isinstance(value, bool) or value is None else str(value)
        assert given[f"--{key}"] == wanted, key
    assert can("1.2.1", "tensorrt").engine_build and given["--workers"] == "2"


@pytest.mark.parametrize("version", KNOWN)
def test_requests_pass_only_what_is_recorded(version: str) -> None:
    for sampling in (Sampling(), Sampling(temperature=0.7, top_p=0.9, top_k=4, seed=3)):
        for ignore in (True, False):
            asked_for = ServeRequest("r", (1, 2), 4, sampling, ignore_eos=ignore)
            assert_known(sampling_keywords(asked_for, 4, [1, 2]), "SamplingParams", version)
    own_ids = version.startswith(("1.3", "1.4"))  # as the door to LLM has it
    assert_known(context_keywords(own_ids), "DisaggregatedParams", version)
    state = {"first_gen_tokens": [1], "ctx_request_id": 3, "opaque_state": "AAE=", "draft_tokens": []}
    assert_known(generation_keywords(state), "DisaggregatedParams", version)


def test_calls_of_tensorrt_llm_in_the_code_name_only_what_is_recorded() -> None:
    """Read from the source: a keyword of a call to one of its classes, or to a method of LLM, in any file."""
    root, found = Path(__file__).parents[3], set[str]()
    methods = {one["name"] for one in signatures.api()["LLM"]["methods"]} - {"__init__"}
    for path in [*root.glob("toolkit/**/*.py"), *root.glob("plugins/**/*.py"), *root.glob("triton_models/**/*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tensorrt_llm")
            for alias in node.names
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            given = {keyword.arg for keyword in node.keywords if keyword.arg}
            if isinstance(node.func, ast.Name) and node.func.id in imported:
                found.add(node.func.id)
                assert given <= recorded(node.func.id, "1.2.1"), f"{path}: {node.func.id}({given})"
            if imported and isinstance(node.func, ast.Attribute) and node.func.attr in methods:
                found.add(node.func.attr)
                known = signatures.parameters("LLM", node.func.attr, "1.2.1")
                assert given <= set(known), f"{path}: {node.func.attr}({given})"
    assert {"LLM", "SamplingParams", "DisaggregatedParams", "generate_async"} <= found

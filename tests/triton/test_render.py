"""Rendered model repositories: complete, the same bytes each time, and nothing left to fill in."""

import re
from pathlib import Path

import pytest

from kvtool.config.spec import Spec
from kvtool.errors import Refused
from kvtool.triton.render import ROLES, placeholders, render

MODELS = {
    "front": {"kvtool"},
    "prefill": {"preprocessing", "prefill_engine", "prefill"},
    "decode": {"preprocessing", "decode_engine", "postprocessing", "decode"},
}


def _spec(**changes):
    return Spec(engine=Path("/models/smol"), **changes)


def _bytes(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_each_role_is_a_complete_repository(tmp_path):
    render(_spec(), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(ROLES)
    for role, models in MODELS.items():
        assert {path.name for path in (tmp_path / role).iterdir()} == models
        for model in models:
            config = (tmp_path / role / model / "config.pbtxt").read_text()
            assert f'name: "{model}"' in config
            assert (tmp_path / role / model / "1").is_dir()
            assert (tmp_path / role / model / "1" / "model.py").is_file() == ('backend: "python"' in config)
            if 'backend: "python"' in config:
                assert "instance_group [ { count: 1 kind: KIND_CPU } ]" in config


def test_the_same_spec_gives_the_same_bytes_anywhere_and_again(tmp_path):
    for out in ("a", "b", "a"):
        render(_spec(), tmp_path / out)
    assert _bytes(tmp_path / "a") == _bytes(tmp_path / "b")


def test_what_the_spec_says_is_what_the_configs_say_and_nothing_is_left_to_fill_in(tmp_path):
    render(_spec(prefill={"chunk_tokens": 96}, limits={"concurrent_max": 7}), tmp_path)
    texts = {path: raw.decode() for path, raw in _bytes(tmp_path).items() if path.suffix == ".pbtxt"}
    assert not [path for path, text in texts.items() if "$" in text]
    assert 'key: "chunk_tokens" value: { string_value: "96" }' in texts[Path("prefill/prefill_engine/config.pbtxt")]
    assert 'key: "concurrent_max" value: { string_value: "7" }' in texts[Path("front/kvtool/config.pbtxt")]
    used = {name for text in Path(__file__).parents[2].glob("triton_models/*/*.pbtxt") for name in _names(text)}
    assert used == set(placeholders(_spec()))


def _names(path):
    return re.findall(r"\$\{(\w+)\}", path.read_text())


def test_only_the_engine_directory_is_a_path(tmp_path):
    render(_spec(), tmp_path)
    paths = {found for raw in _bytes(tmp_path).values() for found in re.findall(rb'"(/[^"]*)"', raw)}
    assert paths == {b"/models/smol"}


def test_a_quote_in_a_path_stays_inside_its_string(tmp_path):
    render(Spec(engine=Path('/models/a "b" \\c')), tmp_path)
    assert r'"/models/a \"b\" \\c"' in (tmp_path / "decode/decode_engine/config.pbtxt").read_text()


def test_an_unknown_placeholder_is_refused_with_its_file(tmp_path):
    for models in ROLES.values():
        for model in models:
            (tmp_path / "templates" / model).mkdir(parents=True, exist_ok=True)
    (tmp_path / "templates/front/config.pbtxt").write_text('name: "${colour}"')
    with pytest.raises(Refused, match=r"front/config.pbtxt: placeholder \$\{colour\} is unknown; known: engine"):
        render(_spec(), tmp_path / "out", tmp_path / "templates")
    assert not (tmp_path / "out").exists()


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(Refused, match=r"wanted a new or rendered folder, found thesis.tex"):
        render(_spec(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]

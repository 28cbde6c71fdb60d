"""`kvtool config` and `kvtool deploy render`: what they write can be read again."""

import json
import re

import pytest
import yaml

from kvtool.cli.main import main
from kvtool.config.load import load_spec
from kvtool.config.spec import Spec


def test_the_written_spec_is_the_default_one_and_each_key_in_it_can_be_switched_on(tmp_path, capsys):
    path = tmp_path / "kvtool.yaml"
    assert main(["config", "init", str(path), "--engine", "smol"]) == 0
    written, _ = load_spec(path)
    assert written == Spec(engine=tmp_path / "smol")
    path.write_text(re.sub(r"(?m)^#(?=\w|  )", "", path.read_text()))
    assert load_spec(path)[0] == written
    switched_on = yaml.safe_load(path.read_text())
    assert set(switched_on) == set(Spec.model_fields)
    assert set(switched_on["pool"]) == set(type(written.pool).model_fields)


def test_a_spec_that_is_there_is_not_written_over(tmp_path, capsys):
    path = tmp_path / "kvtool.yaml"
    path.write_text("engine: mine\n")
    assert main(["config", "init", str(path)]) == 2
    assert path.read_text() == "engine: mine\n" and "--force" in capsys.readouterr().err


def test_show_gives_every_value_with_its_origin(tmp_path, capsys):
    path = tmp_path / "s.yaml"
    path.write_text("engine: e\npool:\n  ranks: 3\n")
    assert main(["config", "show", str(path), "--set", "pool.dram_size=64MiB", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["pool.ranks"] == {"value": 3, "origin": "s.yaml:3"}
    assert shown["pool.dram_size"] == {"value": 64 << 20, "origin": "flag"}
    assert shown["decode.batch_max"]["origin"] == "default"
    assert main(["config", "show", str(path)]) == 0
    assert "256.0 MiB" in capsys.readouterr().out


@pytest.mark.parametrize("setting", ["pool.ranks", "=3"])
def test_a_flag_without_a_value_is_refused(tmp_path, capsys, setting):
    path = tmp_path / "s.yaml"
    path.write_text("engine: e\n")
    assert main(["config", "show", str(path), "--set", setting]) == 2
    assert "wanted KEY=VALUE, such as pool.ranks=3" in capsys.readouterr().err


def test_the_schema_is_json(capsys):
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["required"] == ["engine"]


def test_an_engine_that_is_missing_is_said_by_check_and_by_up(tmp_path, capsys):
    path = tmp_path / "s.yaml"
    path.write_text("engine: e\nrun_dir: run\n")
    for command in (["config", "check"], ["deploy", "up"]):
        assert main([*command, str(path)]) == 2
        assert "no engine here" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_repositories_are_rendered(tmp_path, capsys):
    path = tmp_path / "s.yaml"
    path.write_text("engine: e\n")
    assert main(["deploy", "render", str(path), "-o", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/front/kvtool/1/model.py").is_file()


@pytest.mark.parametrize("command", [["status"], ["down"], ["logs"]])
def test_commands_about_nothing_say_so(tmp_path, capsys, command):
    code = main(["deploy", *command, "--run-dir", str(tmp_path / "run")])
    said = capsys.readouterr().err
    assert str(tmp_path / "run") in said
    assert code == (0 if command == ["down"] else 1)

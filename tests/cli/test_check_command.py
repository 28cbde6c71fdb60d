"""`kvtool check`: every fault in one go, with its key, and exit 1."""

from __future__ import annotations

import json

from kvtool.cli.main import main


def test_every_fault_of_an_unreadable_spec_is_told_with_its_key(tmp_path, capsys):
    path = tmp_path / "s.yaml"
    path.write_text("engine: e\npool: {rank: 3}\nlimits: {deadlin: 3s}\n")
    assert main(["check", str(path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [fault["key"] for fault in told] == ["pool.rank", "limits.deadlin"]
    assert all("unknown key; did you mean" in fault["says"] for fault in told)


def test_faults_are_sentences_for_people_without_json(tmp_path, capsys):
    path = tmp_path / "s.yaml"
    path.write_text("target: tensorrt_llm\nengine: e\ntensorrt_llm: {decode: {engine: d, env: {UCX_TLS: tcp}}}\n")
    assert main(["check", str(path)]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("no engine here") == 2 and "error: tensorrt_llm.decode.engine:" in said
    assert "tensorrt_llm.decode.env.UCX_TLS: wanted cuda_copy among the transports" in said


def test_a_flag_that_is_wrong_is_a_fault_too(tmp_path, capsys):
    path = tmp_path / "s.yaml"
    path.write_text("engine: e\n")
    assert main(["check", str(path), "--set", "pool.ranks=many", "--json"]) == 1
    (fault,) = json.loads(capsys.readouterr().out)
    assert fault["key"] == "pool.ranks" and "found 'many'" in fault["says"]


def test_a_spec_for_cpus_is_checked_with_its_engine(tmp_path, capsys, smollm2_engine):
    path = tmp_path / "s.yaml"
    path.write_text(f"engine: {smollm2_engine}\n")
    assert main(["check", str(path)]) == 0
    assert "nothing is wrong" in capsys.readouterr().err
    assert main(["check", str(path), "--set", "prefill.chunk_tokens=100", "--json"]) == 1
    assert [fault["key"] for fault in json.loads(capsys.readouterr().out)] == ["prefill.chunk_tokens"]

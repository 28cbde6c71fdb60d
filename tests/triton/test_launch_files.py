"""Launch files: read by the parsers and schemas of who reads them, agreeing with the spec, and run."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import check_jsonschema
import jsonschema
import kubernetes_validate
import pytest
import yaml
from gpu_specs import SPECS, Case, make_engines

from kvtool.cli.main import main
from kvtool.config.load import load_spec
from kvtool.engine.trtllm.llm import clean_environment
from kvtool.triton.launch.scripts import JOB, clean_lines
from kvtool.triton.settings import INSTANCE, PEERS, POOL

SCHEMAS = Path(check_jsonschema.__file__).parent / "builtin_schemas" / "vendor"
KUBERNETES = "1.30"
SHELLCHECK = str(Path(sys.executable).parent / "shellcheck")
SCRIPTS = ("server.sh", "pool.sh", "mpirun.sh", "slurm.sbatch")


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    return make_engines(tmp_path_factory.mktemp("engines"))


def _case(engines, folder, base="pool", **changes):
    case = Case(engines, folder, base)
    case.put("tensorrt_llm.launch.secret", "kvtool-keys")
    case.put("tensorrt_llm.prefill.env", {"UCX_NET_DEVICES": "mlx5_0:1", "ODD": "it's $HOME"})
    for key, value in changes.items():
        case.put(key.replace("__", "."), value)
    case.path.write_text(yaml.safe_dump(case.spec))
    return case


def _render(case, kinds="all"):
    out = case.folder / "out"
    assert main(["deploy", "render", str(case.path), "-o", str(out), "--launch", kinds]) == 0
    return out / "launch"


@pytest.fixture(scope="module", params=list(SPECS))
def rendered(request, engines, tmp_path_factory):
    case = _case(engines, tmp_path_factory.mktemp(request.param), request.param)
    return case, _render(case)


def _objects(folder):
    return list(yaml.safe_load_all((folder / "kubernetes.yaml").read_text()))


def _of(folder, kind):
    return {each["metadata"]["name"]: each for each in _objects(folder) if each["kind"] == kind}


def test_scripts_are_read_by_bash_and_shellcheck(rendered):
    _, folder = rendered
    for name in SCRIPTS:
        subprocess.run(["bash", "-n", str(folder / name)], check=True)
    found = subprocess.run([SHELLCHECK, *(str(folder / name) for name in SCRIPTS)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
    assert (folder / "mpirun.sh").stat().st_mode & stat.S_IXUSR


def test_the_compose_file_fits_its_schema(rendered):
    _, folder = rendered
    table = yaml.safe_load((folder / "compose.yaml").read_text())
    jsonschema.validate(table, json.loads((SCHEMAS / "compose-spec.json").read_text()))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"services": {"x": {"imag": "y"}}}, json.loads((SCHEMAS / "compose-spec.json").read_text()))


def test_manifests_fit_the_schemas_of_kubernetes(rendered):
    _, folder = rendered
    objects = _objects(folder)
    for each in objects:
        kubernetes_validate.validate(each, KUBERNETES, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**objects[0], "kind": "Service", "spec": {"port": 3}}, KUBERNETES, strict=True)


def test_yaml_says_the_same_when_written_again(rendered):
    _, folder = rendered
    for name in ("compose.yaml", "kubernetes.yaml"):
        read = list(yaml.safe_load_all((folder / name).read_text()))
        assert list(yaml.safe_load_all(yaml.safe_dump_all(read))) == read


def test_nothing_of_this_machine_and_no_secret_is_in_them(rendered):
    case, folder = rendered
    for path in sorted(folder.glob("*")):
        if path.is_file():
            text = path.read_text()
            assert str(case.folder) not in text and str(Path.home()) + "/" not in text, path.name
            assert not re.search(r"(?i)password|BEGIN [A-Z ]*PRIVATE|\btoken:", text), path.name
            named = set(re.findall(r"KVTOOL_[A-Z_]+", text))
            assert named <= {INSTANCE, PEERS, POOL}, f"{path.name}: {named}"


def test_the_same_spec_gives_the_same_bytes_and_a_second_render_replaces_the_first(engines, tmp_path):
    case = _case(engines, tmp_path)
    first = {path.name: path.read_bytes() for path in _render(case).glob("*") if path.is_file()}
    again = _render(case, "compose")
    assert {path.name for path in again.iterdir()} == {
        "compose.yaml", "peers-compose.json", "peers.json", "server.sh", "pool.sh", "container",
    }  # fmt: skip
    assert all(path.read_bytes() == first[path.name] for path in again.glob("*") if path.is_file())


def test_servers_addresses_and_gpus_agree_over_all_files(rendered):
    case, folder = rendered
    section = case.spec["tensorrt_llm"]
    gpus = {role: section[role]["gpus"] for role in ("prefill", "decode")}
    together = case.spec["engine"] == "engine"
    wanted = {"decode-0": [str(i) for ids in gpus.values() for i in ids[0]]} if together else {
        f"{role}-{index}": [str(i) for i in ids] for role, lists in gpus.items() for index, ids in enumerate(lists)
    }  # fmt: skip
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    for name, ids in wanted.items():
        (device,) = services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["device_ids"] == ids, name
        assert services[name]["ulimits"]["memlock"] == -1
    sets = _of(folder, "StatefulSet")
    for role in {name.split("-")[0] for name in wanted}:
        spec = sets[f"kvtool-kvtool-{role}"]["spec"]
        assert spec["replicas"] == sum(name.startswith(role) for name in wanted)
        (container,) = spec["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == len(wanted[f"{role}-0"])
        assert "kvtool.triton.probe" in container["livenessProbe"]["exec"]["command"]
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    _check_peers(folder, set(wanted), services)


def _check_peers(folder, wanted, services):
    local = json.loads((folder / "peers.json").read_text())["instances"]
    assert {peer["name"] for peer in local} == wanted
    for peer in local:
        role, _, index = peer["name"].rpartition("-")
        line = f'PORT={peer["address"].rpartition(":")[2]} "$here/server.sh" {role} {index} &'
        assert line in (folder / "mpirun.sh").read_text()
        assert line.replace('"$here', 'step 0 "$here')[:-2] in (folder / "slurm.sbatch").read_text()
    for peer in json.loads((folder / "peers-compose.json").read_text())["instances"]:
        host, _, port = peer["address"].partition(":")
        assert services[host]["environment"]["PORT"] == port and host == peer["name"]
    pods, heads = _of(folder, "StatefulSet"), _of(folder, "Service")
    scripts = _of(folder, "ConfigMap")["kvtool-kvtool-launch"]["data"]
    for peer in json.loads(scripts["peers.json"])["instances"]:
        pod, _, rest = peer["address"].partition(".")
        service, _, port = rest.partition(":")
        assert pods[pod.rpartition("-")[0]]["spec"]["serviceName"] == service
        assert heads[service]["spec"]["ports"][0]["port"] == int(port)
    assert scripts["server.sh"] == (folder / "server.sh").read_text()


def test_a_pool_is_there_if_and_only_if_a_connector_is(rendered):
    case, folder = rendered
    has = case.spec["tensorrt_llm"].get("handoff", "pool") == "pool"
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    assert ("pool" in services) == ("kvtool-kvtool-pool" in _of(folder, "StatefulSet")) == has
    assert ("pool.sh" in (folder / "slurm.sbatch").read_text()) == has
    if has:
        assert services["pool"]["shm_size"] > 2 * (64 << 20) and services["decode-0"]["ipc"] == "service:pool"
        volumes = _of(folder, "StatefulSet")["kvtool-kvtool-pool"]["spec"]["template"]["spec"]["volumes"]
        assert {"secretName": "kvtool-keys", "defaultMode": 0o600} in [
            {key: each["secret"][key] for key in ("secretName", "defaultMode")} for each in volumes if "secret" in each
        ]


def test_containers_count_their_gpus_from_0_and_find_engines_in_their_folder(engines, tmp_path):
    folder = _render(_case(engines, tmp_path), "kubernetes")
    for role in ("prefill", "decode"):
        text = (folder / "container" / role / f"{role}_engine" / "config.pbtxt").read_text()
        assert f'"/engines/{role}"' in text and 'key: "gpus" value: { string_value: "0" }' in text
    assert str(tmp_path) not in "".join(path.read_text() for path in folder.rglob("config.pbtxt"))


def test_what_an_mpi_job_left_is_cleaned_by_scripts_as_by_servers(tmp_path):
    names = ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMIX_MCA_gds", "PMI_FD", "OMPI_MCA_btl"]
    names += ["OMPI_MCA_orte_x", "ORTE_X", "OMPI_UNIVERSE_SIZE", "OMPI_FIRST_RANKS", "OMPI_APP_CTX_NUM_PROCS", "KEPT"]
    env = dict.fromkeys(names, "1") | {"PATH": os.environ["PATH"]}
    kept = dict(env)
    clean_environment(kept)
    line = ["bash", "-c", clean_lines() + "compgen -e"]
    ran = subprocess.run(line, env=env, capture_output=True, text=True, check=True)
    assert set(ran.stdout.split()) & set(names) == set(kept) & set(names)
    assert "PRTE_*" in JOB


@pytest.mark.parametrize("base", ["pool", "engine"])
def test_one_host_is_started_and_ended_by_the_script(engines, tmp_path, base):
    """With programs that stand for tritonserver, mpirun and kvtool: they write down how they were called."""
    folder = _render(_case(engines, tmp_path, base), "mpirun")
    programs = tmp_path / "bin"
    programs.mkdir()
    note = tmp_path / "note"
    said = "[${KVTOOL_INSTANCE:-} ${OMPI_COMM_WORLD_RANK:-clean} ${ODD:-}]"
    called = f'#!/bin/bash\necho "$(basename "$0") $* {said}" >> {note}\n'
    for name in ("tritonserver", "mpirun"):
        (programs / name).write_text(called + f"until [[ -e {tmp_path}/stop ]]; do sleep 0.05; done\n")
    (programs / "kvtool").write_text(
        called + 'while (( $# )); do if [[ $1 == --run-dir ]]; then echo "{}" > "$2/pool.json"; fi; shift; done\n'
    )
    for path in programs.iterdir():
        path.chmod(0o755)
    env = {"PATH": f"{programs}:{os.environ['PATH']}", "RUN_DIR": str(tmp_path / "run"), "OMPI_COMM_WORLD_RANK": "3"}
    with subprocess.Popen([str(folder / "mpirun.sh")], env=env, stderr=subprocess.PIPE, text=True) as started:
        try:
            wanted = 4 if base == "pool" else 2
            lines = _wait_lines(note, wanted)
        finally:
            (tmp_path / "stop").touch()
        _, said = started.communicate(timeout=20)
    assert started.returncode == 1 and "ending the others" in said
    text = "\n".join(lines)
    assert "3]" not in text and "[front-0 clean ]" in text
    if base == "pool":
        layout = "layers=2,kv_heads=2,head_dim=16,block_tokens=16,dtype=bfloat16,kv_factor=2"
        assert f"kvtool pool up --layout {layout}" in text
        assert "[prefill-0 clean it's $HOME]" in text and "[decode-0 clean ]" in text
    else:
        assert "mpirun --allow-run-as-root" in text or "mpirun --host" in text
        assert "-n 1 tritonserver" in text and ": -n 2 tritonserver" in text and "--load-model=context" in text


def _wait_lines(note, count):
    import time

    until_s = time.monotonic() + 20
    while time.monotonic() < until_s:
        lines = note.read_text().splitlines() if note.exists() else []
        if len(lines) >= count:
            return lines
        time.sleep(0.02)
    raise AssertionError(f"wanted {count} calls, found {lines}")


@pytest.mark.parametrize(
    ("changes", "kinds", "words"),
    [
        ({}, "docker", "--launch: wanted all, or some of mpirun, slurm, compose, kubernetes, found 'docker'"),
        ({"tensorrt_llm__launch__image": None}, "compose", "tensorrt_llm.launch.image: wanted an image"),
        (
            {"tensorrt_llm__launch__secret": None},
            "kubernetes",
            "tensorrt_llm.launch.secret: Kubernetes reaches the pool",
        ),
        ({"tensorrt_llm__launch__nodes": 2}, "mpirun", "tensorrt_llm.launch.nodes: mpirun.sh is for one host, found 2"),
        ({"tensorrt_llm__launch__nodes": 2}, "compose", "tensorrt_llm.launch.nodes: a compose file is for one host"),
        (
            {"tensorrt_llm__launch__nodes": 2, "tensorrt_llm__launch__secret": None},
            "slurm",
            "tensorrt_llm.launch.secret: a deployment over several nodes",
        ),
    ],
)
def test_what_a_launcher_cannot_do_is_refused(engines, tmp_path, capsys, changes, kinds, words):
    case = _case(engines, tmp_path, **changes)
    assert main(["deploy", "render", str(case.path), "-o", str(tmp_path / "out"), "--launch", kinds]) == 2
    assert words in capsys.readouterr().err


def test_a_spec_for_cpus_has_no_launch_files(tmp_path, capsys):
    (tmp_path / "s.yaml").write_text("engine: e\n")
    assert main(["deploy", "render", str(tmp_path / "s.yaml"), "-o", str(tmp_path / "o"), "--launch", "all"]) == 2
    assert "launch files are for tensorrt_llm, found torch" in capsys.readouterr().err


def test_several_nodes_reach_a_pool_with_a_key(engines, tmp_path):
    changes = {"launch__nodes": 2, "decode__nodes": [1], "launch__partition": "gpu"}
    folder = _render(
        _case(engines, tmp_path, **{f"tensorrt_llm__{key}": each for key, each in changes.items()}), "slurm"
    )
    text = (folder / "slurm.sbatch").read_text()
    for line in ("--nodes=2", "--partition=gpu", "--time=1-00:00:00"):
        assert f"#SBATCH {line}\n" in text
    assert 'step 1 "$here/server.sh" decode 0' in text and "${nodes[1]}:" in text and "pool.key" in text


RECIPES = sorted(path.stem for path in (Path(__file__).parents[2] / "engines" / "specs").glob("*.yaml"))
GOLDEN = Path(__file__).parent / "golden" / "launch"


def _unbuilt(name, build, capsys):
    """What `kvtool build NAME --dry-run` says that it would write, as engine directories in `build`."""
    capsys.readouterr()
    assert main(["build", name, "--dry-run", "--json", "--out", str(build / name)]) == 0
    for told in json.loads(capsys.readouterr().out):
        folder = build / Path(told["directory"]).name
        folder.mkdir(parents=True)
        for file, text in told["files"].items():
            (folder / file).write_text(text)
        if "build_config.json" in told["files"]:  # and what trtllm-build would make of it
            built = {"build_config": json.loads(told["files"]["build_config.json"]), "pretrained_config": {}}
            (folder / "config.json").write_text(json.dumps({"version": told["version"], **built}))
            (folder / "rank0.engine").touch()


def test_every_recipe_for_gpus_has_a_spec():
    from kvtool.engine.recipe import find_recipe, recipe_names

    assert [each for each in recipe_names() if (r := find_recipe(each)) and r.target == "tensorrt_llm"] == RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_rendered_as_it_was(name, tmp_path, capsys, monkeypatch):
    """From the recipe alone, without weights; KVTOOL_GOLDEN=write writes golden/launch again."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "no-hub"))
    specs = tmp_path / "engines" / "specs"
    specs.mkdir(parents=True)
    shutil.copy(Path(__file__).parents[2] / "engines" / "specs" / f"{name}.yaml", specs / "spec.yaml")
    _unbuilt(name, tmp_path / "build", capsys)
    spec = load_spec(specs / "spec.yaml")[0]
    out = tmp_path / "out"
    kinds = "all" if spec.tensorrt_llm.launch.nodes == 1 else "slurm,kubernetes"
    told = [
        "-s",
        "tensorrt_llm.launch.gpu=null",
    ]  # whether it fits is held against the recipe's own arithmetic elsewhere
    assert main(["deploy", "render", str(specs / "spec.yaml"), "-o", str(out), "--launch", kinds, *told]) == 0
    for each in _objects(out / "launch"):
        kubernetes_validate.validate(each, KUBERNETES, strict=True)
    subprocess.run([SHELLCHECK, *map(str, out.glob("launch/*.s[hb]*"))], check=True)
    shown = [*sorted(out.glob("*/*_engine/1/*.yaml")), *sorted(out.glob("decode/[cg]*/config.pbtxt"))]
    shown += [out / "launch" / "slurm.sbatch", out / "launch" / "pool.sh"]
    text = "".join(f"== {path.relative_to(out)} ==\n{path.read_text()}" for path in shown).replace(str(tmp_path), "")
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("KVTOOL_GOLDEN") == "write":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()

"""Shell scripts: one server, the pool, and everything on one host. Read by bash, checked by `bash -n` and shellcheck.

Each runs in the foreground and ends what it started. Variables of an MPI job that this shell was started by go first:
TensorRT-LLM and the pool's own mpiexec would take themselves for ranks of it, and hang.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable

from kvtool.errors import SpecRefused
from kvtool.pool.state import FILE
from kvtool.triton.launch.plan import Launch, Service
from kvtool.triton.mpi import ENVIRONMENT, MODELS

HEAD = """#!/usr/bin/env bash
# {what}
# Written by kvtool deploy render --launch; the same spec gives the same bytes.
set -euo pipefail
"""


JOB = (
    "OMPI_COMM_WORLD_*",
    "OMPI_UNIVERSE_SIZE",
    "OMPI_FIRST_RANKS",
    "OMPI_APP_CTX_NUM_PROCS",
    "OMPI_MCA_orte_*",
    "ORTE_*",
    "PRTE_*",
    "PMIX_*",
    "PMI_*",
)
"""What `engine.trtllm.llm.clean_environment` removes, as patterns of the shell; a test holds the two together."""


def clean_lines(*more: str) -> str:
    """`more`: further patterns."""
    return (
        "# What an MPI job left in the environment goes; how MPI communicates (other OMPI_MCA_*, PMIX_MCA_*) stays.\n"
        "while read -r variable; do\n"
        '  case "$variable" in\n'
        "    PMIX_MCA_*) ;;\n"
        f'    {" | ".join((*JOB, *more))}) unset "$variable" ;;\n'
        "  esac\n"
        "done < <(compgen -e)\n"
    )


def server_text(launch: Launch) -> str:
    """server.sh ROLE INDEX: one tritonserver in the foreground."""
    wait_s = int(launch.spec.supervise.start_timeout)
    text = HEAD.format(what=f"One tritonserver of deployment {launch.name}: server.sh ROLE INDEX.")
    text += (
        "role=$1 index=$2\n"
        'here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)\n'
        "repositories=${REPOSITORIES:-$here/..}\n"
        f"port=${{PORT:-{launch.front.port}}} address=${{ADDRESS:-127.0.0.1}}\n"
    )
    text += clean_lines()
    text += 'export KVTOOL_INSTANCE="$role-$index" KVTOOL_PEERS="${KVTOOL_PEERS:-$here/peers.json}"\n'
    if launch.pool is not None:
        text += (
            f'export KVTOOL_POOL="${{RUN_DIR:?a folder that all servers and the pool see}}/{FILE}"\n'
            "if [[ $role != front ]]; then\n"
            "  until [[ -s $KVTOOL_POOL ]]; do\n"
            f'    if (( SECONDS > {wait_s} )); then echo "no pool at $KVTOOL_POOL after {wait_s} s" >&2; exit 1; fi\n'
            "    sleep 1\n"
            "  done\n"
            "fi\n"
        )
    text += _environment(launch)
    text += (
        "server=(\n"
        "  tritonserver\n"
        '  "--model-repository=$repositories/$role"\n'
        '  "--grpc-address=$address" "--grpc-port=$port"\n'
        '  "--http-address=$address" "--http-port=$((port + 1))"\n'
        '  "--metrics-address=$address" "--metrics-port=$((port + 2))"\n'
        "  --disable-auto-complete-config\n"
        "  --exit-timeout-secs=30\n"
        f'  "--backend-config=python,shm-region-prefix-name=kvt-{launch.name}-$role-$index-"\n'
        ")\n"
    )
    if launch.world_size > 1:
        text += _mpirun(launch.world_size)
    return text + 'exec "${server[@]}"\n'


def pool_text(launch: Launch) -> str:
    """pool.sh: the pool in the foreground, under its own mpiexec; it ends with this script."""
    text = HEAD.format(what=f"The KV pool of deployment {launch.name}, until this script is asked to end.")
    if launch.pool is None:
        return text + 'echo "this deployment has no pool: its engines hand KV over by themselves"\n'
    pool, layout = launch.spec.pool, launch.pool
    fields = ("layers", "kv_heads", "head_dim", "block_tokens", "dtype", "kv_factor")
    said = ",".join(f"{name}={getattr(layout, name)}" for name in fields)
    text += "run_dir=${RUN_DIR:?a folder that all servers and the pool see}\npool=${POOL_DIR:-$run_dir/pool}\n"
    text += clean_lines("SLURM_*")
    flags = {
        "layout": said,
        "ranks": pool.ranks,
        "dram-size": pool.dram_size,
        "file-size": pool.file_size,
        "write": pool.write,
        "evict": pool.evict,
        "lease-term": f"{pool.lease_term:g}s",
        "copies": pool.copies,
        "flush": f"{pool.flush:g}s",
        "name": launch.name,
    }
    lines = [f"--{name} {shlex.quote(str(value))}" for name, value in flags.items()]
    text += (
        'mkdir -p "$run_dir" "$pool"\n'
        "reached=()\n"
        "if [[ -n ${POOL_HOST:-} ]]; then\n"
        '  reached=(--host "$POOL_HOST" --key-file "${POOL_KEY:?the file with the key of the pool, mode 0600}")\n'
        "fi\n"
        'if [[ -n ${POOL_FILES:-} ]]; then reached+=(--file-dir "$POOL_FILES"); fi\n'
        "trap 'kvtool pool down --run-dir \"$pool\"; exit 0' TERM INT\n"
        "kvtool pool up \\\n" + "".join(f"  {line} \\\n" for line in lines) + '  "${reached[@]}" --run-dir "$pool"\n'
        "# Clients read the state file again when it changes; it is replaced whole.\n"
        "while [[ -s $pool/" + FILE + " ]]; do\n"
        f'  if ! cmp -s "$pool/{FILE}" "$run_dir/{FILE}"; then\n'
        f'    cp -p "$pool/{FILE}" "$run_dir/.{FILE}.new" && mv "$run_dir/.{FILE}.new" "$run_dir/{FILE}"\n'
        "  fi\n"
        "  sleep 1 &\n"
        "  wait $!\n"
        "done\n"
        'echo "the pool is gone; its log is in $pool" >&2\n'
        "exit 1\n"
    )
    return text


def mpirun_text(launch: Launch) -> str:
    """mpirun.sh: pool and servers on this host; the end of one ends all.

    Raises:
        SpecRefused: the spec is for several hosts.
    """
    nodes = launch.spec.tensorrt_llm.launch.nodes
    if nodes > 1:
        raise SpecRefused(
            f"tensorrt_llm.launch.nodes: mpirun.sh is for one host, found {nodes}; use slurm or kubernetes"
        )
    text = HEAD.format(what=f"Deployment {launch.name} on this host; Ctrl-C, or the end of any part, ends all of it.")
    text += (
        'here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)\n'
        f"export RUN_DIR=${{RUN_DIR:-${{XDG_RUNTIME_DIR:-/tmp}}/kvtool-{launch.name}}}\n"
        "parts=()\n"
        "# shellcheck disable=SC2329 # called by trap\n"
        "end() {\n"
        "  trap - EXIT TERM INT\n"
        '  kill -TERM "${parts[@]}" 2>/dev/null || true\n'
        "  wait\n"
        "}\n"
        "trap end EXIT TERM INT\n"
        'mkdir -p "$RUN_DIR"\n'
    )
    text += "".join(f'"$here/{line}" &\nparts+=($!)\n' for line in _pool_line(launch))
    for each in launch.services:
        text += f'PORT={each.port} "$here/server.sh" {each.role} {each.index} &\nparts+=($!)\n'
    return text + 'wait -n || true\necho "a part of the deployment ended; ending the others" >&2\nexit 1\n'


def peers_text(launch: Launch, address: Callable[[Service], str] | None = None) -> str:
    """peers.json: where the front finds its servers. `address`: of one; None: the spec's urls, else this host."""
    address = address or (lambda each: given_address(launch, each) or f"127.0.0.1:{each.port}")
    instances = [
        {"name": each.name, "role": each.role, "address": address(each), "epoch": 1} for each in launch.engines
    ]
    return json.dumps({"instances": instances, "pool_up": launch.pool is not None}, indent=1, sort_keys=True) + "\n"


def given_address(launch: Launch, each: Service) -> str | None:
    """Of the spec's urls, where there are some."""
    urls: list[str] = getattr(launch.spec.tensorrt_llm, each.role).urls
    return urls[each.index] if urls else None


def _pool_line(launch: Launch) -> list[str]:
    return ["pool.sh"] if launch.pool is not None else []


def _environment(launch: Launch) -> str:
    """What the spec gives to servers of each role."""
    roles = {each.role: each.env for each in launch.engines if each.env}
    if not roles:
        return ""
    cases = "".join(
        f"  {role}) export {' '.join(f'{name}={shlex.quote(value)}' for name, value in sorted(env.items()))} ;;\n"
        for role, env in roles.items()
    )
    quoted = "# shellcheck disable=SC2016 # values are as the spec has them"
    return f'{quoted}\ncase "$role" in\n{cases}esac\n'


def _mpirun(world_size: int) -> str:
    """Rank 0 is the orchestrator and has no GPU; the others load context and generation, and start nothing."""
    models = " ".join(f"--load-model={model}" for model in MODELS)
    exports = " ".join(f"{name}={value}" for name, value in ENVIRONMENT.items())
    return (
        "if [[ $role == decode ]]; then\n"
        f"  export {exports}\n"
        "  root=()\n"
        "  if (( EUID == 0 )); then root=(--allow-run-as-root); fi\n"
        f'  exec mpirun "${{root[@]}}" --host "localhost:{world_size}" --bind-to none \\\n'
        '    -n 1 "${server[@]}" : \\\n'
        f'    -n {world_size - 1} "${{server[@]}}" --model-control-mode=explicit {models}\n'
        "fi\n"
    )

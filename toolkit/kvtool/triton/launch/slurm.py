"""A Slurm batch script: the pool, prefill, decode and front as steps of one allocation, each on its node."""

from __future__ import annotations

from kvtool.triton.launch.plan import Launch, Service
from kvtool.triton.launch.scripts import given_address, peers_text


def slurm_text(launch: Launch) -> str:
    """
    Raises:
        SpecRefused: a pool that several nodes reach, and no key for it.
    """
    wanted, nodes = launch.spec.tensorrt_llm.launch, launch.spec.tensorrt_llm.launch.nodes
    seconds = int(wanted.time_limit)
    limit = f"{seconds // 86400}-{seconds % 86400 // 3600:02}:{seconds % 3600 // 60:02}:{seconds % 60:02}"
    gpus = max(
        len({gpu for each in launch.services if each.node == node for gpu in each.gpus}) for node in range(nodes)
    )
    gpus = max(gpus, 1 + max((gpu for each in launch.services for gpu in each.gpus), default=0))
    head = [
        f"--job-name=kvtool-{launch.name}",
        f"--nodes={nodes}",
        f"--gpus-per-node={gpus}",
        "--exclusive",
        f"--time={limit}",
        *([f"--partition={wanted.partition}"] if wanted.partition else []),
    ]
    text = "#!/usr/bin/env bash\n" + "".join(f"#SBATCH {line}\n" for line in head)
    text += (
        f"# Deployment {launch.name}; submit it in this folder, which all nodes see. RUN_DIR is a folder "
        "that\n"
        "# all nodes see too. Written by kvtool deploy render --launch; the same spec gives the same bytes.\n"
        "set -euo pipefail\n"
        "here=${SLURM_SUBMIT_DIR:?submit this with sbatch}\n"
        "export RUN_DIR=${RUN_DIR:-$here/run-$SLURM_JOB_ID}\n"
        'mkdir -p "$RUN_DIR"\n'
        'mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")\n'
        f'if (( ${{#nodes[@]}} != {nodes} )); then echo "wanted {nodes} nodes, found ${{#nodes[@]}}" >&2; exit 1; fi\n'
        'cat > "$RUN_DIR/peers.json" <<END\n'
        + peers_text(launch, lambda each: given_address(launch, each) or f"${{nodes[{each.node}]}}:{each.port}")
        + "END\n"
        "export KVTOOL_PEERS=$RUN_DIR/peers.json ADDRESS=0.0.0.0\n"
        "# Steps share the allocation. The scripts clean what a step leaves in the environment, and name their GPUs.\n"
        "step() {\n"
        "  local node=$1\n"
        "  shift\n"
        f"  srun --overlap --nodes=1 --ntasks=1 --mpi=none --gpus-per-node={gpus} "
        '--nodelist="${nodes[$node]}" "$@" &\n'
        "}\n"
    )
    text += _pool(launch)
    for each in launch.engines:
        text += f"PORT={each.port} step {each.node} {_server(each)}\n"
    text += f"PORT={launch.front.port} step {launch.front.node} {_server(launch.front)}\n"
    return text + ('wait -n || true\necho "a step of the deployment ended; ending the others" >&2\nexit 1\n')


def _server(each: Service) -> str:
    return f'"$here/server.sh" {each.role} {each.index}'


def _pool(launch: Launch) -> str:
    """On node 0. Where others reach it, it listens on that node's address, with a key."""
    if launch.pool is None:
        return ""
    if launch.spec.tensorrt_llm.launch.nodes == 1:
        return 'step 0 "$here/pool.sh"\n'
    folder = launch.secret("a deployment over several nodes")
    return (
        f"# The folder {folder} holds pool.key, mode 0600.\n"
        "POOL_HOST=$(getent ahostsv4 \"${nodes[0]}\" | awk 'NR == 1 { print $1 }')\n"
        f"POOL_KEY=${{POOL_KEY:-${{SECRETS:?the folder of {folder}}}/pool.key}}\n"
        "export POOL_HOST POOL_KEY\n"
        "# Its files and sockets are local to the node; only its state is shared.\n"
        f'POOL_DIR=${{TMPDIR:-/tmp}}/kvtool-{launch.name}-$SLURM_JOB_ID step 0 "$here/pool.sh"\n'
    )

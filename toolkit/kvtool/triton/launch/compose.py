"""A Docker Compose file: pool, servers and front on one host, as containers that share the pool's memory."""

from __future__ import annotations

from typing import Any

import yaml

from kvtool.errors import SpecRefused
from kvtool.triton.launch.plan import Launch, Service
from kvtool.triton.launch.scripts import peers_text

HEAD = """# Deployment {name}: docker compose up. Written by kvtool deploy render --launch.
# ENGINES is the folder on this host with the engine directories ({engines} in containers).
"""
PORT = 8001
STUB_MEMORY = 2 << 30
"""Shared memory of Triton's Python stubs of all containers that share one /dev/shm."""


def compose_text(launch: Launch) -> str:
    """
    Raises:
        SpecRefused: several hosts, or no image.
    """
    wanted = launch.spec.tensorrt_llm.launch
    if wanted.nodes > 1:
        raise SpecRefused(
            f"tensorrt_llm.launch.nodes: a compose file is for one host, found {wanted.nodes}; use slurm or kubernetes"
        )
    services: dict[str, Any] = {}
    if launch.pool is not None:
        services["pool"] = _pool(launch)
    services |= {each.name: _server(launch, each) for each in (*launch.engines, launch.front)}
    table = {"name": f"kvtool-{launch.name}", "services": services, "volumes": {"run": {}}}
    head = HEAD.format(name=launch.name, engines=wanted.engines)
    return head + yaml.safe_dump(table, sort_keys=False, width=120)


def _common(launch: Launch) -> dict[str, Any]:
    return {
        "image": launch.image(),
        "restart": "unless-stopped",
        "init": True,
        # One name for all: clients of the pool take its shared memory on the same host, which they know by its name.
        "hostname": f"kvtool-{launch.name}",
        "ulimits": {"memlock": -1, "stack": 67108864},
        "stop_grace_period": "40s",
    }


def _pool(launch: Launch) -> dict[str, Any]:
    size = launch.spec.pool.ranks * launch.spec.pool.dram_size + STUB_MEMORY
    return _common(launch) | {
        "command": ["/launch/pool.sh"],
        "environment": {"RUN_DIR": "/run/kvtool"},
        "ipc": "shareable",
        "shm_size": size,
        "volumes": ["run:/run/kvtool", "./:/launch:ro"],
        "healthcheck": _check("kvtool pool status --run-dir /run/kvtool/pool", launch),
    }


def _server(launch: Launch, each: Service) -> dict[str, Any]:
    wanted = launch.spec.tensorrt_llm.launch
    made = _common(launch) | {
        "command": ["/launch/server.sh", each.role, str(each.index)],
        "environment": {
            "RUN_DIR": "/run/kvtool",
            "REPOSITORIES": "/launch/container",
            "ADDRESS": "0.0.0.0",
            "PORT": str(PORT),
            "KVTOOL_PEERS": "/launch/peers-compose.json",
        },
        "volumes": [
            "run:/run/kvtool",
            "./:/launch:ro",
            f"${{ENGINES:?the folder with the engine directories}}:{wanted.engines}:ro",
        ],
        "healthcheck": _check(f"python3 -m kvtool.triton.probe {each.role} 127.0.0.1:{PORT}", launch),
    }
    if launch.pool is not None:
        made["ipc"] = "service:pool"
        made["depends_on"] = {"pool": {"condition": "service_healthy"}}
    else:
        made["shm_size"] = STUB_MEMORY
    if each.gpus:
        device = {"driver": "nvidia", "device_ids": [str(gpu) for gpu in each.gpus], "capabilities": ["gpu"]}
        made["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    if each.role == "front":  # no server asks who is there: what is outside this host goes by a proxy that does
        made["ports"] = [f"127.0.0.1:{launch.front.port + offset}:{PORT + offset}" for offset in range(3)]
    return made


def _check(command: str, launch: Launch) -> dict[str, Any]:
    supervise = launch.spec.supervise
    return {
        "test": ["CMD-SHELL", command],
        "interval": f"{supervise.canary_interval:g}s",
        "timeout": f"{supervise.canary_timeout + 5:g}s",
        "retries": 3,
        "start_period": f"{supervise.start_timeout:g}s",
    }


def compose_peers(launch: Launch) -> str:
    """peers-compose.json: services find each other by name."""
    return peers_text(launch, lambda each: f"{each.name}:{PORT}")

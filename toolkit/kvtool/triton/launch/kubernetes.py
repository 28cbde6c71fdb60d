"""Kubernetes manifests: StatefulSets for pool, prefill and decode, a Deployment for the front, and what they need.

Pods have the GPUs that nvidia.com/gpu gives them, so the spec's GPU ids and nodes do not appear. Probes run a real
inference: Triton goes on saying ready after the death of a model's process. Keys come from a secret by its name.
"""

from __future__ import annotations

from typing import Any

import yaml

from kvtool.triton.launch.plan import Launch, Service
from kvtool.triton.launch.scripts import peers_text, pool_text, server_text

HEAD = """# Deployment {name}: kubectl apply -f kubernetes.yaml. Written by kvtool deploy render --launch.
# The claim {claim} holds the engine directories, and the folder container/ beside this file as {repositories}.
"""
PORT = 8001
STUB_MEMORY = 2 << 30
POOL_MEMORY = 1 << 30
"""Of a pool's processes, beside its blocks."""
Object = dict[str, Any]


def kubernetes_text(launch: Launch) -> str:
    """
    Raises:
        SpecRefused: no image, or a pool and no secret with its key.
    """
    wanted = launch.spec.tensorrt_llm.launch
    objects = [_scripts(launch)]
    if launch.pool is not None:
        objects += [_shared(launch), _headless(launch, "pool"), _pool(launch)]
    for role in dict.fromkeys(each.role for each in launch.engines):
        objects += [_headless(launch, role), _engines(launch, role)]
    objects += [_front_service(launch), _front(launch), *_policies(launch)]
    head = HEAD.format(name=launch.name, claim=wanted.claim, repositories=f"{_name(launch)}-repositories")
    return head + yaml.safe_dump_all(objects, sort_keys=False, width=120)


def _name(launch: Launch) -> str:
    """As DNS has it."""
    return f"kvtool-{launch.name.replace('_', '-')}".rstrip("-")


def _labels(launch: Launch, role: str) -> Object:
    labels = {"app.kubernetes.io/name": "kvtool", "app.kubernetes.io/instance": _name(launch)}
    return labels | ({"app.kubernetes.io/component": role} if role else {})


def _meta(launch: Launch, role: str, name: str = "") -> Object:
    namespace = launch.spec.tensorrt_llm.launch.namespace
    return {"name": name or f"{_name(launch)}-{role}", "namespace": namespace, "labels": _labels(launch, role)}


def _scripts(launch: Launch) -> Object:
    host = f"{_name(launch)}-{{role}}-{{index}}.{_name(launch)}-{{role}}:{PORT}"

    def address(each: Service) -> str:
        return host.format(role=each.role, index=each.index)

    data = {"server.sh": server_text(launch), "peers.json": peers_text(launch, address)}
    if launch.pool is not None:
        data["pool.sh"] = pool_text(launch)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _meta(launch, "", f"{_name(launch)}-launch"),
        "data": data,
    }


def _shared(launch: Launch) -> Object:
    """A folder that all pods see, for the pool's state file: some kilobytes."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _meta(launch, "pool", f"{_name(launch)}-shared"),
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }


def _headless(launch: Launch, role: str) -> Object:
    """Names for the pods of a set; also while they are not ready, since the front decides by its own requests."""
    spec: Object = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": _labels(launch, role)}
    if role != "pool":
        spec["ports"] = _service_ports()
    return {"apiVersion": "v1", "kind": "Service", "metadata": _meta(launch, role), "spec": spec}


def _pool(launch: Launch) -> Object:
    pool = launch.spec.pool
    memory = pool.ranks * pool.dram_size
    secret = launch.secret("Kubernetes")
    mounts = [_mount("launch", "/launch"), _mount("shared", "/shared"), _mount("run", "/run/kvtool")]
    mounts += [_mount("keys", "/keys"), _mount("shm", "/dev/shm")]
    env = [
        {"name": "RUN_DIR", "value": "/shared"},
        {"name": "POOL_DIR", "value": "/run/kvtool"},
        {"name": "POOL_KEY", "value": "/keys/pool.key"},
        {"name": "POOL_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]
    volumes = [
        _launch_volume(launch),
        {"name": "shared", "persistentVolumeClaim": {"claimName": f"{_name(launch)}-shared"}},
        {"name": "run", "emptyDir": {}},
        {"name": "keys", "secret": {"secretName": secret, "defaultMode": 0o600, "items": [_key_item()]}},
        _shm(memory + STUB_MEMORY),
    ]
    if pool.file_size:
        mounts.append(_mount("files", "/files"))
        env.append({"name": "POOL_FILES", "value": "/files"})
    command = ["kvtool", "pool", "status", "--run-dir", "/run/kvtool"]
    container = {
        "name": "pool",
        "image": launch.image(),
        "command": ["bash", "/launch/pool.sh"],
        "env": env,
        "volumeMounts": mounts,
        "resources": {"requests": {"memory": str(memory + POOL_MEMORY)}},
        **_probes(launch, command, command),
    }
    made = _stateful(launch, "pool", 1, container, volumes)
    if pool.file_size:
        size = pool.ranks * pool.file_size
        made["spec"]["volumeClaimTemplates"] = [
            {
                "metadata": {"name": "files"},
                "spec": {
                    "accessModes": ["ReadWriteOnce"],
                    "resources": {"requests": {"storage": str(size + size // 10)}},
                },
            }
        ]
    return made


def _key_item() -> Object:
    return {"key": "pool.key", "path": "pool.key"}


def _engines(launch: Launch, role: str) -> Object:
    """A pod for each instance; its number is the instance's."""
    these = [each for each in launch.engines if each.role == role]
    gpus = max(len(each.gpus) for each in these)
    container = _server(launch, role, f'exec bash /launch/server.sh {role} "${{HOSTNAME##*-}}"')
    container["resources"] = {"limits": {"nvidia.com/gpu": gpus}}
    return _stateful(launch, role, len(these), container, _volumes(launch))


def _front(launch: Launch) -> Object:
    container = _server(launch, "front", "exec bash /launch/server.sh front 0")
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _meta(launch, "front"),
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": _labels(launch, "front")},
            "template": _pod(launch, "front", container, _volumes(launch)),
        },
    }


def _server(launch: Launch, role: str, command: str) -> Object:
    wanted = launch.spec.tensorrt_llm.launch
    mounts = [_mount("launch", "/launch"), _mount("engines", wanted.engines, read_only=True), _mount("shm", "/dev/shm")]
    if launch.pool is not None:
        mounts.append(_mount("shared", "/shared"))
    env = {
        "RUN_DIR": "/shared" if launch.pool is not None else "/tmp",
        "REPOSITORIES": f"{wanted.engines}/{_name(launch)}-repositories",
        "ADDRESS": "0.0.0.0",
        "PORT": str(PORT),
        "KVTOOL_PEERS": "/launch/peers.json",
    }
    probe = ["python3", "-m", "kvtool.triton.probe", role, f"127.0.0.1:{PORT}"]
    return {
        "name": "triton",
        "image": launch.image(),
        "command": ["bash", "-c", command],
        "env": [{"name": name, "value": value} for name, value in env.items()],
        "ports": [
            {"name": name, "containerPort": PORT + offset} for offset, name in enumerate(("grpc", "http", "metrics"))
        ],
        "volumeMounts": mounts,
        **_probes(launch, probe, probe),
    }


def _probes(launch: Launch, alive: list[str], ready: list[str]) -> Object:
    """The engines' start is long; once a server answered, a canary that fails three times has it started again."""
    supervise = launch.spec.supervise
    period, timeout = max(1, round(supervise.canary_interval)), round(supervise.canary_timeout) + 5

    def each(command: list[str], failures: int) -> Object:
        often = {"periodSeconds": period, "timeoutSeconds": timeout, "failureThreshold": failures}
        return {"exec": {"command": command}, **often}

    return {
        "startupProbe": each(alive, max(3, round(supervise.start_timeout / period))),
        "livenessProbe": each(alive, 3),
        "readinessProbe": each(ready, 1),
    }


def _volumes(launch: Launch) -> list[Object]:
    volumes = [
        _launch_volume(launch),
        {
            "name": "engines",
            "persistentVolumeClaim": {"claimName": launch.spec.tensorrt_llm.launch.claim, "readOnly": True},
        },
        _shm(STUB_MEMORY),
    ]
    if launch.pool is not None:
        volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": f"{_name(launch)}-shared"}})
    return volumes


def _launch_volume(launch: Launch) -> Object:
    return {"name": "launch", "configMap": {"name": f"{_name(launch)}-launch", "defaultMode": 0o555}}


def _shm(size: int) -> Object:
    """/dev/shm: the runtime's own is 64 MiB."""
    return {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(size)}}


def _mount(name: str, path: str, read_only: bool = False) -> Object:
    return {"name": name, "mountPath": path, **({"readOnly": True} if read_only else {})}


def _pod(launch: Launch, role: str, container: Object, volumes: list[Object]) -> Object:
    return {
        "metadata": {"labels": _labels(launch, role)},
        "spec": {
            "terminationGracePeriodSeconds": 60,
            "automountServiceAccountToken": False,
            "containers": [container],
            "volumes": volumes,
        },
    }


def _stateful(launch: Launch, role: str, replicas: int, container: Object, volumes: list[Object]) -> Object:
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _meta(launch, role),
        "spec": {
            "serviceName": f"{_name(launch)}-{role}",
            "replicas": replicas,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": _labels(launch, role)},
            "template": _pod(launch, role, container, volumes),
        },
    }


def _front_service(launch: Launch) -> Object:
    spec = {"type": "ClusterIP", "selector": _labels(launch, "front"), "ports": _service_ports()}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _meta(launch, "front"), "spec": spec}


def _service_ports() -> list[Object]:
    return [
        {"name": name, "port": PORT + offset, "targetPort": name}
        for offset, name in enumerate(("grpc", "http", "metrics"))
    ]


def _policies(launch: Launch) -> list[Object]:
    """No server asks who is there: engines and pool hear this deployment only, the front this namespace only."""
    inside = {"podSelector": {"matchLabels": _labels(launch, "")}}
    found = []
    for role in (*dict.fromkeys(each.role for each in launch.services), *(["pool"] if launch.pool is not None else [])):
        peers = [{"podSelector": {}}] if role == "front" else [inside]
        spec = {
            "podSelector": {"matchLabels": _labels(launch, role)},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": peers}],
        }
        meta = _meta(launch, role)
        found.append({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": meta, "spec": spec})
    return found

"""What is started where: the servers of a deployment, their GPUs and ports, and the pool beside them."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtool.config.spec import Spec
from kvtool.engine.trtllm.version import Adapter
from kvtool.errors import SpecRefused
from kvtool.kv.layout import KVLayout
from kvtool.triton.target import Target, target_of, world_size

PORTS = 3
"""gRPC, HTTP, metrics: neighbours, from the service's first."""


@dataclass(frozen=True)
class Service:
    """One tritonserver. `port`: its gRPC port where all share a host; HTTP and metrics follow."""

    role: str
    index: int
    node: int
    gpus: tuple[int, ...]
    port: int
    env: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"


@dataclass(frozen=True)
class Launch:
    """`pool`: layout of its blocks; None: no pool. `world_size`: of the one server of TensorRT engines, else 1."""

    spec: Spec
    services: tuple[Service, ...]
    pool: KVLayout | None
    world_size: int

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def front(self) -> Service:
        return self.services[0]

    @property
    def engines(self) -> tuple[Service, ...]:
        """All but the front."""
        return self.services[1:]

    def image(self) -> str:
        """Raises SpecRefused: the spec names none."""
        image = self.spec.tensorrt_llm.launch.image
        if image is None:
            raise SpecRefused(
                "tensorrt_llm.launch.image: wanted an image with Triton, TensorRT-LLM and kvtool for containers, found "
                "none; name one"
            )
        return image

    def secret(self, what: str) -> str:
        """Raises SpecRefused: a pool that other hosts reach needs a key, and the spec names none."""
        secret = self.spec.tensorrt_llm.launch.secret
        if secret is None:
            raise SpecRefused(
                f"tensorrt_llm.launch.secret: {what} reaches the pool over the network, which needs a key; name the "
                "secret that holds it as pool.key"
            )
        return secret


def plan_of(spec: Spec) -> Launch:
    """
    Raises:
        SpecRefused: a spec for another target.
        EngineRefused: no engine for TensorRT-LLM there.
    """
    if spec.target != "tensorrt_llm":
        raise SpecRefused(f"target: launch files are for tensorrt_llm, found {spec.target}; use kvtool deploy up")
    target = target_of(spec)
    engine = target.can.adapter is Adapter.ENGINE_1_2
    placed: list[Placed] = [("front", 0, 0, (), {}), *(_together(target) if engine else _apart(target))]
    first = spec.tensorrt_llm.launch.grpc_port
    services = [Service(*each[:4], first + PORTS * count, each[4]) for count, each in enumerate(placed)]
    return Launch(
        spec, tuple(services), target.pool_layout if target.connector else None, world_size(target) if engine else 1
    )


Placed = tuple[str, int, int, tuple[int, ...], dict[str, str]]
"""(role, index, node, GPUs, environment)"""


def _apart(target: Target) -> list[Placed]:
    """A server for each instance."""
    found: list[Placed] = []
    for each in target.roles:
        nodes = each.settings.nodes or [0] * each.instances
        for index, (node, gpus) in enumerate(zip(nodes, each.settings.gpus, strict=True)):
            found.append((each.role, index, node, tuple(gpus), dict(each.settings.env)))
    return found


def _together(target: Target) -> list[Placed]:
    """One server that has both roles."""
    gpus = [gpu for each in target.roles for ids in each.settings.gpus for gpu in ids]
    env = {name: value for each in target.roles for name, value in each.settings.env.items()}
    return [("decode", 0, 0, tuple(dict.fromkeys(gpus)), env)]

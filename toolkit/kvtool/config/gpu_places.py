"""Whether instances fit their hosts: GPU ids, nodes, memory, addresses, and what one request may ask for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from kvtool.config.fault import Fault
from kvtool.config.gpus import Facts, Role
from kvtool.config.spec import Spec
from kvtool.units import show_size


def place_faults(spec: Spec, facts: Facts) -> Iterator[Fault]:
    """Everything that is wrong, rule by rule."""
    for rule in (_places, _sharing, _memory, _urls, _limits):
        yield from rule(spec, facts)


def placed(spec: Spec, role: Role) -> Iterator[tuple[str, int, list[int]]]:
    """(key, node, GPU ids) of each instance."""
    nodes = role.settings.nodes or [0] * len(role.settings.gpus)
    for index, (node, gpus) in enumerate(zip(nodes, role.settings.gpus, strict=False)):
        yield f"{role.key}.gpus[{index}]", node, gpus


def _places(spec: Spec, facts: Facts) -> Iterator[Fault]:
    launch = spec.tensorrt_llm.launch
    for role in facts.roles:
        gpus, nodes, ranks = role.settings.gpus, role.settings.nodes, role.built.world_size
        if len(gpus) != role.instances:
            yield Fault(
                f"{role.key}.gpus",
                f"wanted GPU ids for each of {role.instances} instances ({role.name}.instances), found lists for "
                f"{len(gpus)}; write one list of {ranks} ids for each",
            )
        if nodes and len(nodes) != role.instances:
            yield Fault(
                f"{role.key}.nodes",
                f"wanted a node for each of {role.instances} instances ({role.name}.instances), found {len(nodes)}",
            )
        for key, node, ids in placed(spec, role):
            if not 0 <= node < launch.nodes:
                yield Fault(
                    f"{role.key}.nodes",
                    f"wanted 0 to {launch.nodes - 1} (tensorrt_llm.launch.nodes {launch.nodes}), found {node}; "
                    "correct it, or raise launch.nodes",
                )
            if len(ids) != ranks:
                yield Fault(
                    key,
                    f"wanted {ranks} GPUs, the world size of {role.engine} (tensor x pipeline x context parallel), "
                    f"found {len(ids)}: {ids}",
                )
            if len(set(ids)) != len(ids):
                yield Fault(key, f"wanted each GPU once, found {ids}; ranks of one instance cannot share a GPU")
            beyond = [gpu for gpu in ids if not 0 <= gpu < launch.gpus_per_node]
            if beyond:
                yield Fault(
                    key,
                    f"wanted ids from 0 to {launch.gpus_per_node - 1} (tensorrt_llm.launch.gpus_per_node), found "
                    f"{beyond}",
                )


def _sharing(spec: Spec, facts: Facts) -> Iterator[Fault]:
    """Two roles may share a GPU when both say how much they take; two instances of one role may not."""
    users: dict[tuple[int, int], list[tuple[Role, str]]] = defaultdict(list)
    for role in facts.roles:
        for key, node, ids in placed(spec, role):
            for gpu in set(ids):
                users[node, gpu].append((role, key))
    told = set[tuple[str, ...]]()
    for (node, gpu), these in sorted(users.items()):
        keys = tuple(key for _, key in these)
        if len(these) < 2 or keys in told:
            continue
        told.add(keys)
        where = f"GPU {gpu} of node {node} is also in {', '.join(keys[:-1])}"
        shares = [role.settings.memory_fraction for role, _ in these]
        if len({role.name for role, _ in these}) < len(these):
            yield Fault(keys[-1], f"{where}; instances of one role cannot share a GPU: give each its own")
        elif None in shares:
            yield Fault(
                keys[-1],
                f"{where}; give each its own, or set memory_fraction in both tensorrt_llm.prefill and .decode",
            )
        elif (total := sum(share for share in shares if share is not None)) > 1:
            yield Fault(
                "tensorrt_llm.decode.memory_fraction",
                f"{where}: wanted fractions of 1 at most together, found {total:.2f}; lower them, or move an instance",
            )


def _memory(spec: Spec, facts: Facts) -> Iterator[Fault]:
    launch, pool = spec.tensorrt_llm.launch, spec.pool
    hosts: dict[int, int] = defaultdict(int)
    for role in facts.roles:
        share = role.settings.host_cache_size // role.built.world_size
        block = role.kv.block_tokens * role.kv.token_size // role.built.tensor_parallel
        if 0 < share < block:
            yield Fault(
                f"{role.key}.host_cache_size",
                f"{show_size(role.settings.host_cache_size)} are {show_size(share)} for each of "
                f"{role.built.world_size} "
                f"ranks, less than one block of {show_size(block)}; raise it, or set 0",
            )
        for _, node, _ in placed(spec, role):
            hosts[node] += role.settings.host_cache_size
    hosts[0] += 0
    if launch.node_memory is None:
        return
    for node, size in sorted(hosts.items()):
        ranks = pool.ranks if pool.enabled and node == 0 else 0  # an mpiexec starts all of them on one host
        wanted = size + ranks * pool.dram_size
        if wanted > launch.node_memory:
            yield Fault(
                "tensorrt_llm.prefill.host_cache_size" if size > ranks * pool.dram_size else "pool.dram_size",
                f"node {node}: host caches of {show_size(size)} and {ranks} pool ranks of "
                f"{show_size(pool.dram_size)} are "
                f"{show_size(wanted)}, tensorrt_llm.launch.node_memory is {show_size(launch.node_memory)}; lower "
                "host_cache_size, pool.dram_size or pool.ranks",
            )


def _urls(spec: Spec, facts: Facts) -> Iterator[Fault]:
    launch = spec.tensorrt_llm.launch
    seen: dict[str, str] = {}
    given = [role for role in facts.roles if role.settings.urls]
    for role in given:
        urls = role.settings.urls
        if len(urls) != role.instances:
            yield Fault(
                f"{role.key}.urls",
                f"wanted one for each of {role.instances} instances ({role.name}.instances), found {len(urls)}",
            )
        for url in urls:
            host, _, port = url.rpartition(":")
            if not host or "/" in url or not port.isdecimal() or not 0 < int(port) < 65536:
                yield Fault(f"{role.key}.urls", f"wanted HOST:PORT of a gRPC server, found {url!r}")
            elif launch.nodes > 1 and host in ("localhost", "127.0.0.1", "[::1]"):
                yield Fault(
                    f"{role.key}.urls",
                    f"wanted an address that {launch.nodes} nodes reach, found the loopback address {url!r}",
                )
            if url in seen:
                yield Fault(f"{role.key}.urls", f"{url} is in {seen[url]} already; two instances share no address")
            seen.setdefault(url, f"{role.key}.urls")
    if len(given) == 1:
        other = facts.decode if given[0].name == "prefill" else facts.prefill
        yield Fault(f"{other.key}.urls", f"wanted urls as {given[0].key} has them, found none; give both, or neither")


def _limits(spec: Spec, facts: Facts) -> Iterator[Fault]:
    for role in facts.roles:
        if role.batch > role.built.max_num_tokens:
            yield Fault(
                f"{role.key}.max_batch_size",
                f"wanted at most max_num_tokens of {role.engine} ({role.built.max_num_tokens}), a token for each "
                f"sequence of a step, found {role.batch}",
            )
        elif role.built.adapter == "engine-1.2" and role.batch > role.built.max_batch_size:
            yield Fault(
                f"{role.key}.max_batch_size",
                f"wanted at most what the engine was built for ({role.built.max_batch_size}), found {role.batch}; "
                "TensorRT-LLM would lower it without a word that stops",
            )
        if role.built.max_num_tokens % role.kv.block_tokens:
            yield Fault(
                f"{role.key}.engine",
                f"max_num_tokens: wanted a multiple of tokens_per_block ({role.kv.block_tokens}), found "
                f"{role.built.max_num_tokens}; build it again",
            )

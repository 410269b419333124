"""Hosts and models for plans, described in a line each."""

from dataclasses import replace
from typing import Any

from vllm_zen import checkpoint, host

GIB = 2**30


def machine(
    nodes: int = 1,
    cores_per_node: int = 2,
    sockets: int = 1,
    smt: int = 1,
    memory: float = 64,
    **changes: Any,
) -> host.Host:
    """CPU ids run over the nodes; SMT siblings follow after all cores, as on real machines. Memory in GiB."""
    total = nodes * cores_per_node
    cores = tuple(tuple(core + thread * total for thread in range(smt)) for core in range(total))
    groups = [cores[node * cores_per_node : (node + 1) * cores_per_node] for node in range(nodes)]
    per_socket = nodes // sockets
    flat = [tuple(sorted(cpu for core in group for cpu in core)) for group in groups]
    built = host.Host(
        cpus=tuple(range(total * smt)),
        cores=cores,
        l3_groups=tuple(flat),
        l3_bytes=32 * 2**20,
        nodes=tuple(host.Node(index, cpus, int(memory * GIB / nodes)) for index, cpus in enumerate(flat)),
        sockets=tuple(
            tuple(cpu for cpus in flat[s * per_socket : (s + 1) * per_socket] for cpu in cpus)
            for s in range(sockets)
        ),
        quota=None,
        memory_total=int(memory * GIB),
        memory_available=int(memory * GIB),
        memory_limit=None,
        shm_bytes=None,
        huge_pages="",
        mbind=None,
        unknown=(),
        online=total * smt,
    )
    return replace(built, **changes)


def model(
    billions: float = 8.0, layers: int = 32, heads: int = 32, kv_heads: int = 8, **changes: Any
) -> checkpoint.Model:
    """A dense decoder of about so many parameters, untied."""
    from pathlib import Path

    hidden, vocabulary = 4096, 128256
    head = vocabulary * hidden
    linear = max(0, int(billions * 1e9) - 2 * head)
    built = checkpoint.Model(
        path=Path("/models/some"),
        quantization=None,
        tied=False,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        vocabulary=vocabulary,
        max_len=131072,
        kv_values_per_token=layers * 2 * kv_heads * 128,
        linears=(checkpoint.Linear(28672, hidden, layers),),
        parameters={"linear": linear, "expert": 0, "head": head, "embedding": head, "other": 0},
        experts=0,
        experts_per_token=1,
        file_bytes=int(billions * 2e9),
    )
    return replace(built, **changes)

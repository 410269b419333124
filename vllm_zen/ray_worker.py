"""What a worker that Ray starts must see to itself: its cores, and the network it meets the others on.

vLLM binds the workers of its own executor only. A Ray node offers slots, one for each worker it takes, and
the cores it was started with are split between them. Ray has no name for such a slot but `GPU`: vLLM finds
a worker's place through Ray's accelerator ids, which exist for Ray's own kinds of accelerators only
(get_node_and_physical_gpu_ids in vllm/v1/executor/ray_executor_v2.py).
"""

import os
from pathlib import Path

import psutil
import torch

from vllm_zen import binding, host

RESOURCE = "GPU"
INTERFACE = "GLOO_SOCKET_IFNAME"


def prepare() -> None:
    """Binds this process, which is a Ray worker, to the cores of its slot, and gloo to Ray's interface.

    Raises UnsupportedError where the node has more slots than cores.
    """
    import ray

    if os.environ.get(binding.BIND, "").strip() != "nobind":
        _bind(*_slot())
    if name := interface_of(ray.util.get_node_ip_address()):
        os.environ.setdefault(INTERFACE, name)


def _bind(mine: int, slots: int) -> None:
    """Ray starts workers unbound, with OMP_NUM_THREADS=1."""
    machine = host.read_host()
    lists = binding.worker_cores(binding.cores_of_nodes(machine), slots, machine.quota)
    cores = lists[mine]
    # The threads that exist are Ray's; those that compute are started later, and inherit the mask.
    for thread in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), cores)
        except ProcessLookupError:
            continue
    os.environ["OMP_NUM_THREADS"] = str(len(cores))
    torch.set_num_threads(len(cores))


def _slot() -> tuple[int, int]:
    """This worker's slot on its Ray node, and how many the node has."""
    import ray

    context = ray.get_runtime_context()
    [mine] = context.get_accelerator_ids()[RESOURCE]
    [node] = [node for node in ray.nodes() if node["NodeID"] == context.get_node_id()]
    slots = int(node["Resources"][RESOURCE])
    return int(mine) % slots, slots  # ids need not begin at 0 where CUDA_VISIBLE_DEVICES is set


def interface_of(address: str) -> str | None:
    """The network interface with this address, or None.

    Left alone, gloo takes the address that the host name stands for, which on many machines is loopback.
    """
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return str(name)
    return None

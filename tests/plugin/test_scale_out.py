"""What lets ranks run on several machines: names for shared memory, Ray's slots, gloo's interface."""

import inspect
import os
import socket
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from vllm_zen import communicator, ray_worker
from vllm_zen.platform import ZenCpuPlatform


@pytest.fixture
def stock(monkeypatch):
    """vLLM's communicator with an empty __init__, in a process that has been given a name."""
    monkeypatch.setattr(communicator.CpuCommunicator, "__init__", lambda self, *args, **kwargs: None)
    monkeypatch.setenv(communicator.IDENTITY, "29500")


def test_the_name_of_shared_memory_says_whose_it_is(stock):
    """Once for all groups of a process: each makes a communicator."""
    communicator.ZenCommunicator(None)
    name = os.environ[communicator.IDENTITY]
    assert name == f"29500@{communicator.shared_memory_identity()}"
    communicator.ZenCommunicator(None)
    assert os.environ[communicator.IDENTITY] == name
    assert "/" not in name and len(name) < 150  # shm_open takes 255 characters and no slash


def test_two_machines_and_two_mounts_differ(tmp_path):
    boots = []
    for number in range(2):
        boots.append(tmp_path / f"boot{number}")
        boots[-1].write_text(f"machine-{number}\n")
    identity = communicator.shared_memory_identity
    assert identity(boots[0], tmp_path) == identity(boots[0], tmp_path)
    assert identity(boots[0], tmp_path) != identity(boots[1], tmp_path)
    assert identity(boots[0], tmp_path) != identity(boots[0], communicator.BOOT_ID.parent)
    assert str(os.getpid()) in identity(tmp_path / "absent", tmp_path)


def test_vllm_names_shared_memory_by_the_variable_and_compares_names():
    """Fails when vLLM moves either: then see whether it tells machines apart by itself."""
    from vllm.distributed.device_communicators import cpu_communicator

    named = inspect.getsource(cpu_communicator._CPUSHMDistributed.make_group_name)
    assert f'os.environ["{communicator.IDENTITY}"]' in named
    compared = inspect.getsource(cpu_communicator.CpuCommunicator._all_group_ranks_share_shm_group_name)
    assert "_CPUSHMDistributed.make_group_name(self)" in compared and "all_gather_object" in compared


def test_the_platform_names_its_communicator_and_a_slot_for_ray():
    from vllm.utils.import_utils import resolve_obj_by_qualname

    assert (
        resolve_obj_by_qualname(ZenCpuPlatform.get_device_communicator_cls()) is communicator.ZenCommunicator
    )
    assert ZenCpuPlatform.ray_device_key == "GPU"


def test_vllm_takes_a_workers_place_from_rays_accelerator_ids():
    """The reason for the name GPU. When this fails, a name of our own may do."""
    source = Path(find_spec("vllm.v1.executor.ray_executor_v2").origin).read_text()  # imports only with Ray
    place = source.partition("def get_node_and_physical_gpu_ids(")[2].partition("    def ")[0]
    assert "get_accelerator_ids()[device_key]" in place


def test_gloo_gets_the_interface_of_rays_address():
    addresses = {
        entry.address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    }
    for address, name in addresses.items():
        assert ray_worker.interface_of(address) == name
    assert ray_worker.interface_of("203.0.113.7") is None


BIND = """
import os, threading, torch
from vllm_zen import host, ray_worker
ray_worker._bind(1, 2)
cores = host.allowed_cpus()
threads = torch.get_num_threads()
seen = []
late = threading.Thread(target=lambda: seen.append(sorted(os.sched_getaffinity(0))))
late.start(); late.join()
assert seen == [cores] and threads == len(cores) == int(os.environ["OMP_NUM_THREADS"]), (seen, cores, threads)
print(host.format_cpu_list(cores))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two slots need two cores")
def test_a_ray_worker_binds_itself_to_the_cores_of_its_slot():
    import fakes

    from vllm_zen import binding, host

    machine = host.read_host()
    expected = binding.worker_cores(binding.cores_of_nodes(machine), 2, machine.quota)[1]
    result = fakes.python(BIND)
    assert result.stdout.strip() == host.format_cpu_list(expected), result.stderr[-2000:]

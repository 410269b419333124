"""read_host() in a real child cgroup of this machine: needs root and a writable cgroup v1.

Two groups in one another for each controller, limits on the outer one only: what the child process reads must
come from the whole path, and hold.
"""

import os
from pathlib import Path

import fakes
import pytest
from groups import remove

from vllm_zen import cgroups, host
from vllm_zen.kernel_files import KernelFiles

CONTROLLERS = ("cpu", "cpuset", "memory")
LIMIT = 512 * 2**20

# argv: the innermost groups. The child moves itself, so that nothing of the parent is ever in them.
CHILD = """
import dataclasses, json, os, sys
from pathlib import Path
for folder in sys.argv[1:]:
    Path(folder, "cgroup.procs").write_text(str(os.getpid()))
from vllm_zen import binding, host
found = host.read_host()
environ = {}
lines = [correction.why for correction in binding.apply(environ, 1, machine=found)]
report = dataclasses.asdict(found)
report |= {"usable": found.usable_memory, "mask": host.allowed_cpus(), "lines": lines, "environ": environ}
print(json.dumps(report))
"""


def own_folders():
    """The folder of this process's group for each controller, by the module's own reading of the path."""
    files = KernelFiles(Path("/"))
    own = cgroups._own_groups(files.text(cgroups.CGROUP))
    mounts = cgroups.read_mounts(files)
    for name in CONTROLLERS:
        groups = cgroups._path(files, mounts, own, name)
        if not groups or groups[0].version != 1:
            pytest.skip(f"the {name} controller is not on cgroup v1 here")
        yield Path(groups[0].folder)


@pytest.fixture
def group():
    """Makes a pair of nested groups for each controller: outer and inner folders, by controller."""
    name = f"vllm-zen-test-{os.getpid()}"
    outer = {}
    try:
        try:
            for controller, folder in zip(CONTROLLERS, own_folders(), strict=True):
                outer[controller] = folder / name
                (folder / name / "inner").mkdir(parents=True)
        except OSError as error:
            pytest.skip(f"cgroups are not writable here: {error}")
        yield outer
    finally:
        for folder in outer.values():
            remove(folder / "inner")
            remove(folder)


def set_cpus(folder, cpus):
    """v1 takes processes only into a set that has CPUs and memory nodes of its own."""
    nodes = (folder.parent / "cpuset.mems").read_text()
    for group in (folder, folder / "inner"):
        (group / "cpuset.cpus").write_text(cpus)
        (group / "cpuset.mems").write_text(nodes)


def read_inside(outer):
    return fakes.ask(CHILD, arguments=[str(folder / "inner") for folder in outer.values()])


@pytest.mark.parametrize(("microseconds", "cpus"), [(150000, 1.5), (100000, 1.0), (50000, 0.5)])
def test_a_quota_on_the_outer_group(group, microseconds, cpus):
    """Case T01 (a) to (c)."""
    set_cpus(group["cpuset"], host.format_cpu_list(host.allowed_cpus()))
    (group["cpu"] / "cpu.cfs_quota_us").write_text(str(microseconds))
    found = read_inside(group)
    source = str(group["cpu"] / "cpu.cfs_quota_us")
    assert (found["quota"]["value"], found["quota"]["source"]) == (cpus, source)
    assert found["cpus"] == host.allowed_cpus() and found["unknown"] == []
    if len(found["cores"]) > cpus:
        assert len(host.parse_cpu_list(found["environ"]["VLLM_CPU_OMP_THREADS_BIND"])) == 1
        assert source in found["lines"][0]
    assert any("less than one CPU" in line for line in found["lines"]) == (cpus < 1)


def test_a_cpuset_of_one_cpu(group):
    """Case T02 (a): everything is about that CPU."""
    last = host.allowed_cpus()[-1]
    set_cpus(group["cpuset"], str(last))
    found = read_inside(group)
    assert found["cpus"] == found["mask"] == [last]
    assert found["cores"] == found["l3_groups"] == found["sockets"] == [[last]]
    assert [node["cpus"] for node in found["nodes"]] == [[last]]
    assert found["unknown"] == []


def test_a_memory_limit_on_the_outer_group(group):
    set_cpus(group["cpuset"], host.format_cpu_list(host.allowed_cpus()))
    (group["memory"] / "memory.limit_in_bytes").write_text(str(LIMIT))
    found = read_inside(group)
    limit = found["memory_limit"]
    assert (limit["value"], limit["source"]) == (LIMIT, str(group["memory"] / "memory.limit_in_bytes"))
    assert 0 < limit["used"] < LIMIT and found["usable"] == LIMIT - limit["used"]
    assert found["memory_total"] > LIMIT and found["unknown"] == []

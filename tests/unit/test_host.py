"""vllm_zen.host over the files of named machines. test_cgroups.py has the limits of nested groups."""

import os
import time
from pathlib import Path

import machines
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import GIB, MACHINES, Machine

from vllm_zen import host

CPU = "/sys/devices/system/cpu"
NODE = "/sys/devices/system/node"

# CPU lists


@given(st.sets(st.integers(0, 5000), min_size=1))
def test_formatting_and_parsing_are_inverse(ids):
    assert host.parse_cpu_list(host.format_cpu_list(list(ids))) == sorted(ids)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("0", [0]),
        ("0-3,8 10", [0, 1, 2, 3, 8, 10]),
        ("  0-1\n", [0, 1]),
        ("0 1 2", [0, 1, 2]),
        ("0, 1,  2", [0, 1, 2]),
        ("3,1,2,1", [1, 2, 3]),
        ("0-2,1-4", [0, 1, 2, 3, 4]),
        ("7-7", [7]),
    ],
)
def test_parse_cpu_list(text, ids):
    assert host.parse_cpu_list(text) == ids


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        ",",
        "0,",
        "a",
        "0-",
        "-1",
        "-",
        "0-1-2",
        "0x1",
        "0-6:2",
        "3-1",
        "1.5",
        "{0}",
        "1_0",
        "0-65536",
        "9" * 5000,
    ],
)
def test_what_is_no_cpu_list_raises(text):
    with pytest.raises(ValueError, match=r"."):
        host.parse_cpu_list(text)


@pytest.mark.parametrize(
    ("ids", "text"),
    [([], ""), ([5], "5"), ([0, 1], "0-1"), ([8, 0, 2, 1, 1], "0-2,8"), ([0, 2, 4], "0,2,4")],
)
def test_format_cpu_list(ids, text):
    assert host.format_cpu_list(ids) == text


def test_allowed_cpus_are_the_affinity_mask():
    assert host.allowed_cpus() == sorted(os.sched_getaffinity(0))


# What OpenMP threads are bound to


@pytest.mark.parametrize(
    ("environ", "ids"),
    [
        ({"KMP_AFFINITY": "granularity=fine,explicit,proclist=[4,5,6]"}, [4, 5, 6]),
        ({"KMP_AFFINITY": "verbose,proclist=[0-3],explicit"}, [0, 1, 2, 3]),
        ({"GOMP_CPU_AFFINITY": "4 5 6"}, [4, 5, 6]),
        ({"GOMP_CPU_AFFINITY": "0-2,7"}, [0, 1, 2, 7]),
        ({"OMP_PLACES": "{4,5,6}", "OMP_PROC_BIND": "true"}, [4, 5, 6]),
        ({"OMP_PLACES": "{9}"}, [9]),
        ({"KMP_AFFINITY": "explicit,proclist=[1]", "GOMP_CPU_AFFINITY": "2", "OMP_PLACES": "{3}"}, [1]),
        ({"KMP_AFFINITY": "compact", "GOMP_CPU_AFFINITY": "2"}, [2]),
        ({"GOMP_CPU_AFFINITY": "0-6:2", "OMP_PLACES": "{3}"}, [3]),
    ],
)
def test_bound_cpus_reads_what_vllm_exports(environ, ids):
    assert host.bound_cpus(environ) == ids


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OMP_PLACES": "cores"},
        {"OMP_PLACES": "{0,1},{2,3}"},
        {"OMP_PLACES": "{0:4}"},
        {"OMP_PLACES": "{}"},
        {"KMP_AFFINITY": "proclist=["},
        {"KMP_AFFINITY": "proclist=[]"},
        {"KMP_AFFINITY": "granularity=fine,compact,1,0"},
        {"GOMP_CPU_AFFINITY": "all of them"},
        {"GOMP_CPU_AFFINITY": "5-2"},
    ],
)
def test_bound_cpus_falls_back_to_the_affinity_mask(environ):
    assert host.bound_cpus(environ) == host.allowed_cpus()


def test_bound_cpus_reads_the_environment(monkeypatch):
    for name in ("KMP_AFFINITY", "OMP_PLACES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GOMP_CPU_AFFINITY", "70 71")
    assert host.bound_cpus() == [70, 71]


# The machines


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """read_host() of a named machine's tree, built once for each."""
    roots = {}

    def read_(name, affinity=None):
        if name not in roots:
            roots[name] = machines.build(tmp_path_factory.mktemp("machine"), MACHINES[name])
        return host.read_host(roots[name], affinity)

    return read_


@pytest.mark.parametrize("name", MACHINES)
def test_every_part_of_a_machine(read, name):
    """Against the numbering the tree was made by."""
    machine, found = MACHINES[name], read(name)
    cpus = (1,) if name == "cpuset 1 of 2" else tuple(machine.online)
    assert found.cpus == cpus
    assert found.cores == machine.groups(machine.core_of, cpus)
    assert found.l3_groups == (machine.groups(machine.l3_of, cpus) if machine.ccx else (cpus,))
    assert found.l3_bytes == (32 * 2**20 if machine.ccx else None)
    assert found.sockets == machine.groups(machine.socket_of, cpus)
    nodes = machine.groups(machine.node_of, cpus) if machine.nodes else (cpus,)
    assert tuple(node.cpus for node in found.nodes) == nodes
    assert [node.id for node in found.nodes] == list(range(len(nodes)))
    assert sum(node.memory for node in found.nodes) == found.memory_total == machine.memory * GIB
    assert found.memory_available == machine.memory * GIB * 3 // 4
    assert (found.shm_bytes, found.huge_pages, found.mbind) == (64 * 2**20, "madvise", None)


@pytest.mark.parametrize(
    ("name", "cores", "l3_groups", "nodes", "sockets"),
    [
        ("genoa NPS1", 96, 12, 1, 1),
        ("genoa NPS4", 96, 12, 4, 1),
        ("genoa nosmt", 96, 12, 1, 1),
        ("turin 2P", 192, 24, 2, 2),
        ("container", 8, 1, 1, 1),
        ("cpuset 1 of 2", 1, 1, 1, 1),
        ("wsl", 4, 1, 1, 1),
        ("aarch64", 64, 1, 1, 1),
    ],
)
def test_how_many_of_each(read, name, cores, l3_groups, nodes, sockets):
    found = read(name)
    counted = len(found.cores), len(found.l3_groups), len(found.nodes), len(found.sockets)
    assert counted == (cores, l3_groups, nodes, sockets)


def test_smt_siblings_on_two_sockets(read):
    found = read("turin 2P")
    assert found.cores[0] == (0, 192) and found.cores[-1] == (191, 383)
    assert found.l3_groups[0] == (*range(8), *range(192, 200))
    assert found.sockets[1] == (*range(96, 192), *range(288, 384))


def test_a_mask_that_splits_cores_and_nodes(read):
    found = read("genoa NPS4", affinity=[0, 1, 97, 30])
    assert found.cores == ((0,), (1, 97), (30,))
    assert found.l3_groups == ((0, 1, 97), (30,))
    first, second = found.nodes
    assert (first.id, first.cpus, second.id, second.cpus) == (0, (0, 1, 97), 1, (30,))
    assert found.cores_of(first) == ((0,), (1, 97)) and found.cores_of(second) == ((30,),)


def test_the_container_is_limited(read):
    found = read("container")
    assert found.quota == host.Limit(1.5, "/sys/fs/cgroup/cpu.max")
    assert found.memory_limit == host.Limit(4 * GIB, "/sys/fs/cgroup/memory.max", used=GIB)
    assert found.usable_memory == 3 * GIB
    assert found.unknown == ()


@pytest.mark.parametrize("name", ["genoa NPS1", "turin 2P", "cpuset 1 of 2", "wsl", "aarch64"])
def test_the_others_are_not(read, name):
    found = read(name)
    assert found.quota is None and found.memory_limit is None
    assert found.usable_memory == found.memory_available


@pytest.mark.parametrize(
    ("name", "starts"),
    [
        ("genoa NPS1", []),
        ("genoa nosmt", []),
        ("turin 2P", []),
        ("cpuset 1 of 2", []),
        ("wsl", [f"NUMA nodes: {NODE}: No such file or directory"]),
        (
            "aarch64",
            [
                f"the L3 cache of CPUs 0-63: {CPU}/cpu0/cache: no cache of level 3",
                f"the socket of CPUs 0-63: {CPU}/cpu0/topology/physical_package_id: -1 is no package",
            ],
        ),
    ],
)
def test_what_a_machine_does_not_say_is_said_once(read, name, starts):
    unknown = sorted(read(name).unknown)
    assert len(unknown) == len(starts)
    assert all(sentence.startswith(start) for sentence, start in zip(unknown, starts, strict=True))


@pytest.mark.parametrize(
    ("name", "reserved", "given"),
    [
        ("genoa NPS1", 1, range(96, 191)),
        ("genoa NPS4", 1, range(96, 119)),
        ("genoa NPS4", 4, range(96, 116)),
        ("genoa nosmt", 1, range(95)),
        ("genoa nosmt", 0, range(96)),
        ("cpuset 1 of 2", 1, [1]),
    ],
)
def test_vllm_auto_binding(read, name, reserved, given):
    """The first node's cores, the last thread of each, less those kept back."""
    assert host.vllm_auto_binding(read(name), reserved) == list(given)


# Single parts


SMALL = Machine(cores=4, threads=2, ccx=2, mounts=(machines.v2_mount(),))


def small(folder, files):
    """SMALL below a folder with some files' texts replaced; None leaves a file out."""
    root = machines.build(folder, SMALL)
    for path, text in files.items():
        if text is None:
            (root / path.lstrip("/")).unlink()
        else:
            machines.write(root, path, text)
    return host.read_host(root)


def test_a_cpu_without_stated_siblings(tmp_path):
    """The other thread's list still names it; with both gone each is a core, and one sentence says so."""
    siblings = [f"{CPU}/cpu{cpu}/topology/thread_siblings_list" for cpu in (0, 4)]
    found = small(tmp_path / "one", {siblings[1]: None})
    assert found.cores == ((0, 4), (1, 5), (2, 6), (3, 7)) and found.unknown == ()
    found = small(tmp_path / "both", dict.fromkeys(siblings, "garbage"))
    assert found.cores == ((0,), (1, 5), (2, 6), (3, 7), (4,))
    assert found.unknown == (f"the SMT siblings of CPUs 0,4: {siblings[0]}: 'garbage' is not a CPU list",)
    found = small(tmp_path / "others", dict.fromkeys(siblings, "1-2"))
    assert found.cores == ((0,), (1, 5), (2, 6), (3, 7), (4,)) and "omits itself" in found.unknown[0]


def test_the_newer_name_of_the_siblings(tmp_path):
    files = {f"{CPU}/cpu{cpu}/topology/thread_siblings_list": None for cpu in range(8)}
    files |= {f"{CPU}/cpu{cpu}/topology/core_cpus_list": f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
    found = small(tmp_path, files)
    assert found.cores == ((0, 4), (1, 5), (2, 6), (3, 7)) and found.unknown == ()


def test_possible_cpus_that_are_not_there(tmp_path):
    """A guest's mask may hold every CPU its hypervisor could add."""
    status = "/proc/self/status"
    assert small(tmp_path / "1", {status: "Cpus_allowed_list:\t0-511"}).cpus == tuple(range(8))
    found = small(tmp_path / "2", {status: "Cpus_allowed_list:\t100-101"})
    assert found.cpus == (100, 101) and any("shares no CPU" in sentence for sentence in found.unknown)


@pytest.mark.parametrize(
    ("nodes", "cpus"),
    [
        ({0: "0-1,4-5", 1: "2-3,6-7"}, {0: (0, 1, 4, 5), 1: (2, 3, 6, 7)}),
        ({0: "0-7", 1: ""}, {0: tuple(range(8))}),
        ({0: None, 2: "4", 10: "5", 1: "0-3,6-7"}, {1: (0, 1, 2, 3, 6, 7), 2: (4,), 10: (5,)}),
        ({0: "", 1: "0-3"}, {1: tuple(range(8))}),
        ({0: "0-5", 1: "4-7"}, {0: (0, 1, 2, 3, 4, 5), 1: (6, 7)}),
        ({0: "garbage"}, {0: tuple(range(8))}),
        ({0: "100-103"}, {0: tuple(range(8))}),
    ],
    ids=["two", "memory only", "by number", "some unclaimed", "claimed twice", "garbage", "others' CPUs"],
)
def test_nodes(tmp_path, nodes, cpus):
    found = small(tmp_path, {f"{NODE}/node{number}/cpulist": text for number, text in nodes.items()})
    assert {node.id: node.cpus for node in found.nodes} == cpus


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("32768K", 2**25),
        ("96M", 96 * 2**20),
        ("1G", 2**30),
        ("512", 512),
        ("0K", None),
        ("K", None),
        ("-1K", None),
    ],
)
def test_l3_sizes(tmp_path, text, size):
    found = small(tmp_path, {f"{CPU}/cpu{cpu}/cache/index3/size": text for cpu in range(8)})
    assert found.l3_bytes == size and len(found.l3_groups) == 2
    assert len(found.unknown) == (size is None)


def test_the_smallest_of_unequal_l3_caches(tmp_path):
    """As where only one CCD carries stacked cache."""
    files = {f"{CPU}/cpu{cpu}/cache/index3/size": "98304K" for cpu in (0, 1, 4, 5)}
    assert small(tmp_path, files).l3_bytes == 32 * 2**20


def test_an_l3_under_another_index(tmp_path):
    """The number in the name is a running one; the level says what it is."""
    files = {}
    for cpu in range(8):
        files[f"{CPU}/cpu{cpu}/cache/index3/level"] = "2"
        cache = {"level": "3", "size": "16384K", "shared_cpu_list": "0-7"}
        files |= {f"{CPU}/cpu{cpu}/cache/index10/{name}": text for name, text in cache.items()}
    found = small(tmp_path, files)
    assert (found.l3_groups, found.l3_bytes) == ((tuple(range(8)),), 2**24)


@pytest.mark.parametrize(
    ("mount", "size"),
    [
        ("tmpfs rw,size=65536k", 2**26),
        ("tmpfs rw,size=1000", 1000),
        ("tmpfs rw", 8 * GIB),
        ("tmpfs rw,size=x", None),
        ("overlay rw,size=1k", None),
    ],
)
def test_shared_memory_of_a_tree(tmp_path, mount, size):
    kind, options = mount.split()
    line = f"25 24 0:23 / /dev/shm rw shared:1 - {kind} shm {options}"
    found = small(tmp_path, {"/proc/self/mountinfo": f"{line}\n{machines.v2_mount()}"})
    assert found.shm_bytes == size and len(found.unknown) == (size is None)


@pytest.mark.parametrize(
    ("enabled", "reserved", "words"),
    [
        ("[always] madvise never", "0", "always"),
        ("always madvise [never]", "512", "never, 512 of 2048 kB reserved"),
        ("always madvise never", "0", "unknown"),
        (None, "2", "unknown, 2 of 2048 kB reserved"),
    ],
)
def test_huge_pages(tmp_path, enabled, reserved, words):
    files = {
        "/sys/kernel/mm/transparent_hugepage/enabled": enabled,
        "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": reserved,
    }
    assert small(tmp_path, files).huge_pages == words


def test_nothing_there_at_all(tmp_path):
    nothing = tmp_path / "nothing"
    found = host.read_host(nothing, affinity=[3, 1, 1])
    assert found.cpus == (1, 3) and found.cores == ((1,), (3,)) and found.l3_groups == ((1, 3),)
    assert found.nodes == (host.Node(0, (1, 3), None),) and found.sockets == ((1, 3),)
    assert found.quota is None and found.memory_limit is None and found.usable_memory is None
    assert found.huge_pages == "unknown" and len(found.unknown) >= 8
    assert host.read_host(nothing).cpus == (0,)
    empty = host.read_host(nothing, affinity=[])
    assert (empty.cpus, empty.cores, empty.nodes, host.vllm_auto_binding(empty)) == ((), (), (), [])


def test_a_thousand_cpus_are_read_at_once(tmp_path):
    """In under half a second of this process's time: the best of three, as other work runs beside it."""
    giant = Machine(sockets=4, cores=128, threads=2, nodes=4, memory=4096, mounts=(machines.v2_mount(),))
    root = machines.build(tmp_path, giant)
    spent = []
    for _ in range(3):
        start = time.process_time()
        assert len(host.read_host(root).cpus) == 1024
        spent.append(time.process_time() - start)
    assert min(spent) < 0.5


# This machine


def test_this_machine():
    found = host.read_host()
    assert found.cpus == tuple(host.allowed_cpus())
    for groups in (found.cores, found.l3_groups, found.sockets, [node.cpus for node in found.nodes]):
        assert sorted(cpu for group in groups for cpu in group) == list(found.cpus)
    assert 0 < found.usable_memory <= found.memory_available <= found.memory_total
    assert found.quota is None or found.quota.value > 0
    assert set(host.vllm_auto_binding(found)) <= set(found.cpus)


def test_asking_for_mbind_changes_no_policy():
    """numa_maps shows the policy of every mapping: a changed one would stand there."""

    def policies():
        try:
            return {line.split()[1] for line in Path("/proc/self/numa_maps").read_text().splitlines()}
        except OSError:
            pytest.skip("needs /proc/self/numa_maps, which a kernel with NUMA has")

    before = policies()
    assert host.read_host().mbind in (True, False)
    assert policies() == before

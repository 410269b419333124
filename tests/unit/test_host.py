"""vllm_zen.host over generated sysfs and cgroup trees."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_zen import host

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
    "text", ["", " ", ",", "0,", "a", "0-", "-1", "-", "0-1-2", "0x1", "0-6:2", "3-1", "1.5", "{0}"]
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


# The quota


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        pytest.param({}, None, id="no cgroup"),
        pytest.param({"cpu.max": "max 100000\n"}, None, id="v2 without a limit"),
        pytest.param({"cpu.max": "200000 100000\n"}, 2.0, id="v2 two CPUs"),
        pytest.param({"cpu.max": "50000 100000\n"}, 0.5, id="v2 half a CPU"),
        pytest.param({"cpu.max": "max\n"}, None, id="v2 cut off"),
        pytest.param({"cpu.max": "100000 0\n"}, None, id="v2 period zero"),
        pytest.param({"cpu.max": "\x00\xff garbage"}, None, id="v2 garbage"),
        pytest.param({"cpu.max": ""}, None, id="v2 empty"),
        pytest.param({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1.5, id="v1"),
        pytest.param(
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None, id="v1 without"
        ),
        pytest.param({"cpu/cpu.cfs_quota_us": "1\n", "cpu/cpu.cfs_period_us": "0\n"}, None, id="v1 zero"),
        pytest.param({"cpu/cpu.cfs_quota_us": "1\n"}, None, id="v1 without a period"),
        pytest.param({"cpu/cpu.cfs_quota_us": "x", "cpu/cpu.cfs_period_us": "y"}, None, id="v1 garbage"),
        pytest.param(
            {"cpu.max": "1 1 1", "cpu/cpu.cfs_quota_us": "3", "cpu/cpu.cfs_period_us": "1"},
            3.0,
            id="v1 helps",
        ),
    ],
)
def test_cpu_quota(tmp_path, files, quota):
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    assert host.cpu_quota(tmp_path) == quota


def test_the_quota_of_this_machine_is_none_or_positive():
    quota = host.cpu_quota()
    assert quota is None or quota > 0


# Topology. A machine of 8 logical CPUs: with SMT, 0-3 are the first threads of 4 cores and 4-7 the second.


def write_topology(sysfs, siblings, nodes):
    for cpu, text in siblings.items():
        folder = sysfs / f"cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{text}\n")
    for node, text in nodes.items():
        folder = sysfs / f"node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{text}\n")
    return sysfs


SMT = {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
NO_SMT = {cpu: str(cpu) for cpu in range(8)}
ALL = list(range(8))


@pytest.mark.parametrize(
    ("siblings", "cpus", "cores"),
    [
        pytest.param(SMT, ALL, [[0, 4], [1, 5], [2, 6], [3, 7]], id="SMT"),
        pytest.param(NO_SMT, ALL, [[cpu] for cpu in ALL], id="SMT off"),
        pytest.param(SMT, [0, 1, 5], [[0], [1, 5]], id="a cpuset that splits a core"),
        pytest.param(SMT, [], [], id="no CPU"),
        pytest.param({}, [0, 3], [[0], [3]], id="nothing stated"),
        pytest.param({0: "0-1", 1: "garbage"}, [0, 1], [[0], [1]], id="half stated"),
        pytest.param({0: "0-1", 1: "0-1"}, [0, 1], [[0, 1]], id="neighbours are siblings"),
    ],
)
def test_physical_cores(tmp_path, siblings, cpus, cores):
    assert host.physical_cores(cpus, write_topology(tmp_path, siblings, {})) == cores


@pytest.mark.parametrize(
    ("nodes", "cpus", "groups"),
    [
        pytest.param({0: "0-7"}, ALL, [ALL], id="one node"),
        pytest.param({0: "0-1,4-5", 1: "2-3,6-7"}, ALL, [[0, 1, 4, 5], [2, 3, 6, 7]], id="two nodes"),
        pytest.param({0: "0-1,4-5", 1: "2-3,6-7"}, [2, 6], [[2, 6]], id="a cpuset of the second"),
        pytest.param({0: "0-7", 1: ""}, ALL, [ALL], id="a node of memory only"),
        pytest.param({2: "4", 10: "5", 1: "6"}, [4, 5, 6], [[6], [4], [5]], id="ordered by number"),
        pytest.param({}, ALL, [ALL], id="nothing stated"),
        pytest.param({0: "garbage"}, ALL, [ALL], id="garbage"),
        pytest.param({0: "100-103"}, ALL, [ALL], id="no node holds ours"),
    ],
)
def test_numa_nodes(tmp_path, nodes, cpus, groups):
    assert host.numa_nodes(cpus, write_topology(tmp_path, {}, nodes)) == groups


@pytest.mark.parametrize(
    ("siblings", "nodes", "cpus", "given"),
    [
        pytest.param(SMT, {0: "0-7"}, ALL, [4, 5, 6], id="SMT: the last of each core, less one"),
        pytest.param(NO_SMT, {0: "0-7"}, ALL, ALL[:-1], id="SMT off"),
        pytest.param(SMT, {0: "0-1,4-5", 1: "2-3,6-7"}, ALL, [4], id="the first node only"),
        pytest.param(SMT, {0: "0-1,4-5", 1: "2-3,6-7"}, [2, 3, 6, 7], [6], id="a cpuset of the second"),
        pytest.param(SMT, {0: "0-7"}, [0, 1, 5], [0], id="a cpuset that splits a core"),
        pytest.param(SMT, {0: "0-7"}, [0, 4], [4], id="one core keeps its thread"),
        pytest.param(SMT, {0: "0-7"}, [3], [3], id="one CPU"),
        pytest.param({}, {}, [0, 1], [0], id="nothing stated"),
    ],
)
def test_vllm_auto_binding(tmp_path, siblings, nodes, cpus, given):
    assert host.vllm_auto_binding(cpus, write_topology(tmp_path, siblings, nodes)) == given


def test_this_machine_has_cores_and_nodes():
    allowed = host.allowed_cpus()
    assert sorted(cpu for core in host.physical_cores(allowed) for cpu in core) == allowed
    assert set(host.vllm_auto_binding(allowed)) <= set(allowed)

"""Limits on the whole path of nested groups: v1, v2 and both, with and without a namespace."""

import tempfile
from pathlib import Path

import machines
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import GIB, V1_UNLIMITED, Machine, v1_memory, v1_mount, v2_memory, v2_mount

from vllm_zen import host

UNIFIED = "/sys/fs/cgroup"
CPU = "/sys/fs/cgroup/cpu"
MEMORY = "/sys/fs/cgroup/memory"


def read(folder, cgroup, mounts, files, **options):
    """read_host() of four CPUs and 16 GiB with these groups."""
    machine = Machine(cores=4, cgroup=cgroup, mounts=tuple(mounts), files=files, **options)
    return host.read_host(machines.build(folder, machine))


def v1_quota(folder, quota, period=100000):
    return {f"{folder}/cpu.cfs_quota_us": str(quota), f"{folder}/cpu.cfs_period_us": str(period)}


# One group's quota


@pytest.mark.parametrize(
    ("text", "quota"),
    [
        ("max 100000", None),
        ("max", None),
        ("200000 100000", 2.0),
        ("50000 100000", 0.5),
        ("1000 1000000", 0.001),
    ],
)
def test_v2_quotas(tmp_path, text, quota):
    found = read(tmp_path, "0::/", [v2_mount()], {f"{UNIFIED}/cpu.max": text})
    assert (found.quota and found.quota.value) == quota
    assert found.unknown == ()


@pytest.mark.parametrize(
    "text",
    ["100000 0", "", "1 1 1", "garbage", "-1 100000", "0 100000", "1_0 10", "9" * 400 + " 1", "100000"],
)
def test_odd_v2_quotas_are_stated(tmp_path, text):
    found = read(tmp_path, "0::/", [v2_mount()], {f"{UNIFIED}/cpu.max": text})
    assert found.quota is None
    assert len(found.unknown) == 1 and f"{UNIFIED}/cpu.max: " in found.unknown[0]


@pytest.mark.parametrize(("quota", "cpus"), [("150000", 1.5), ("50000", 0.5), ("-1", None)])
def test_v1_quotas(tmp_path, quota, cpus):
    found = read(tmp_path, "1:cpu:/", [v1_mount("cpu")], v1_quota(CPU, quota))
    assert found.quota == (host.Limit(cpus, f"{CPU}/cpu.cfs_quota_us") if cpus else None)
    assert found.unknown == ()


@pytest.mark.parametrize(
    "files",
    [
        v1_quota(CPU, 1, 0),
        v1_quota(CPU, "x", "y"),
        v1_quota(CPU, 0),
        v1_quota(CPU, -2),
        {f"{CPU}/cpu.cfs_quota_us": "100000"},
        {f"{CPU}/cpu.cfs_quota_us/folder": ""},
    ],
    ids=["period 0", "garbage", "none", "below -1", "no period", "a folder"],
)
def test_odd_v1_quotas_are_stated(tmp_path, files):
    found = read(tmp_path, "1:cpu:/", [v1_mount("cpu")], files)
    assert found.quota is None
    assert len(found.unknown) == 1 and f"{CPU}/cpu.cfs_" in found.unknown[0]


# The path


def test_the_smallest_quota_on_the_path_counts_wherever_it_stands(tmp_path):
    files = {f"{UNIFIED}/a/b/c/cpu.max": "max 100000", f"{UNIFIED}/a/b/cpu.max": "300000 100000"}
    files[f"{UNIFIED}/a/cpu.max"] = "150000 100000"
    files[f"{UNIFIED}/other/cpu.max"] = "1000 100000"
    found = read(tmp_path, "0::/a/b/c", [v2_mount()], files)
    assert found.quota == host.Limit(1.5, f"{UNIFIED}/a/cpu.max")


def test_a_group_without_the_controller_is_passed_over(tmp_path):
    """v2 gives a group no cpu.max where its parent keeps the controller."""
    files = {f"{UNIFIED}/a/b/cgroup.procs": "1", f"{UNIFIED}/a/cpu.max": "100000 100000"}
    found = read(tmp_path, "0::/a/b", [v2_mount()], files)
    assert found.quota.value == 1 and found.unknown == ()


def test_each_v1_controller_has_its_own_path(tmp_path):
    files = {
        **v1_quota("/sys/fs/cgroup/cpu,cpuacct/slice/one", -1),
        **v1_quota("/sys/fs/cgroup/cpu,cpuacct/slice", 250000),
        "/sys/fs/cgroup/cpuset/two/cpuset.cpus": "1-2",
        "/sys/fs/cgroup/cpuset/cpuset.cpus": "0-3",
        **v1_memory(f"{MEMORY}/three", 4 * GIB, used=GIB, cache=0),
        **v1_memory(MEMORY, V1_UNLIMITED, used=8 * GIB, cache=0),
    }
    groups = "12:name=systemd:/slice\n4:memory:/three\n3:cpu,cpuacct:/slice/one\n2:cpuset:/two"
    mounts = [v1_mount(name) for name in ("cpu,cpuacct", "cpuset", "memory")]
    found = read(tmp_path, groups, mounts, files)
    assert found.quota == host.Limit(2.5, "/sys/fs/cgroup/cpu,cpuacct/slice/cpu.cfs_quota_us")
    assert found.cpus == (1, 2)
    assert found.memory_limit == host.Limit(4 * GIB, f"{MEMORY}/three/memory.limit_in_bytes", used=GIB)
    assert found.unknown == ()


@pytest.mark.parametrize("controllers_in_v2", [False, True])
def test_both_versions_at_once(tmp_path, controllers_in_v2):
    """systemd's hybrid layout: v1 controllers and a v2 tree without any; or memory already moved to v2."""
    point = "/sys/fs/cgroup/unified"
    files = {f"{point}/app/cgroup.procs": "1", **v1_quota(f"{CPU}/app", 100000)}
    groups, mounts = "1:cpu:/app\n0::/app", [v1_mount("cpu"), v2_mount(point=point)]
    if controllers_in_v2:
        files |= v2_memory(f"{point}/app", str(2 * GIB), used=0, cache=0)
    else:
        groups, mounts = f"2:memory:/app\n{groups}", [*mounts, v1_mount("memory")]
        files |= v1_memory(f"{MEMORY}/app", 2 * GIB, used=0, cache=0)
        files |= v1_memory(MEMORY, V1_UNLIMITED, used=0, cache=0)
    found = read(tmp_path, groups, mounts, files)
    assert found.quota.value == 1 and found.memory_limit.value == 2 * GIB
    assert found.unknown == ()


# Mounts and namespaces


@pytest.mark.parametrize(
    ("group", "root", "folder"),
    [
        ("/", "/", ""),
        ("/docker/abc", "/docker/abc", ""),
        ("/docker/abc/inner", "/docker/abc", "/inner"),
        ("/../..", "/../..", ""),
        ("/with blank", "/", "/with blank"),
        ("/a:b", "/", "/a:b"),
    ],
    ids=["namespace", "no namespace, bound", "and a group in it", "same outside", "blank", "colon"],
)
def test_where_our_group_is_mounted(tmp_path, group, root, folder):
    source = f"{UNIFIED}{folder}/cpu.max"
    found = read(tmp_path, f"0::{group}", [v2_mount(root)], {source: "100000 100000"})
    assert found.quota == host.Limit(1, source) and found.unknown == ()


@pytest.mark.parametrize(
    ("group", "root"),
    [
        ("/docker/abc", "/docker/abcd"),
        ("/../other", "/"),
        ("/", "/../.."),
        ("/gone (deleted)", "/"),
        ("/x" * 4000, "/"),
    ],
)
def test_a_group_that_no_mount_shows_falls_back_and_says_so(tmp_path, group, root):
    found = read(tmp_path, f"0::{group}", [v2_mount(root)], {f"{UNIFIED}/cpu.max": "100000 100000"})
    assert found.quota == host.Limit(1, f"{UNIFIED}/cpu.max")
    assert len(found.unknown) == 3 and all("/proc/self/cgroup names" in line for line in found.unknown)


def test_escapes_in_mountinfo(tmp_path):
    point = "/mnt/my groups\\x"
    mount = v2_mount("/a\\040b", "/mnt/my\\040groups\\134x")
    files = {f"{point}/c/cpu.max": "max", f"{point}/cpu.max": "100000 100000"}
    found = read(tmp_path, "0::/a b/c", [mount], files)
    assert found.quota == host.Limit(1, f"{point}/cpu.max")


def test_the_mount_that_shows_most_of_the_path_is_read(tmp_path):
    files = {"/mnt/part/cpu.max": "max", f"{UNIFIED}/a/b/cpu.max": "max", f"{UNIFIED}/a/cpu.max": "1000 1000"}
    for mounts in ([v2_mount(), v2_mount("/a/b", "/mnt/part")], [v2_mount("/a/b", "/mnt/part"), v2_mount()]):
        found = read(tmp_path, "0::/a/b", mounts, files)
        assert found.quota == host.Limit(1, f"{UNIFIED}/a/cpu.max")


def test_a_mount_hidden_by_a_later_one(tmp_path):
    hidden = "50 24 0:50 / /sys/fs/cgroup rw - tmpfs tmpfs rw"
    found = read(tmp_path, "0::/", [v2_mount(), hidden], {f"{UNIFIED}/cpu.max": "1000 1000"})
    assert found.quota is None
    assert (
        "limits of the cpu controller: no cgroup of ours is mounted (/proc/self/mountinfo)" in found.unknown
    )


@pytest.mark.parametrize("groups", ["", "3:pids:/\n1:name=systemd:/"])
def test_a_kernel_without_our_controllers_has_nothing_unknown(tmp_path, groups):
    found = read(tmp_path, groups, [], {})
    assert found.quota is None and found.unknown == ()


def test_an_unmounted_controller_is_stated(tmp_path):
    assert len(read(tmp_path, "1:cpu:/\n2:memory:/", [], {}).unknown) == 2


# CPU sets


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"a/b/cpuset.cpus.effective": "1-2"}, (1, 2)),
        ({"a/b/cpuset.cpus": "", "a/b/cpuset.cpus.effective": "3", "a/cpuset.cpus.effective": "2-3"}, (3,)),
        ({"a/b/cpuset.cpus": "0-2", "a/cpuset.cpus": "1-3"}, (1, 2)),
        ({"a/cpuset.cpus": "2"}, (2,)),
        ({"a/b/cpuset.cpus": "", "a/cpuset.cpus": ""}, (0, 1, 2, 3)),
        ({"a/b/cpuset.cpus.effective": "0-7"}, (0, 1, 2, 3)),
    ],
    ids=["effective", "effective first", "both bind", "only the outer", "unset", "wider than the machine"],
)
def test_cpusets(tmp_path, files, cpus):
    files = {f"{UNIFIED}/{name}": text for name, text in files.items()}
    found = read(tmp_path, "0::/a/b", [v2_mount()], {f"{UNIFIED}/a/b/cgroup.procs": "1", **files})
    assert found.cpus == cpus and found.unknown == ()


def test_v1_effective_cpus(tmp_path):
    files = {"/sys/fs/cgroup/cpuset/cpuset.cpus": "0-3", "/sys/fs/cgroup/cpuset/cpuset.effective_cpus": "2-3"}
    assert read(tmp_path, "1:cpuset:/", [v1_mount("cpuset")], files).cpus == (2, 3)


def test_a_cpuset_of_other_cpus_is_passed_over_and_stated(tmp_path):
    found = read(tmp_path, "0::/", [v2_mount()], {f"{UNIFIED}/cpuset.cpus.effective": "64-127"})
    assert found.cpus == (0, 1, 2, 3)
    assert found.unknown == (
        f"the CPUs this process may use: {UNIFIED}/cpuset.cpus.effective: "
        "64-127 shares no CPU with 0-3, and is passed over",
    )


# Memory


def test_the_smallest_limit_is_not_always_the_tightest(tmp_path):
    """The inner group has 3 of its 4 GiB left, the outer one 1 of its 8: 1 is what a new server gets."""
    files = {
        **v2_memory(f"{UNIFIED}/a/b", str(4 * GIB), used=GIB, cache=0),
        **v2_memory(f"{UNIFIED}/a", str(8 * GIB), used=7 * GIB, cache=0),
    }
    found = read(tmp_path, "0::/a/b", [v2_mount()], files)
    assert found.memory_limit == host.Limit(4 * GIB, f"{UNIFIED}/a/b/memory.max", used=GIB)
    assert found.usable_memory == GIB
    assert [limit.source for limit in found.memory_limits] == [
        f"{UNIFIED}/{group}/memory.max" for group in ("a/b", "a")
    ]


@pytest.mark.parametrize("version", [1, 2])
def test_page_cache_that_can_be_dropped_is_not_used_memory(tmp_path, version):
    if version == 1:
        files = v1_memory(f"{MEMORY}/a", 8 * GIB, used=7 * GIB, cache=6 * GIB)
        files |= v1_memory(MEMORY, V1_UNLIMITED, used=9 * GIB, cache=0)
        found = read(tmp_path, "1:memory:/a", [v1_mount("memory")], files)
    else:
        files = v2_memory(f"{UNIFIED}/a", str(8 * GIB), used=7 * GIB, cache=6 * GIB)
        found = read(tmp_path, "0::/a", [v2_mount()], files)
    assert found.memory_limit.used == GIB and found.memory_limit.remaining == 7 * GIB
    assert found.usable_memory == 7 * GIB and found.unknown == ()


def test_more_used_than_allowed_leaves_nothing(tmp_path):
    files = v2_memory(UNIFIED, str(GIB), used=2 * GIB, cache=0)
    assert read(tmp_path, "0::/", [v2_mount()], files).usable_memory == 0


def test_the_machine_may_have_less_than_the_group(tmp_path):
    files = v2_memory(UNIFIED, str(15 * GIB), used=0, cache=0)
    assert read(tmp_path, "0::/", [v2_mount()], files).usable_memory == 12 * GIB


def test_a_soft_limit_counts(tmp_path):
    """Above memory.high every allocation waits for reclaim: a server must be sized below it."""
    files = v2_memory(UNIFIED, str(8 * GIB), used=0, cache=0, high=str(2 * GIB))
    found = read(tmp_path, "0::/", [v2_mount()], files)
    assert found.memory_limit == host.Limit(2 * GIB, f"{UNIFIED}/memory.high")


@pytest.mark.parametrize("limit", [16 * GIB, 17 * GIB, V1_UNLIMITED, 2**63 - 1])
def test_a_limit_not_below_the_machine_is_none(tmp_path, limit):
    files = v2_memory(UNIFIED, str(limit), used=16 * GIB, cache=0)
    found = read(tmp_path, "0::/", [v2_mount()], files)
    assert found.memory_limit is None and found.memory_limits == () and found.usable_memory == 12 * GIB


def test_a_v1_limit_above_the_container(tmp_path):
    """The pod's limit is outside what the container's mount shows; the kernel names it in the statistics."""
    files = v1_memory(MEMORY, V1_UNLIMITED, used=GIB, cache=0, hierarchical=3 * GIB)
    found = read(tmp_path, "1:memory:/pod/c", [v1_mount("memory", "/pod/c")], files)
    assert found.memory_limit == host.Limit(3 * GIB, f"{MEMORY}/memory.stat", used=GIB)
    assert found.usable_memory == 2 * GIB


@pytest.mark.parametrize("name", ["memory.max", "memory.high", "memory.current", "memory.stat"])
@pytest.mark.parametrize("text", ["garbage", "-1", "", "9" * 30, "active_file x"])
def test_odd_memory_files_are_stated(tmp_path, name, text):
    files = v2_memory(UNIFIED, str(8 * GIB), used=4 * GIB, cache=GIB, high=str(9 * GIB))
    found = read(tmp_path, "0::/", [v2_mount()], files | {f"{UNIFIED}/{name}": text})
    stated = any(f"{UNIFIED}/{name}: " in line for line in found.unknown)
    assert stated or (name, text) == ("memory.current", "-1")
    assert found.memory_limit.value == (9 * GIB if name == "memory.max" else 8 * GIB)
    assert found.memory_limit.used in (0, 3 * GIB, 4 * GIB)


# Generated paths

LEVEL = st.fixed_dictionaries(
    {
        "quota": st.one_of(st.none(), st.integers(1, 800)),  # hundredths of a CPU
        "limit": st.one_of(st.none(), st.integers(0, 2**35)),
        "used": st.integers(0, 2**35),
        "cache": st.integers(0, 2**34),
        "cpus": st.one_of(st.none(), st.sets(st.integers(0, 5), min_size=1)),
    }
)
NAME = st.text("abc .:()-", min_size=1, max_size=5).filter(lambda name: name not in (".", ".."))


@settings(max_examples=40, deadline=None)
@given(
    levels=st.lists(st.tuples(NAME, LEVEL), min_size=1, max_size=5),
    hidden=st.integers(0, 4),
    version=st.sampled_from([1, 2]),
)
def test_any_path_gives_the_smallest_of_what_is_visible(levels, hidden, version):
    """Groups nested in one another; the mount shows all, or only those from some level on."""
    levels = [("", {"quota": None, "limit": None, "used": 0, "cache": 0, "cpus": None}), *levels]
    hidden = min(hidden, len(levels) - 1)
    names = [name for name, _ in levels[1:]]
    root = "/" + "/".join(names[:hidden])
    group = "/" + "/".join(names)
    points = {name: f"/sys/fs/cgroup/{name}" if version == 1 else UNIFIED for name in machines.V1_CONTROLLERS}
    files, visible = {}, []
    for depth in range(hidden, len(levels)):
        level, below = levels[depth][1], "".join(f"/{name}" for name in names[hidden:depth])
        visible.append(level)
        cpu, cpuset, memory = (points[name] + below for name in machines.V1_CONTROLLERS)
        cpus = "" if level["cpus"] is None else host.format_cpu_list(level["cpus"])
        files[f"{cpuset}/cpuset.cpus"] = cpus
        if version == 1:
            files |= v1_quota(cpu, -1 if level["quota"] is None else level["quota"] * 1000)
            limit = V1_UNLIMITED if level["limit"] is None else level["limit"]
            files |= v1_memory(memory, limit, level["used"], level["cache"], hierarchical=V1_UNLIMITED)
        else:
            quota = "max" if level["quota"] is None else level["quota"] * 1000
            files[f"{cpu}/cpu.max"] = f"{quota} 100000"
            limit = "max" if level["limit"] is None else str(level["limit"])
            files |= v2_memory(memory, limit, level["used"], level["cache"])
    escaped = root.replace(" ", "\\040")
    if version == 1:
        mounts = [v1_mount(name, escaped) for name in machines.V1_CONTROLLERS]
        own = "\n".join(f"{number}:{name}:{group}" for number, name in enumerate(machines.V1_CONTROLLERS, 1))
    else:
        mounts, own = [v2_mount(escaped)], f"0::{group}"
    with tempfile.TemporaryDirectory() as folder:
        found = read(Path(folder), own, mounts, files)
    _check(found, visible)


def _check(found, visible):
    """Against plain minima over the visible levels, outermost first."""
    quotas = [level["quota"] / 100 for level in visible if level["quota"] is not None]
    assert (found.quota and found.quota.value) == min(quotas, default=None)
    limited = [level for level in visible if level["limit"] is not None and level["limit"] < 16 * GIB]
    smallest = min((level["limit"] for level in limited), default=None)
    assert (found.memory_limit and found.memory_limit.value) == smallest
    left = [max(0, level["limit"] - max(0, level["used"] - level["cache"])) for level in limited]
    assert found.usable_memory == min([12 * GIB, *left])
    cpus = set(range(4))
    for level in reversed(visible):
        if level["cpus"] is not None and cpus & level["cpus"]:
            cpus &= level["cpus"]
    assert set(found.cpus) == cpus
    assert all("shares no CPU" in line for line in found.unknown)

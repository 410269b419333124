"""read_host() on generated machines: exact where files are in order, never an error where not."""

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import machines
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import GIB, Machine

from vllm_zen import host

UNIFIED = "/sys/fs/cgroup/unified"

# What is no answer at all, whichever file holds it; None stands for no file.
ODD = (b"\x00\xfe garbage", b"9" * 30, b"", None)

# Files whose absence says that there is no such limit, and those that may well be empty.
CPUSETS = {"cpuset.cpus", "cpuset.cpus.effective"}
LIMITS = {"cpu.max", "cpu.cfs_quota_us", "memory.max", "memory.high", "memory.limit_in_bytes"}
MAY_BE_EMPTY = {"cgroup", "cpulist", *CPUSETS}


@pytest.fixture(scope="module", autouse=True)
def quick_folder():
    """Hundreds of small trees: in memory where there is such a folder, as some disks take seconds for one."""
    before, shm = tempfile.tempdir, Path("/dev/shm")  # noqa: S108
    tempfile.tempdir = str(shm) if os.access(shm, os.W_OK) else before
    yield
    tempfile.tempdir = before


def check(found: host.Host) -> None:
    """What holds of every Host, whatever the files say."""
    assert list(found.cpus) == sorted(set(found.cpus))
    for groups in (found.cores, found.l3_groups, found.sockets, tuple(node.cpus for node in found.nodes)):
        assert sorted(cpu for group in groups for cpu in group) == list(found.cpus)
        assert all(group and list(group) == sorted(group) for group in groups)
    assert [node.id for node in found.nodes] == sorted({node.id for node in found.nodes})
    for limit in (found.quota, found.memory_limit, *found.memory_limits):
        assert limit is None or (limit.source.startswith("/") and limit.source.isprintable())
    assert found.quota is None or found.quota.value > 0
    assert found.l3_bytes is None or found.l3_bytes > 0
    usable = found.usable_memory
    assert usable is None or usable >= 0
    if None not in (usable, found.memory_available):
        assert usable <= found.memory_available
    if None not in (found.memory_limit, found.memory_total):
        assert found.memory_limit.value < found.memory_total
    assert found.mbind is None  # of another machine nobody can ask
    assert len(set(found.unknown)) == len(found.unknown)
    assert all("/" in sentence and sentence.isprintable() for sentence in found.unknown)
    assert set(host.vllm_auto_binding(found)) <= set(found.cpus)


@st.composite
def generated_machines(draw) -> Machine:
    """Up to two sockets of eight cores, with parts switched off."""
    nodes, per_node = draw(st.integers(0, 2)), draw(st.integers(1, 4))
    machine = Machine(
        sockets=draw(st.integers(1, 2)),
        cores=max(1, nodes) * per_node,
        threads=draw(st.integers(1, 2)),
        ccx=draw(st.sampled_from([per_node, 1, 0])),
        nodes=nodes,
        mounts=(machines.v2_mount(),),
    )
    return replace(machine, offline=frozenset(draw(st.sets(st.sampled_from(machine.online[1:] or [99])))))


@settings(max_examples=40, deadline=None)
@given(machine=generated_machines(), data=st.data())
def test_a_machine_in_order_is_read_exactly(machine, data):
    cpus = data.draw(st.sets(st.sampled_from(machine.online), min_size=1))
    affinity = cpus | data.draw(st.sets(st.integers(0, 200).filter(lambda cpu: cpu not in machine.online)))
    with tempfile.TemporaryDirectory() as folder:
        found = host.read_host(machines.build(Path(folder), machine), affinity)
    check(found)
    assert set(found.cpus) == cpus
    assert found.cores == machine.groups(machine.core_of, cpus)
    assert found.sockets == machine.groups(machine.socket_of, cpus)
    whole = (tuple(sorted(cpus)),)
    assert found.l3_groups == (machine.groups(machine.l3_of, cpus) if machine.ccx else whole)
    nodes = machine.groups(machine.node_of, cpus) if machine.nodes else whole
    by_number = sorted(nodes, key=lambda node: machine.node_of(node[0])) if machine.nodes else nodes
    assert [node.cpus for node in found.nodes] == list(by_number)
    assert len(found.unknown) == (not machine.ccx) + (not machine.nodes)


# A machine that uses every kind of file: both versions of cgroups, two groups deep.
FULL = Machine(
    sockets=2,
    cores=2,
    threads=2,
    ccx=1,
    cgroup="1:cpu:/\n2:cpuset:/\n3:memory:/app\n0::/app",
    mounts=(
        *map(machines.v1_mount, machines.V1_CONTROLLERS),
        machines.v2_mount(point=UNIFIED),
    ),
    files={
        "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000",
        "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        "/sys/fs/cgroup/cpuset/cpuset.cpus": "0-6",
        **machines.v1_memory("/sys/fs/cgroup/memory/app", 8 * GIB, used=GIB, cache=0),
        **machines.v1_memory("/sys/fs/cgroup/memory", 9 * GIB, used=GIB, cache=0),
        f"{UNIFIED}/app/cpu.max": "300000 100000",
        f"{UNIFIED}/cpuset.cpus.effective": "1-6",
        **machines.v2_memory(UNIFIED, str(7 * GIB), used=GIB, cache=0, high=str(6 * GIB)),
    },
)


@pytest.fixture(scope="module")
def full(quick_folder):
    folder = Path(tempfile.mkdtemp())
    yield machines.build(folder, FULL)
    shutil.rmtree(folder)


def test_any_one_file_gone_or_odd_is_stated_or_changes_nothing(full):
    clean = host.read_host(full)
    check(clean)
    assert clean.cpus == (1, 2, 3, 4, 5, 6) and clean.quota.value == 3 and clean.memory_limit.value == 6 * GIB
    for file in sorted(path for path in full.rglob("*") if path.is_file()):
        content = file.read_bytes()
        try:
            for odd in ODD:
                if odd is None:
                    file.unlink()
                else:
                    file.write_bytes(odd)
                found = host.read_host(full)
                check(found)
                stated = set(found.unknown) > set(clean.unknown)
                silent = {None: LIMITS | CPUSETS, b"": MAY_BE_EMPTY}
                # What another file says too may be missed: the second thread's siblings, the outer cpuset.
                assert stated or found == clean or file.name in silent.get(odd, ()), (file, odd)
        finally:
            file.write_bytes(content)


CHANGES = st.one_of(
    st.just("gone"),
    st.just("folder"),
    st.just("loop"),
    st.binary(max_size=40),
    st.text("0123456789-,: \\/.kKMmax\n\x00\x85\u0661", max_size=40).map(str.encode),
    st.sampled_from(
        [b"0-65535\n", b"9" * 5000, b"1-0", b"-1", b"0-99999999999", b"max max", b"1e5 1", b"0\n" * 999]
    ),
)
LINE = st.text("0123456789:/.,- \\\x00\n()=cpu", max_size=60)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_no_content_raises(full, data):
    """A few files at a time are replaced by anything a file system can hold; then the tree is as before."""
    files = sorted(path for path in full.rglob("*") if path.is_file())
    chosen = data.draw(st.dictionaries(st.sampled_from(files), CHANGES, max_size=6))
    contents = {file: file.read_bytes() for file in chosen}
    try:
        for file, change in chosen.items():
            file.unlink()
            if change == "folder":
                file.mkdir()
            elif change == "loop":
                file.symlink_to(file.name)
            elif change != "gone":
                file.write_bytes(change)
        check(host.read_host(full))
    finally:
        for file, content in contents.items():
            if file.is_dir():
                file.rmdir()
            else:
                file.unlink(missing_ok=True)
            file.write_bytes(content)


@settings(max_examples=80, deadline=None)
@given(
    cgroup=st.lists(st.one_of(LINE, LINE.map("0::/{}".format), LINE.map("1:cpu:/{}".format)), max_size=4),
    mounts=st.lists(
        st.one_of(LINE, st.builds(machines.v1_mount, LINE, LINE), st.builds(machines.v2_mount, LINE))
    ),
)
def test_no_cgroup_or_mountinfo_text_raises(full, cgroup, mounts):
    files = {full / "proc/self/cgroup": cgroup, full / "proc/self/mountinfo": mounts}
    contents = {file: file.read_bytes() for file in files}
    try:
        for file, lines in files.items():
            file.write_bytes("\n".join(lines).encode())
        check(host.read_host(full))
    finally:
        for file, content in contents.items():
            file.write_bytes(content)

"""Machines as their kernels describe them: /proc, /sys and the cgroup mounts, written below a folder.

A machine is a few numbers and the texts of its cgroups; build() writes the files vllm_zen.host reads, in the
layout and wording of Linux 6. MACHINES names those the tests are about.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from vllm_zen.host import format_cpu_list

GIB = 2**30
V1_UNLIMITED = 9223372036854771712


@dataclass(frozen=True)
class Machine:
    """CPUs are numbered as on EPYC: all first threads, socket by socket, then all second threads."""

    sockets: int = 1
    cores: int = 2  # of one socket
    threads: int = 1  # of one core
    ccx: int = 8  # cores that share an L3; 0 where no L3 is stated
    l3: str = "32768K"
    nodes: int = 1  # NUMA nodes of one socket; 0 where the kernel has no NUMA
    memory: int = 16  # GiB of the whole machine
    package_id: int | None = None  # what every CPU states, where that is not the number of its socket
    offline: frozenset[int] = frozenset()
    possible: int = 0  # CPUs the mask allows, where more than there are
    cgroup: str = "0::/"  # /proc/self/cgroup
    mounts: tuple[str, ...] = ()  # of mountinfo, see v1_mount() and v2_mount()
    files: Mapping[str, str] = field(default_factory=dict)  # further ones, by path

    @property
    def online(self) -> list[int]:
        total = self.sockets * self.cores * self.threads
        return [cpu for cpu in range(total) if cpu not in self.offline]

    def core_of(self, cpu: int) -> int:
        """The number of a CPU's core in the whole machine, and so on for the other parts."""
        return cpu % (self.sockets * self.cores)

    def socket_of(self, cpu: int) -> int:
        return self.core_of(cpu) // self.cores

    def l3_of(self, cpu: int) -> tuple[int, int]:
        return self.socket_of(cpu), (self.core_of(cpu) % self.cores) // self.ccx

    def node_of(self, cpu: int) -> int:
        within = (self.core_of(cpu) % self.cores) * self.nodes // self.cores
        return self.socket_of(cpu) * self.nodes + within

    def groups(self, key, cpus=None) -> tuple[tuple[int, ...], ...]:
        """The CPUs on line (or the given ones) grouped by one of the functions above."""
        groups: dict[object, list[int]] = {}
        for cpu in self.online if cpus is None else sorted(cpus):
            groups.setdefault(key(cpu), []).append(cpu)
        return tuple(sorted(map(tuple, groups.values())))


def v1_mount(controllers: str, root: str = "/", point: str | None = None) -> str:
    """A line of mountinfo for a v1 hierarchy, with escapes as given."""
    point = f"/sys/fs/cgroup/{controllers}" if point is None else point
    return f"32 31 0:29 {root} {point} rw,nosuid shared:9 - cgroup cgroup rw,{controllers}"


def v2_mount(root: str = "/", point: str = "/sys/fs/cgroup") -> str:
    return f"41 31 0:38 {root} {point} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot"


def write(root: Path, path: str, text: str) -> None:
    file = root / path.lstrip("/")
    try:
        file.write_text(f"{text}\n")
    except FileNotFoundError:
        file.parent.mkdir(parents=True)
        file.write_text(f"{text}\n")


def build(root: Path, machine: Machine) -> Path:
    """Writes the machine's files below `root`, which it returns."""
    online = format_cpu_list(machine.online)
    kilobytes = machine.memory * GIB // 1024
    mask = f"0-{machine.possible - 1}" if machine.possible else online
    shm = "25 24 0:23 / /dev/shm rw,nosuid - tmpfs shm rw,size=65536k"
    texts = {
        "/proc/self/cgroup": machine.cgroup,
        "/proc/self/mountinfo": "\n".join(["24 1 8:1 / / rw - ext4 /dev/root rw", shm, *machine.mounts]),
        "/proc/self/status": f"Name:\tpython\nCpus_allowed_list:\t{mask}\nMems_allowed_list:\t0",
        "/proc/meminfo": f"MemTotal:     {kilobytes} kB\nMemAvailable: {kilobytes * 3 // 4} kB",
        "/sys/devices/system/cpu/online": online,
        "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
        "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "0",
    }
    for path, text in texts.items():
        write(root, path, text)
    for line in machine.mounts:  # a mount without files is a folder all the same
        (root / line.split(" ")[4].lstrip("/")).mkdir(parents=True, exist_ok=True)
    for cpu in machine.offline:
        write(root, f"/sys/devices/system/cpu/cpu{cpu}/online", "0")
    _write_cpus(root, machine)
    for members in machine.groups(machine.node_of) if machine.nodes else ():
        number = machine.node_of(members[0])
        total = kilobytes // (machine.sockets * machine.nodes)
        write(root, f"/sys/devices/system/node/node{number}/cpulist", format_cpu_list(members))
        meminfo = f"Node {number} MemTotal:       {total} kB\nNode {number} MemFree:        1024 kB"
        write(root, f"/sys/devices/system/node/node{number}/meminfo", meminfo)
    for path, text in machine.files.items():
        write(root, path, text)
    return root


def _write_cpus(root: Path, machine: Machine) -> None:
    for core in machine.groups(machine.core_of):
        for cpu in core:
            folder = f"/sys/devices/system/cpu/cpu{cpu}"
            package = machine.socket_of(cpu) if machine.package_id is None else machine.package_id
            write(root, f"{folder}/topology/thread_siblings_list", format_cpu_list(core))
            write(root, f"{folder}/topology/physical_package_id", str(package))
            # Two L1 caches, of data and instructions, and one L2: read only where no L3 comes first.
            for index, level in enumerate("" if machine.ccx else "112"):
                write(root, f"{folder}/cache/index{index}/level", level)
    for members in machine.groups(machine.l3_of) if machine.ccx else ():
        for cpu in members:
            cache = {"level": "3", "size": machine.l3, "shared_cpu_list": format_cpu_list(members)}
            for name, text in cache.items():
                write(root, f"/sys/devices/system/cpu/cpu{cpu}/cache/index3/{name}", text)


def v1_memory(
    folder: str, limit: int, used: int, cache: int, hierarchical: int | None = None
) -> dict[str, str]:
    """The files of a v1 memory group; sizes in bytes, `cache` of them file pages, a third of it active."""
    stat = f"cache 1\nhierarchical_memory_limit {limit if hierarchical is None else hierarchical}\n"
    stat += f"inactive_file 1\ntotal_inactive_file {cache - cache // 3}\ntotal_active_file {cache // 3}"
    return {
        f"{folder}/memory.limit_in_bytes": str(limit),
        f"{folder}/memory.usage_in_bytes": str(used),
        f"{folder}/memory.stat": stat,
    }


def v2_memory(folder: str, limit: str, used: int, cache: int, high: str = "max") -> dict[str, str]:
    """The files of a v2 memory group, as above."""
    stat = f"anon 1\ninactive_file {cache - cache // 3}\nactive_file {cache // 3}\nslab 1"
    return {
        f"{folder}/memory.max": limit,
        f"{folder}/memory.high": high,
        f"{folder}/memory.current": str(used),
        f"{folder}/memory.stat": stat,
    }


V1_CONTROLLERS = ("cpu", "cpuset", "memory")
V1_GROUPS = "\n".join([f"{number}:{name}:/" for number, name in enumerate(V1_CONTROLLERS, 1)])

GENOA = Machine(cores=96, threads=2, memory=384, mounts=(v2_mount(),))

MACHINES: dict[str, Machine] = {
    # EPYC 9654, the whole socket one NUMA node.
    "genoa NPS1": GENOA,
    # The same, a node for each quarter: three CCDs and a quarter of the memory.
    "genoa NPS4": replace(GENOA, nodes=4),
    # The same, SMT switched off by the kernel: the second threads are off line, without a topology folder.
    "genoa nosmt": replace(GENOA, offline=frozenset(range(96, 192))),
    # Two EPYC 9655: 192 cores and 384 CPUs.
    "turin 2P": Machine(sockets=2, cores=96, threads=2, memory=1536, mounts=(v2_mount(),)),
    # docker run --cpus 1.5 --memory 4g: a namespace whose root is the container's group.
    "container": Machine(
        cores=8,
        threads=2,
        memory=64,
        mounts=(v2_mount(),),
        files={
            "/sys/fs/cgroup/cpu.max": "150000 100000",
            "/sys/fs/cgroup/cpuset.cpus.effective": "0-15",
            **v2_memory("/sys/fs/cgroup", str(4 * GIB), used=3 * GIB, cache=2 * GIB),
        },
    ),
    # docker run --cpuset-cpus 1 on two CPUs, v1 without a namespace; the mask of the caller is still wide.
    "cpuset 1 of 2": Machine(
        cgroup="3:cpuset:/docker/abc\n2:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc",
        mounts=tuple(v1_mount(name, "/docker/abc") for name in ("cpuset", "memory", "cpu,cpuacct")),
        files={
            "/sys/fs/cgroup/cpuset/cpuset.cpus": "1",
            "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            **v1_memory("/sys/fs/cgroup/memory", V1_UNLIMITED, used=GIB, cache=0),
        },
    ),
    # A WSL 2 guest: no NUMA folder, no huge pages, v1 and an empty v2, a mask wider than the guest.
    "wsl": Machine(
        cores=4,
        threads=2,
        nodes=0,
        possible=64,
        memory=8,
        cgroup=f"{V1_GROUPS}\n0::/",
        mounts=(*map(v1_mount, V1_CONTROLLERS), v2_mount(point="/sys/fs/cgroup/unified")),
        files={
            "/sys/fs/cgroup/unified/cgroup.procs": "1",
            "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "/sys/fs/cgroup/cpuset/cpuset.cpus": "0-7",
            **v1_memory("/sys/fs/cgroup/memory", V1_UNLIMITED, used=GIB, cache=0),
        },
    ),
    # An aarch64 server whose firmware describes no caches above level 2 and no packages.
    "aarch64": Machine(cores=64, ccx=0, package_id=-1, memory=128, mounts=(v2_mount(),)),
}

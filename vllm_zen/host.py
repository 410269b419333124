"""What this process may use of the machine, from the kernel's own files. Standard library only.

read_host() gathers it: CPUs, their sharing of cores, caches and memory, and every cgroup limit on the path
(cgroups.py, topology.py). Nothing here raises on what a machine says: what is missing or odd is a sentence in
Host.unknown, and the next best statement holds.
"""

import os
import platform
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from vllm_zen import cgroups, topology
from vllm_zen.cgroups import Limit, Mount
from vllm_zen.kernel_files import (
    MAX_CPUS,
    KernelFiles,
    UnreadableError,
    format_cpu_list,
    parse_cpu_list,
    parse_integer,
    shown,
)
from vllm_zen.topology import Groups, Node

__all__ = [
    "MAX_CPUS",
    "Host",
    "Limit",
    "Node",
    "allowed_cpus",
    "bound_cpus",
    "format_cpu_list",
    "parse_cpu_list",
    "read_host",
    "vllm_auto_binding",
]

SHM = "/dev/shm"  # noqa: S108 - its size is asked, nothing is put there

_HUGE = "/sys/kernel/mm"


@dataclass(frozen=True)
class Host:
    """What a process may use of its machine. None stands for what is not known or, of a limit, not there."""

    cpus: tuple[int, ...]  # affinity mask within every cpuset on the path
    cores: Groups  # of cpus, grouped by physical core (SMT siblings)
    l3_groups: Groups  # of cpus, grouped by shared L3 (CCD/CCX)
    l3_bytes: int | None  # size of one L3
    nodes: tuple[Node, ...]  # NUMA nodes with at least one of cpus; one node holding all where none is stated
    sockets: Groups  # of cpus, grouped by physical_package_id
    quota: Limit | None  # smallest CPU time quota on the path
    memory_total: int | None  # bytes, MemTotal
    memory_available: int | None  # bytes, MemAvailable
    memory_limit: Limit | None  # smallest memory limit on the path, only when below memory_total
    shm_bytes: int | None  # size of /dev/shm
    huge_pages: str  # the mode of transparent huge pages, or "unknown", and what is reserved if any
    mbind: bool | None  # whether set_mempolicy/mbind is permitted (None: unknown)
    unknown: tuple[str, ...]  # one sentence for each thing that could not be read, with its path
    # Every memory limit below memory_total, innermost group first. The smallest is not always the tightest: a
    # wider one further out may be nearly used up by its other groups.
    memory_limits: tuple[Limit, ...] = field(default=())
    online: int | None = None  # CPUs of the whole machine

    @property
    def usable_memory(self) -> int | None:
        """Bytes a new server may use: min(available, limit - used), over every limit on the path.

        What its nodes do not show counts as not available: a virtual machine's memory may be added as it is
        used, and vLLM refuses a KV cache larger than what a node has free.
        None where neither the machine nor a group says anything.
        """
        limits = self.memory_limits or ((self.memory_limit,) if self.memory_limit else ())
        left = [limit.remaining for limit in limits]
        if self.memory_available is not None:
            shown = [node.memory for node in self.nodes if node.memory is not None]
            hidden = (self.memory_total or 0) - sum(shown) if len(shown) == len(self.nodes) else 0
            left.append(max(0, self.memory_available - max(0, hidden)))
        return min(left, default=None)

    def cores_of(self, node: Node) -> Groups:
        """The cores of one node, each with the CPUs that lie in it."""
        here = set(node.cpus)
        cores = (tuple(cpu for cpu in core if cpu in here) for core in self.cores)
        return tuple(core for core in cores if core)

    def one_a_core(self, node: Node) -> list[int]:
        """The last CPU id of each core of a node, as in vLLM's own binding: siblings share its units."""
        return sorted(max(core) for core in self.cores_of(node))


def read_host(root: Path = Path("/"), affinity: Iterable[int] | None = None) -> Host:
    """Reads the machine whose /proc, /sys and /dev lie below `root`. Never raises on what stands there.

    `affinity` is the mask to start from; by default this thread's own or, below another root, the one in
    that tree's /proc/self/status.
    """
    files = KernelFiles(root)
    here = root == Path("/")
    mounts = cgroups.read_mounts(files)
    limits = cgroups.read_limits(files, mounts)
    mask = _affinity(files, here) if affinity is None else sorted(set(affinity))
    cpus = _within(files, mask, limits)
    memory = _memory(files)
    total = memory.get("MemTotal")
    memory_limits = tuple(limit for limit in limits.memory if total is None or limit.value < total)
    cores = topology.read_cores(files, cpus)
    l3_groups, l3_bytes = topology.read_l3(files, cpus)
    return Host(
        cpus=cpus,
        cores=cores,
        l3_groups=l3_groups,
        l3_bytes=l3_bytes,
        nodes=topology.read_nodes(files, cpus, total),
        sockets=topology.read_sockets(files, cores),
        quota=min(limits.quotas, key=_value, default=None),
        memory_total=total,
        memory_available=memory.get("MemAvailable"),
        memory_limit=min(memory_limits, key=_value, default=None),
        shm_bytes=_shm_bytes(files, mounts, total, here),
        huge_pages=_huge_pages(files),
        mbind=_mbind_permitted(files) if here else None,
        unknown=files.unknown,
        memory_limits=memory_limits,
        online=len(topology.online_cpus(files)) or None,
    )


def _value(limit: Limit) -> float:
    return limit.value


def _affinity(files: KernelFiles, here: bool) -> list[int]:
    """The affinity mask: the kernel's answer here, the tree's for another machine, else all CPUs on line."""
    if here:
        return allowed_cpus()
    status = "/proc/self/status"
    try:
        text = files.fields(status, ":").get("Cpus_allowed_list", "")
        return parse_cpu_list(text)
    except UnreadableError as error:
        files.note("the affinity mask", error)
    except ValueError:
        files.note("the affinity mask", f"{status}: no list in Cpus_allowed_list")
    return topology.online_cpus(files) or [0]


def _within(files: KernelFiles, mask: list[int], limits: cgroups.Limits) -> tuple[int, ...]:
    """The CPUs of the mask that are on line and in every cpuset.

    The mask alone may hold CPUs that are possible but not there. A list that shares no CPU with the rest is
    of another time or another view of the machine, and is passed over: a process that runs has a CPU.
    """
    cpus = mask
    bounds = [(f"{topology.CPU}/online", frozenset(topology.online_cpus(files))), *limits.cpusets]
    for source, bound in bounds:
        if not bound:
            continue
        inside = [cpu for cpu in cpus if cpu in bound]
        if cpus and not inside:
            what = f"{format_cpu_list(bound)} shares no CPU with {format_cpu_list(cpus)}, and is passed over"
            files.note("the CPUs this process may use", f"{source}: {what}")
        else:
            cpus = inside
    return tuple(cpus)


def _memory(files: KernelFiles) -> dict[str, int]:
    """MemTotal and MemAvailable in bytes, as far as stated."""
    path = "/proc/meminfo"
    memory: dict[str, int] = {}
    try:
        fields = files.fields(path, ":")
    except UnreadableError as error:
        files.note("the machine's memory", error)
        return memory
    for name in ("MemTotal", "MemAvailable"):
        text = fields.get(name, "")
        try:
            if (kilobytes := parse_integer(text.removesuffix(" kB"))) < 0:
                raise ValueError
            memory[name] = kilobytes * 1024
        except ValueError:
            files.note("the machine's memory", f"{path}: {name} is {shown(text)}")
    return memory


def _shm_bytes(files: KernelFiles, mounts: list[Mount], total: int | None, here: bool) -> int | None:
    """The size of the file system at /dev/shm: asked of it here, else from its mount options."""
    if here:
        try:
            status = os.statvfs(SHM)
            return status.f_frsize * status.f_blocks
        except OSError as error:
            files.note("the size of shared memory", f"{SHM}: {error.strerror}")
            return None
    for mount in mounts:
        if mount.point != SHM or mount.kind != "tmpfs":
            continue
        sizes = [option.removeprefix("size=") for option in mount.options if option.startswith("size=")]
        if not sizes and total is not None:
            return total // 2  # what the kernel gives a tmpfs without a size
        if sizes and re.fullmatch(r"[0-9]{1,16}k?", sizes[0]):  # the kernel shows kilobytes
            return int(sizes[0].removesuffix("k")) * (1024 if sizes[0].endswith("k") else 1)
    files.note("the size of shared memory", f"{cgroups.MOUNTINFO}: no size of {SHM}")
    return None


def _huge_pages(files: KernelFiles) -> str:
    """`madvise` or, with pages reserved, `madvise, 512 of 2048 kB reserved`."""
    path = f"{_HUGE}/transparent_hugepage/enabled"
    mode = "unknown"
    try:
        text = files.text(path)
        if chosen := re.search(r"\[([a-z]{1,20})\]", text):  # always [madvise] never
            mode = chosen[1]
        else:
            files.note("transparent huge pages", f"{path}: {shown(text)} names no mode")
    except UnreadableError as error:
        files.note("transparent huge pages", error)
    reserved = []
    try:
        for name in files.names(f"{_HUGE}/hugepages"):
            size = re.fullmatch(r"hugepages-([0-9]{1,12})kB", name)
            if size and (count := files.integer(f"{_HUGE}/hugepages/{name}/nr_hugepages")) > 0:
                reserved.append(f"{count} of {size[1]} kB reserved")
    except UnreadableError as error:
        files.note("reserved huge pages", error)
    return ", ".join([mode, *reserved])


# mbind, get_mempolicy and set_mempolicy, by the 64-bit system call tables of the Linux kernel.
_MEMPOLICY_CALLS = {"x86_64": (237, 239, 238), "aarch64": (235, 236, 237)}


def _mbind_permitted(files: KernelFiles) -> bool | None:
    """Whether this process may place memory on NUMA nodes. None, and a note, where that cannot be asked.

    A container's seccomp filter answers EPERM, a kernel without NUMA ENOSYS. The calls change nothing:
    get_mempolicy with no place for an answer, the other two with a mode that does not exist (EINVAL where
    they are let through).
    """
    import ctypes
    import errno

    numbers = _MEMPOLICY_CALLS.get(platform.machine())
    if numbers is None or sys.maxsize < 2**32:  # a 32-bit process has another table
        files.note("whether mbind is permitted", f"its number on {platform.machine()} is not known here")
        return None
    no_such_mode = 0x7FFF
    mbind, get_mempolicy, set_mempolicy = numbers
    try:
        syscall = ctypes.CDLL(None, use_errno=True).syscall
    except (OSError, AttributeError) as error:
        files.note("whether mbind is permitted", f"the C library's syscall(): {error}")
        return None
    syscall.restype = ctypes.c_long
    for call in (
        (get_mempolicy, 0, 0, 0, 0, 0),
        (set_mempolicy, no_such_mode, 0, 0),
        (mbind, 0, 0, no_such_mode, 0, 0, 0),
    ):
        ctypes.set_errno(0)
        failed = syscall(*(ctypes.c_long(argument) for argument in call)) != 0
        if failed and ctypes.get_errno() in (errno.EPERM, errno.EACCES, errno.ENOSYS):
            return False
    return True


def allowed_cpus() -> list[int]:
    """The CPU ids this process may be scheduled on."""
    return sorted(os.sched_getaffinity(0))


def bound_cpus(environ: dict[str, str] | None = None) -> list[int]:
    """The CPU ids that OpenMP threads are bound to, by the variables vLLM exports to its workers.

    Where none is set, or one is set by hand to something that is not a list, the affinity mask.
    """
    environ = dict(os.environ) if environ is None else environ
    kmp = environ.get("KMP_AFFINITY", "").partition("proclist=[")[2].partition("]")[0]
    places = environ.get("OMP_PLACES", "").strip("{}")
    for text in (kmp, environ.get("GOMP_CPU_AFFINITY", ""), places):
        try:
            if text:
                return parse_cpu_list(text)
        except ValueError:
            continue
    return allowed_cpus()


def vllm_auto_binding(machine: Host, reserved: int = 1) -> list[int]:
    """The CPU ids vLLM's automatic binding gives one worker.

    Of the first NUMA node, the last logical CPU of each core; the last `reserved` of those are kept for the
    scheduler unless there are no more than that (vllm/utils/ompmultiprocessing.py).
    """
    if not machine.nodes:
        return []
    chosen = machine.one_a_core(machine.nodes[0])
    return chosen[: len(chosen) - reserved] if len(chosen) > reserved else chosen

"""How CPUs share cores, L3 caches, sockets and memory, from sysfs. Standard library only.

lscpu is not asked: it may be absent, and prints dashes for CPUs that are off line. Each question takes the
CPUs it is about and answers with groups that hold each of them exactly once, ordered by their lowest CPU. A
shared list is read once for all CPUs it names: 1024 CPUs then cost two thousand small files, not fourteen.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_zen.kernel_files import KernelFiles, UnreadableError, format_cpu_list, parse_integer, shown

CPU = "/sys/devices/system/cpu"
NODE = "/sys/devices/system/node"

Groups = tuple[tuple[int, ...], ...]

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class Node:
    """One NUMA node."""

    id: int
    cpus: tuple[int, ...]  # only those this process may use
    memory: int | None  # bytes, MemTotal of the node


def online_cpus(files: KernelFiles) -> list[int]:
    """The CPUs that are switched on; an empty list, and a note, where that is not stated."""
    path = f"{CPU}/online"
    try:
        if cpus := files.cpu_list(path):
            return cpus
        files.note("which CPUs are on line", f"{path}: empty")
    except UnreadableError as error:
        files.note("which CPUs are on line", error)
    return []


def read_cores(files: KernelFiles, cpus: Sequence[int]) -> Groups:
    """`cpus` grouped by physical core. A CPU whose siblings are not stated is a core of its own."""

    def siblings(cpu: int) -> list[int]:
        try:
            return files.cpu_list(f"{CPU}/cpu{cpu}/topology/thread_siblings_list")
        except UnreadableError as error:
            if not error.missing:
                raise
            return files.cpu_list(f"{CPU}/cpu{cpu}/topology/core_cpus_list")  # its newer name

    groups, unstated = _shared(files, cpus, "the SMT siblings", siblings)
    return _ordered([*groups, *([cpu] for cpu in unstated)])


def read_l3(files: KernelFiles, cpus: Sequence[int]) -> tuple[Groups, int | None]:
    """`cpus` grouped by the L3 cache they share (a CCD or CCX), and the bytes of one L3, None where unknown.

    CPUs of which no L3 is stated are one group: nothing tells them apart. Where sizes differ, the smallest.
    """
    sizes: list[int] = []
    folders: list[str] = []

    def sharers(cpu: int) -> list[int]:
        folders.append(_l3_folder(files, cpu))
        return files.cpu_list(f"{folders[-1]}/shared_cpu_list")

    groups, unstated = _shared(files, cpus, "the L3 cache", sharers)
    for folder in folders:
        try:
            sizes.append(_size(files, f"{folder}/size"))
        except UnreadableError as error:  # once for all: one more sentence would say nothing new
            files.note("the size of an L3 cache", error)
            break
    return _ordered([*groups, unstated]), min(sizes, default=None)


def _l3_folder(files: KernelFiles, cpu: int) -> str:
    """The folder of a CPU's level 3 cache. Raises UnreadableError where there is none."""
    cache = f"{CPU}/cpu{cpu}/cache"
    # index3 on every x86; tried first because a listing of the folder costs more than the read.
    for name in ("index3", *files.names(cache)):
        try:
            if name.startswith("index") and files.integer(f"{cache}/{name}/level") == 3:
                return f"{cache}/{name}"
        except UnreadableError:
            continue
    raise UnreadableError(cache, "no cache of level 3 is listed")


def _size(files: KernelFiles, path: str) -> int:
    """Bytes, from `32768K`. Raises UnreadableError."""
    text = files.text(path)
    match = re.fullmatch(r"([0-9]{1,12})([KMG]?)", text)
    if match is None or int(match[1]) == 0:
        raise UnreadableError(path, f"{shown(text)} is no size")
    return int(match[1]) * _UNITS[match[2]]


def read_sockets(files: KernelFiles, cores: Groups) -> Groups:
    """The CPUs of `cores` grouped by physical package. Cores of which none is stated are one group."""
    packages: dict[int, list[int]] = {}
    unstated: list[int] = []
    reason: object = None
    for core in cores:  # a core lies in one package: one file says it for all its threads
        path = f"{CPU}/cpu{core[0]}/topology/physical_package_id"
        try:
            package = files.integer(path)
            if package < 0:  # -1 on some aarch64 and virtual machines: not known
                raise UnreadableError(path, f"{package} is no package")
            packages.setdefault(package, []).extend(core)
        except UnreadableError as error:
            unstated.extend(core)
            reason = reason or error
    if unstated:
        files.note(f"the socket of CPUs {format_cpu_list(unstated)}", reason)
    return _ordered([*packages.values(), unstated])


def read_nodes(files: KernelFiles, cpus: Sequence[int], memory_total: int | None) -> tuple[Node, ...]:
    """The NUMA nodes that hold any of `cpus`, by number.

    One node 0 with all of them and all memory where no node is stated. A CPU that no node claims counts to
    the lowest one, so that every CPU has exactly one node.
    """
    remaining = set(cpus)
    nodes: list[Node] = []
    for number in _node_numbers(files):
        try:
            here = remaining.intersection(files.cpu_list(f"{NODE}/node{number}/cpulist"))
        except UnreadableError as error:
            files.note(f"the CPUs of NUMA node {number}", error)
            continue
        remaining -= here
        if here:
            nodes.append(Node(number, tuple(sorted(here)), _node_memory(files, number)))
    if not cpus:
        return ()
    if not nodes:
        return (Node(0, tuple(sorted(cpus)), memory_total),)
    if remaining:
        files.note(
            f"the NUMA node of CPUs {format_cpu_list(remaining)}", f"no {NODE}/node*/cpulist names them"
        )
        first = nodes[0]
        nodes[0] = Node(first.id, tuple(sorted({*first.cpus, *remaining})), first.memory)
    return tuple(nodes)


def _node_numbers(files: KernelFiles) -> list[int]:
    try:
        names = files.names(NODE)
    except UnreadableError as error:
        files.note("NUMA nodes", error)
        return []
    numbers = sorted(int(name[4:]) for name in names if re.fullmatch(r"node[0-9]{1,6}", name))
    if not numbers:
        files.note("NUMA nodes", f"{NODE}: no node is listed")
    return numbers


def _node_memory(files: KernelFiles, number: int) -> int | None:
    """Bytes, from `Node 0 MemTotal:  1234 kB`."""
    path = f"{NODE}/node{number}/meminfo"
    try:
        for line in files.text(path).split("\n"):
            words = line.split()
            if words[2:3] == ["MemTotal:"] and words[4:] == ["kB"]:
                return parse_integer(words[3]) * 1024
        raise ValueError("no MemTotal in kB")
    except UnreadableError as error:
        files.note(f"the memory of NUMA node {number}", error)
    except ValueError as error:
        files.note(f"the memory of NUMA node {number}", f"{path}: {error}")
    return None


def _shared(
    files: KernelFiles, cpus: Sequence[int], what: str, sharers: Callable[[int], list[int]]
) -> tuple[list[list[int]], list[int]]:
    """Groups of `cpus` by a list each names, and those of which none is stated (noted once for all of them).

    The first list that names a CPU counts; where one omits the CPU it was read of, it says nothing.
    """
    remaining = dict.fromkeys(sorted(cpus))
    groups: list[list[int]] = []
    unstated: list[int] = []
    reason: object = None
    for cpu in list(remaining):
        if cpu not in remaining:
            continue
        try:
            named = sharers(cpu)
            if cpu not in named:
                raise UnreadableError(f"{CPU}/cpu{cpu}", f"its list {format_cpu_list(named)!r} omits itself")
        except UnreadableError as error:
            unstated.append(cpu)
            reason = reason or error
            del remaining[cpu]
            continue
        group = [other for other in named if other in remaining]
        for other in group:
            del remaining[other]
        groups.append(group)
    if unstated:
        files.note(f"{what} of CPUs {format_cpu_list(unstated)}", reason)
    return groups, unstated


def _ordered(groups: Sequence[Sequence[int]]) -> Groups:
    return tuple(sorted(tuple(sorted(group)) for group in groups if group))

"""The limits of every control group this process stands in, from its own to the outermost one it can see.

Standard library only. cgroup v1 (a hierarchy of its own for each controller), v2 (one for all) and both at
once: /proc/self/cgroup says which group of each hierarchy is ours, /proc/self/mountinfo where the hierarchies
are mounted and from which group on. A limit holds for all below it, so the whole path counts. What lies above
the mount, as it does in a container, is seen only where v1's hierarchical_memory_limit tells.
"""

import re
from dataclasses import dataclass, replace

from vllm_zen.kernel_files import KernelFiles, UnreadableError, parse_integer, printable, shown

CGROUP = "/proc/self/cgroup"
MOUNTINFO = "/proc/self/mountinfo"

# v1 has no word for "unlimited": it shows the largest number of pages that fits, 2**63 less a page.
_UNLIMITED = 2**62

_MAX_PATH = 4096  # PATH_MAX: nothing longer can be opened


@dataclass(frozen=True)
class Limit:
    """What one group grants to all processes in and below it."""

    value: float  # CPUs of time, or bytes
    source: str  # the file that gave it, e.g. /sys/fs/cgroup/cpu/foo/cpu.cfs_quota_us
    used: int = 0  # memory only: bytes already used in that group, page cache that can be dropped not counted

    @property
    def remaining(self) -> int:
        """Memory only: bytes that are left, never negative."""
        return max(0, int(self.value) - self.used)


@dataclass(frozen=True)
class Limits:
    """All limits on the path of each controller, innermost first."""

    quotas: tuple[Limit, ...] = ()
    memory: tuple[Limit, ...] = ()
    cpusets: tuple[tuple[str, frozenset[int]], ...] = ()  # the file, and the CPUs it allows


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo. Texts are unescaped."""

    point: str
    root: str  # the folder of the file system that is mounted there; of a cgroup mount, the group
    kind: str  # cgroup, cgroup2, tmpfs, ...
    options: tuple[str, ...]  # of the file system; of a cgroup mount, the controllers among them


@dataclass(frozen=True)
class Group:
    """One group on the path, by the folder that shows it."""

    folder: str
    version: int  # 1 or 2


def read_mounts(files: KernelFiles) -> list[Mount]:
    """What is mounted, less what a later mount on the same point hides. Notes what is unreadable."""
    try:
        text = files.text(MOUNTINFO)
    except UnreadableError as error:
        files.note("mounts, and with them every cgroup limit", error)
        return []
    mounts: dict[str, Mount] = {}
    for line in text.split("\n"):
        fields = line.split(" ")
        # 31 23 0:28 ROOT POINT options [tags ...] - KIND source OPTIONS
        if "-" not in fields[6:]:
            continue
        tail = fields[fields.index("-", 6) + 1 :]
        point = _unescape(fields[4])
        if len(tail) < 3 or not point.startswith("/") or ".." in point.split("/"):
            continue
        mounts[point] = Mount(point.rstrip("/"), _unescape(fields[3]), tail[0], tuple(tail[2].split(",")))
    return list(mounts.values())


def _unescape(text: str) -> str:
    r"""A blank in a path stands there as \040, and so on."""
    return re.sub(r"\\([0-3][0-7]{2})", lambda match: chr(int(match[1], 8)), text)


def read_limits(files: KernelFiles, mounts: list[Mount]) -> Limits:
    """Reads every limit on the path. Never raises: what is missing or odd is noted in `files`."""
    try:
        own = _own_groups(text := files.text(CGROUP))
        if text and not own:  # an empty file is a kernel without cgroups, or with none mounted
            raise UnreadableError(CGROUP, f"{shown(text)} names no group")
    except UnreadableError as error:
        files.note("this process's cgroup, and with it every limit", error)
        return Limits()
    quotas = [_quota(files, group) for group in _path(files, mounts, own, "cpu")]
    cpusets = [_cpuset(files, group) for group in _path(files, mounts, own, "cpuset")]
    memory_path = _path(files, mounts, own, "memory")
    memory = [limit for group in memory_path for limit in _memory(files, group)]
    memory += _memory_above(files, memory_path, memory)
    return Limits(
        quotas=tuple(limit for limit in quotas if limit is not None),
        memory=tuple(memory),
        cpusets=tuple(cpus for cpus in cpusets if cpus is not None),
    )


def _own_groups(text: str) -> dict[str, str]:
    """This process's group for each v1 controller, and under the empty name for v2."""
    groups: dict[str, str] = {}
    for line in text.split("\n"):
        number, colon, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if number.isdecimal() and colon and path.startswith("/"):
            groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


def _path(files: KernelFiles, mounts: list[Mount], own: dict[str, str], controller: str) -> list[Group]:
    """The groups that may limit this controller, innermost first, v1 before v2.

    Where both are mounted, a controller is in one of them; in the other its files are missing, so that asking
    both does no harm.
    """
    v1 = [mount for mount in mounts if mount.kind == "cgroup" and controller in mount.options]
    v2 = [mount for mount in mounts if mount.kind == "cgroup2"]
    groups = []
    for version, name, candidates in ((1, controller, v1), (2, "", v2)):
        if name in own:
            folders = _folders(files, candidates, own[name], controller)
            groups += [Group(folder, version) for folder in folders]
    if not groups and (controller in own or "" in own):
        files.note(f"limits of the {controller} controller", f"no cgroup of ours is mounted ({MOUNTINFO})")
    return groups


def _folders(files: KernelFiles, mounts: list[Mount], group: str, controller: str) -> list[str]:
    """The folders of the group and all above it, by the mount that shows most of them.

    A group that no mount shows (another namespace's view, or one deleted since) leaves those above it, at
    least the mount's own.
    """
    best: tuple[bool, list[str]] = (False, [])
    for mount in mounts:
        parts = _below(group, mount.root)
        levels = range(len(parts or []), -1, -1)
        folders = ["/".join([mount.point, *(parts or [])[:level]]) for level in levels]
        there = [folder for folder in folders if files.is_folder(folder)]
        found = parts is not None and there[:1] == folders[:1]
        if there and (found, len(there)) > (best[0], len(best[1])):
            best = (found, there)
    found, there = best
    if there and not found:
        seen = f"only {printable(there[0])} and above is seen"
        files.note(f"limits of the {controller} controller", f"{CGROUP} names {shown(group)}, but {seen}")
    return there


def _below(group: str, root: str) -> list[str] | None:
    """The names that lead from the mounted group to ours, or None where ours is not below it."""
    parts, above = ([part for part in path.split("/") if part] for path in (group, root))
    if parts == above:
        return []
    below = parts[len(above) :]
    # Names seen from a cgroup namespace start with .. for what lies outside: no folder has such a name.
    outside = ".." in below or ".." in above or len(group) > _MAX_PATH
    return None if outside or parts[: len(above)] != above else below


def _quota(files: KernelFiles, group: Group) -> Limit | None:
    """The group's CPU time as CPUs: time granted in a period, by the length of the period."""
    source = f"{group.folder}/{'cpu.max' if group.version == 2 else 'cpu.cfs_quota_us'}"
    try:
        granted, _, period_text = files.text(source).partition(" ")
        if granted == ("max" if group.version == 2 else "-1"):  # unlimited
            return None
        if group.version == 1:
            period_text = files.text(f"{group.folder}/cpu.cfs_period_us")
        quota, period = parse_integer(granted), parse_integer(period_text)
        if quota <= 0 or period <= 0:
            raise ValueError(f"{quota} of {period} microseconds is no share of time")
    except ValueError as error:
        files.note("a CPU time quota", f"{printable(source)}: {error}")
        return None
    except UnreadableError as error:
        # Without the first file there is no quota: v2's root has none, nor a group not given the controller.
        if not error.missing or error.path != source:
            files.note("a CPU time quota", error)
        return None
    return Limit(quota / period, printable(source))


def _cpuset(files: KernelFiles, group: Group) -> tuple[str, frozenset[int]] | None:
    """The CPUs the group allows. Its effective list where there is one: its own may be empty or too wide."""
    effective = "cpuset.cpus.effective" if group.version == 2 else "cpuset.effective_cpus"
    for name in (effective, "cpuset.cpus"):
        source = f"{group.folder}/{name}"
        try:
            if cpus := files.cpu_list(source):
                return printable(source), frozenset(cpus)
        except UnreadableError as error:
            if not error.missing:
                files.note("the CPUs of a cpuset", error)
    return None


def _memory(files: KernelFiles, group: Group) -> list[Limit]:
    """The group's own memory limits in bytes, with what is used.

    v2's memory.high counts like memory.max: above it nothing is killed, but everything waits for reclaim.
    """
    names = ("memory.max", "memory.high") if group.version == 2 else ("memory.limit_in_bytes",)
    limits = []
    for name in names:
        source = f"{group.folder}/{name}"
        try:
            text = files.text(source)
            value = _UNLIMITED if text == "max" else parse_integer(text)
            if value < 0:
                raise ValueError(f"{value} is no size")
            if value < _UNLIMITED:
                limits.append(Limit(value, printable(source)))
        except ValueError as error:
            files.note("a memory limit", f"{printable(source)}: {error}")
        except UnreadableError as error:
            if not error.missing:
                files.note("a memory limit", error)
    if not limits:
        return []
    used = _memory_used(files, group)
    return [replace(limit, used=used) for limit in limits]


def _memory_used(files: KernelFiles, group: Group) -> int:
    """Bytes used in the group and below it, less file pages: the kernel drops those before it refuses memory.

    tmpfs (/dev/shm) and locked pages are on other lists and stay counted. 0, and a note, where unknown.
    """
    name, prefix = ("memory.current", "") if group.version == 2 else ("memory.usage_in_bytes", "total_")
    try:
        used = files.integer(f"{group.folder}/{name}")
    except UnreadableError as error:
        files.note("memory used in a cgroup", error)
        return 0
    stat = f"{group.folder}/memory.stat"
    try:
        fields = files.fields(stat)
        used -= sum(parse_integer(fields[f"{prefix}{age}_file"]) for age in ("active", "inactive"))
    except UnreadableError as error:
        files.note("page cache in a cgroup", error)
    except (KeyError, ValueError):
        files.note(
            "page cache in a cgroup", f"{printable(stat)}: no {prefix}active_file, {prefix}inactive_file"
        )
    return max(0, used)


def _memory_above(files: KernelFiles, path: list[Group], limits: list[Limit]) -> list[Limit]:
    """A smaller limit above the mount, which v1 names in the group's statistics; none or one.

    What is used up there cannot be seen; what the outermost visible group uses is a part of it.
    """
    groups = [group for group in path if group.version == 1]
    if not groups:
        return []
    source = f"{groups[0].folder}/memory.stat"
    try:
        value = parse_integer(files.fields(source)["hierarchical_memory_limit"])
    except UnreadableError as error:
        files.note("a memory limit further out", error)
        return []
    except (KeyError, ValueError):
        files.note("a memory limit further out", f"{printable(source)}: no hierarchical_memory_limit")
        return []
    if not 0 <= value < min((limit.value for limit in limits), default=_UNLIMITED):
        return []
    return [Limit(value, printable(source), _memory_used(files, groups[-1]))]

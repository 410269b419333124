"""What this process may use of the machine. Standard library only; every path is a parameter."""

import os
import re
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
SYSFS = Path("/sys/devices/system")


def parse_cpu_list(text: str) -> list[int]:
    """`0-3,8 10` to [0, 1, 2, 3, 8, 10]: ids and ranges, split by commas or spaces. Raises ValueError."""
    ids: set[int] = set()
    for part in re.split(r"[,\s]+", text.strip()):
        low, dash, high = part.partition("-")
        run = range(int(low), int(high) + 1) if dash else [int(low)]
        if not run:
            raise ValueError(f"{part!r} is not a range: it ends before it starts")
        ids.update(run)
    return sorted(ids)


def format_cpu_list(ids: list[int]) -> str:
    """[0, 1, 2, 8] to `0-2,8`."""
    parts: list[list[int]] = []
    for cpu in sorted(set(ids)):
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in parts)


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


def cpu_quota(root: Path = CGROUP_ROOT) -> float | None:
    """CPUs worth of time the cgroup grants at its mount root (v2 cpu.max or v1 cfs), or None: unlimited."""
    try:
        quota, _, period = (root / "cpu.max").read_text().partition(" ")
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        pass
    try:
        quota_us = int((root / "cpu" / "cpu.cfs_quota_us").read_text())
        period_us = int((root / "cpu" / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota_us / period_us if quota_us > 0 and period_us > 0 else None


def memory_limit(root: Path = CGROUP_ROOT) -> int:
    """Bytes of memory this process may use: the machine's, or the limit at the cgroup's mount root."""
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limit = min(limit, int((root / name).read_text()))
        except (OSError, ValueError):  # not this version of cgroups, or `max`
            continue
    return limit


def physical_cores(cpus: list[int], sysfs: Path = SYSFS) -> list[list[int]]:
    """The given CPU ids grouped by the core they share. Where the topology is not stated, each is its own."""
    cores: dict[tuple[int, ...], list[int]] = {}
    for cpu in cpus:
        try:
            siblings = parse_cpu_list((sysfs / f"cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except (OSError, ValueError):
            siblings = [cpu]
        cores.setdefault(tuple(siblings), []).append(cpu)
    return list(cores.values())


def numa_nodes(cpus: list[int], sysfs: Path = SYSFS) -> list[list[int]]:
    """The given CPU ids grouped by NUMA node, nodes without any left out. One group where none is stated."""
    nodes = []
    for folder in sorted((sysfs / "node").glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        try:
            members = set(parse_cpu_list((folder / "cpulist").read_text()))
        except (OSError, ValueError):
            continue
        if here := [cpu for cpu in cpus if cpu in members]:
            nodes.append(here)
    return nodes or [cpus]


def vllm_auto_binding(cpus: list[int], sysfs: Path = SYSFS) -> list[int]:
    """The CPU ids vLLM's automatic binding gives one worker.

    Of the first NUMA node, the last logical CPU of each core; the last of those is kept for the scheduler
    unless it is the only one (vllm/utils/ompmultiprocessing.py).
    """
    node = numa_nodes(cpus, sysfs)[0]
    chosen = sorted(max(core) for core in physical_cores(node, sysfs))
    return chosen[:-1] if len(chosen) > 1 else chosen

"""vLLM's own CPU variables: checked before anything is started, and the thread default corrected.

Left alone, a wrong value of these ends in a bare conversion or assertion error deep in a worker, in a hang,
or in threads outside the CPUs this process may use. Standard library only.
"""

import multiprocessing
import sys
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from vllm_zen import host
from vllm_zen.errors import EnvironmentVariableError, UnsupportedError
from vllm_zen.host import Host, Limit

BIND = "VLLM_CPU_OMP_THREADS_BIND"
RESERVED = "VLLM_CPU_NUM_OF_RESERVED_CPU"
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"

# Up to this many cores, one kept idle for the scheduler costs more than sharing it with a compute thread.
COMPUTE_ON_ALL_UP_TO = 4


@dataclass(frozen=True)
class Correction:
    """A variable's new value, and the line that says so."""

    name: str
    value: str | None  # None where it stays as it is, and the line warns of what that means here
    why: str
    of_user: bool = True  # False where the user chose nothing and vLLM's default is corrected


def check_binding(environ: Mapping[str, str], ranks: int, allowed: Sequence[int]) -> list[Correction]:
    """Checks VLLM_CPU_OMP_THREADS_BIND for `ranks` workers on this host that may use the CPUs `allowed`.

    Returns corrections of harmless mistakes (blanks, duplicates, empty text). Raises
    EnvironmentVariableError for what cannot be meant: not a list, CPUs that are not ours, a list count that
    is not the number of workers.
    """
    given = environ.get(BIND)
    if given is None:
        return []
    value = given.strip()
    if value in ("", "auto", "nobind"):
        value = value or "auto"
        return [] if value == given else [Correction(BIND, value, f"{BIND}={given!r} is taken as {value!r}")]
    lists = value.split("|")
    if len(lists) != ranks:
        raise EnvironmentVariableError(
            f"{BIND}={given!r} holds {len(lists)} CPU lists for {ranks} workers on this host; it takes "
            f"one list a worker, separated by |. Unset it to let vLLM bind."
        )
    cleaned = "|".join(_check_list(given, text, allowed) for text in lists)
    if cleaned == given:
        return []
    return [Correction(BIND, cleaned, f"{BIND}={given!r} is taken as {cleaned!r}")]


def _check_list(given: str, text: str, allowed: Sequence[int]) -> str:
    """One worker's list with blanks and duplicates removed."""
    ids: list[int] = []
    for part in text.replace(" ", "").split(","):
        low, dash, high = part.partition("-")
        if not (_is_number(low) and (_is_number(high) or not dash)):
            raise EnvironmentVariableError(
                f"{BIND}={given!r}: {part!r} is neither a CPU id nor a range like 0-3. It takes auto, "
                f"nobind or lists such as {host.format_cpu_list(allowed)}. Unset it to let vLLM bind."
            )
        if dash and int(high) < int(low):
            raise EnvironmentVariableError(
                f"{BIND}={given!r}: the range {part!r} runs backwards. Write {high}-{low}."
            )
        if int(high or low) >= host.MAX_CPUS:  # no machine's, and too long a range to spell out
            raise _outside(given, part, allowed)
        ids.extend(range(int(low), int(high if dash else low) + 1))
    outside = set(ids) - set(allowed)
    if outside:
        raise _outside(given, host.format_cpu_list(outside), allowed)
    if len(set(ids)) == len(ids) and " " not in text:
        return text
    return host.format_cpu_list(ids)


def _outside(given: str, cpus: str, allowed: Iterable[int]) -> EnvironmentVariableError:
    return EnvironmentVariableError(
        f"{BIND}={given!r} names CPUs {cpus}, but this process may use {host.format_cpu_list(allowed)} only. "
        f"Use those, or unset it to let vLLM bind."
    )


def _is_number(text: str) -> bool:
    # 18 digits are more than any count here; int() refuses texts of thousands with another error.
    return text.isascii() and text.isdecimal() and len(text) <= 18


def check_reserved(environ: Mapping[str, str], cores: int) -> None:
    """Checks VLLM_CPU_NUM_OF_RESERVED_CPU against the cores of this process.

    Raises EnvironmentVariableError unless it is a number that leaves at least one core to compute on.
    """
    given = environ.get(RESERVED)
    if given is None:
        return
    if not _is_number(given.strip()) or int(given) >= cores:
        raise EnvironmentVariableError(
            f"{RESERVED}={given!r} must be a whole number from 0 to {cores - 1}: this process has "
            f"{cores} cores, and at least one must compute. Unset it for vLLM's choice."
        )


def check_kv_space(environ: Mapping[str, str], memory: int) -> None:
    """Checks VLLM_CPU_KVCACHE_SPACE, whole GiB, against the memory in bytes this process may use.

    Raises EnvironmentVariableError for text, zero, negative numbers and more than there is.
    """
    given = environ.get(KV_SPACE)
    if given is None or given == "":
        return
    limit = memory // 2**30
    if not _is_number(given.strip()) or not 1 <= int(given) <= limit:
        raise EnvironmentVariableError(
            f"{KV_SPACE}={given!r} must be a whole number of GiB, without a unit, from 1 to {limit} (the "
            f"memory this process may use). Unset it for vLLM's choice."
        )


def is_left_to_vllm(environ: Mapping[str, str]) -> bool:
    """Whether the user has chosen neither CPUs nor how many to keep back."""
    return environ.get(BIND, "auto").strip() in ("", "auto") and RESERVED not in environ


def split_cores(nodes: list[list[int]], ranks: int) -> list[list[int]]:
    """Cores for each of `ranks` workers, given one CPU id a core and one list a NUMA node.

    No core twice, and no worker on two nodes: weights and KV cache stand in the memory of one. Up to one
    worker a node, each has a whole node. Beyond that the nodes take workers in proportion to their cores,
    and the workers of one node share it evenly, the first ones taking what is left over.

    Raises UnsupportedError for more workers than cores: they spin while they wait for each other.
    """
    cores = sum(len(node) for node in nodes)
    if ranks > cores:
        raise UnsupportedError(
            f"{ranks} workers on this host are refused: it has {cores} cores for this process, and workers "
            f"that share one wait for each other in turns. Lower the tensor, pipeline or data parallel size, "
            f"or place them by hand: {BIND} takes one CPU list a worker, separated by |."
        )
    if ranks <= len(nodes):
        return nodes[:ranks]
    workers = [1] * len(nodes)
    for _ in range(ranks - len(nodes)):
        roomiest = max(range(len(nodes)), key=lambda index: len(nodes[index]) / (workers[index] + 1))
        workers[roomiest] += 1
    lists = []
    for node, count in zip(nodes, workers, strict=True):
        share, left_over = divmod(len(node), count)
        begin = 0
        for index in range(count):
            end = begin + share + (index < left_over)
            lists.append(node[begin:end])
            begin = end
    return lists


def worker_cores(nodes: list[list[int]], ranks: int, quota: Limit | None) -> list[list[int]]:
    """The cores on which each of `ranks` workers computes."""
    return computing(split_cores(nodes, ranks), quota)


def computing(lists: list[list[int]], quota: Limit | None) -> list[list[int]]:
    """Each worker's cores that compute: not those above the CPU time quota, nor one of a large worker.

    As vLLM does with one worker a node, the last core of each is kept for the scheduler and the server, but
    not of a small one (see COMPUTE_ON_ALL_UP_TO).
    """
    if quota is not None and quota.value < sum(len(cores) for cores in lists):
        return [cores[: max(1, int(quota.value / len(lists)))] for cores in lists]
    return [cores[:-1] if len(cores) > COMPUTE_ON_ALL_UP_TO else cores for cores in lists]


def better_default(
    environ: Mapping[str, str], ranks: int, nodes: list[list[int]], quota: Limit | None
) -> list[Correction]:
    """What to bind to where vLLM's automatic choice is harmful and the user made none.

    `nodes` holds, for each NUMA node, one CPU id for each core this process may use. On few cores vLLM keeps
    one idle for its scheduler, which on two is half the machine; and it does not look at the CPU time quota,
    above which threads only wait for each other. Several workers it binds only where each has a node of its
    own, and those of data parallel engines all to the first node (vllm/utils/ompmultiprocessing.py).
    """
    cores = nodes[0] if nodes else []
    if not is_left_to_vllm(environ) or not cores:
        return []
    if ranks > 1:
        value = "|".join(host.format_cpu_list(chosen) for chosen in worker_cores(nodes, ranks, quota))
        line = f"{ranks} workers get cores of their own ({BIND}={value}). Set {BIND} to place them yourself"
        return [Correction(BIND, value, line, of_user=False)]
    [chosen] = computing([cores], quota)
    if quota is not None and quota.value < len(cores):
        threads = "1 compute thread" if len(chosen) == 1 else f"{len(chosen)} compute threads"
        why = f"{describe_quota(quota)}: {threads}"
    elif 1 < len(cores) <= COMPUTE_ON_ALL_UP_TO:
        why = f"all {len(cores)} cores compute, where vLLM would keep one for its scheduler"
    else:
        return []
    value = host.format_cpu_list(chosen)
    line = f"{why} ({BIND}={value}). {BIND}=auto with {RESERVED}=1 keeps vLLM's choice"
    return [Correction(BIND, value, line, of_user=False)]


def describe_quota(quota: Limit) -> str:
    """`the CPU time quota is 1.5 CPUs (FILE)`."""
    return f"the CPU time quota is {quota.value:g} CPU{'' if quota.value == 1 else 's'} ({quota.source})"


def compute_cpus(environ: Mapping[str, str], machine: Host) -> list[list[int]]:
    """The CPU ids that compute threads get, one list a worker; one worker's where vLLM binds by itself.

    `environ` as apply() left it.
    """
    value = environ.get(BIND, "auto")
    if value == "nobind":
        return [list(machine.cpus)]
    if value == "auto":
        return [host.vllm_auto_binding(machine, int(environ.get(RESERVED, "1")))]
    return [host.parse_cpu_list(text) for text in value.split("|")]


def quota_warnings(
    environ: Mapping[str, str], quota: Limit | None, threads: int, ours: bool
) -> list[Correction]:
    """What a CPU time quota below one CPU means, and that more `threads` than it pays for were asked for.

    `ours` where the binding is not the user's: a worker has one thread at least, whatever the quota.

    What the user asked for stays: the quota may be raised while the server runs. `environ` is as apply()
    left it.
    """
    if quota is None:
        return []
    lines = []
    if quota.value < 1:
        lines.append(
            f"{describe_quota(quota)}: less than one CPU is available, and each step waits for its share"
        )
    if threads > max(1, quota.value) and not ours:
        setting = f"{BIND}={environ.get(BIND, 'auto')} gives {threads} compute threads"
        way_out = f"Unset {BIND} and {RESERVED} for as many as it pays for"
        lines.append(f"{setting}, but {describe_quota(quota)}: they wait for each other. {way_out}")
    return [Correction(BIND, None, line) for line in lines]


def check(environ: Mapping[str, str], ranks: int, machine: Host) -> list[Correction]:
    """Checks all three variables for `ranks` workers on a host; returns corrections of harmless mistakes.

    Raises EnvironmentVariableError.
    """
    check_reserved(environ, len(machine.cores))
    check_kv_space(environ, _memory(machine))
    return check_binding(environ, ranks, machine.cpus)


def check_under_ray(environ: MutableMapping[str, str]) -> None:
    """Refuses CPU lists where Ray starts the workers: one variable cannot be right on every machine.

    Takes back what apply() wrote for an earlier engine. Raises EnvironmentVariableError.
    """
    given = environ.get(BIND, "auto")
    if given == _written.get(BIND):
        del environ[BIND]
    elif given.strip() not in ("", "auto", "nobind"):
        raise EnvironmentVariableError(
            f"{BIND}={given!r} is refused with Ray, whose workers bind themselves on each machine. It takes "
            f"auto or nobind there. Give cores to the Ray node instead: taskset -c 0-31 ray start ..."
        )


def cores_of_nodes(machine: Host) -> list[list[int]]:
    """One CPU id for each core, by NUMA node."""
    return [machine.one_a_core(node) for node in machine.nodes]


# What apply() wrote here without being asked: to a later engine in this process it is no user's choice.
_written: dict[str, str] = {}


def apply(
    environ: MutableMapping[str, str],
    world_size: int,
    replicas: int = 1,
    replica: int | None = None,
    machine: Host | None = None,
) -> list[Correction]:
    """Checks all three variables on this host and writes corrections into `environ`, for vLLM to read.

    `world_size` is the number of workers of one engine on this host, `replicas` the number of data-parallel
    engines this process starts here, and `replica` the local rank of this one where something else starts
    them: vLLM then takes that rank's share of the lists. `machine` is read where it is not given. Raises
    EnvironmentVariableError.
    """
    machine = host.read_host() if machine is None else machine
    if environ.get(BIND) is not None and environ[BIND] == _written.get(BIND):
        del environ[BIND]
    lists = environ.get(BIND, "").count("|") + 1
    if replica is not None:
        ranks = max(lists, (replica + 1) * world_size)
    else:
        ranks = world_size * max(1, replicas)
        # vLLM tells an engine of a dense model that it is the only one (reconfigure_for_independent_dp_rank);
        # the process that started it has seen the whole, and checked it.
        if multiprocessing.parent_process() is not None:
            ranks = max(lists, ranks)
    corrections = check(environ, ranks, machine)
    # With either of these the user has placed the worker, and vLLM follows.
    placed = environ.get("CPU_VISIBLE_MEMORY_NODES") or environ.get("VLLM_CPU_SIM_MULTI_NUMA", "0") != "0"
    if not placed and replica is None:
        corrections += better_default(environ, ranks, cores_of_nodes(machine), machine.quota)
    for correction in corrections:
        if correction.value is not None:
            environ[correction.name] = correction.value
            if not correction.of_user:
                _written[correction.name] = correction.value
    bound = compute_cpus(environ, machine)
    if replica is not None and len(bound) > 1:
        bound = bound[replica * world_size : (replica + 1) * world_size]
    return corrections + quota_warnings(
        environ,
        machine.quota,
        sum(map(len, bound)),
        ours=BIND in environ and environ[BIND] == _written.get(BIND),
    )


def _memory(machine: Host) -> int:
    """Bytes this process can ever use: the machine's or the smallest limit, whatever is in use now."""
    known = [] if machine.memory_total is None else [machine.memory_total]
    if machine.memory_limit is not None:
        known.append(int(machine.memory_limit.value))
    return min(known, default=sys.maxsize)

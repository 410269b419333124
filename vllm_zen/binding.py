"""vLLM's own CPU variables: checked before anything is started, and the thread default corrected.

Left alone, a wrong value of these ends in a bare conversion or assertion error deep in a worker, in a hang,
or in threads outside the CPUs this process may use. Standard library only.
"""

import multiprocessing
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from vllm_zen import host
from vllm_zen.errors import EnvironmentVariableError, UnsupportedError

BIND = "VLLM_CPU_OMP_THREADS_BIND"
RESERVED = "VLLM_CPU_NUM_OF_RESERVED_CPU"
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"

# Up to this many cores, one kept idle for the scheduler costs more than sharing it with a compute thread.
COMPUTE_ON_ALL_UP_TO = 4


@dataclass(frozen=True)
class Correction:
    """A variable's new value, and the line that says so."""

    name: str
    value: str
    why: str
    of_user: bool = True  # False where the user chose nothing and vLLM's default is corrected


def check_binding(environ: Mapping[str, str], ranks: int, allowed: list[int]) -> list[Correction]:
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


def _check_list(given: str, text: str, allowed: list[int]) -> str:
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
        ids.extend(range(int(low), int(high if dash else low) + 1))
    outside = sorted(set(ids) - set(allowed))
    if outside:
        raise EnvironmentVariableError(
            f"{BIND}={given!r} names CPUs {host.format_cpu_list(outside)}, but this process may use "
            f"{host.format_cpu_list(allowed)} only. Use those, or unset it to let vLLM bind."
        )
    if len(set(ids)) == len(ids) and " " not in text:
        return text
    return host.format_cpu_list(ids)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


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


def worker_cores(nodes: list[list[int]], ranks: int, quota: float | None) -> list[list[int]]:
    """split_cores() less what should not compute: cores above the CPU time quota, and one a large worker.

    As vLLM does with one worker a node, the last core of each is kept for the scheduler and the server, but
    not of a small one (see COMPUTE_ON_ALL_UP_TO).
    """
    lists = split_cores(nodes, ranks)
    if quota is not None and quota < sum(len(cores) for cores in lists):
        return [cores[: max(1, int(quota / ranks))] for cores in lists]
    return [cores[:-1] if len(cores) > COMPUTE_ON_ALL_UP_TO else cores for cores in lists]


def better_default(
    environ: Mapping[str, str], ranks: int, nodes: list[list[int]], quota: float | None
) -> list[Correction]:
    """What to bind to where vLLM's automatic choice is harmful and the user made none.

    `nodes` holds, for each NUMA node, one CPU id for each core this process may use. On few cores vLLM keeps
    one idle for its scheduler, which on two is half the machine; and it does not look at the CPU time quota,
    above which threads only wait for each other. Several workers it binds only where each has a node of its
    own, and those of data parallel engines all to the first node (vllm/utils/ompmultiprocessing.py).
    """
    untouched = environ.get(BIND, "auto").strip() in ("", "auto") and RESERVED not in environ
    cores = nodes[0]
    if not untouched or not cores:
        return []
    if ranks > 1:
        value = "|".join(host.format_cpu_list(chosen) for chosen in worker_cores(nodes, ranks, quota))
        line = f"{ranks} workers get cores of their own ({BIND}={value}). Set {BIND} to place them yourself"
        return [Correction(BIND, value, line, of_user=False)]
    if quota is not None and quota < len(cores):
        chosen = cores[: max(1, int(quota))]
        why = f"the CPU time quota is {quota:g} CPUs: {len(chosen)} compute threads"
    elif 1 < len(cores) <= COMPUTE_ON_ALL_UP_TO:
        chosen = cores
        why = f"all {len(cores)} cores compute, where vLLM would keep one for its scheduler"
    else:
        return []
    value = host.format_cpu_list(chosen)
    line = f"{why} ({BIND}={value}). {BIND}=auto with {RESERVED}=1 keeps vLLM's choice"
    return [Correction(BIND, value, line, of_user=False)]


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


def cores_of_nodes(allowed: list[int]) -> list[list[int]]:
    """One CPU id for each core, the last of its siblings as in vLLM's own binding, by NUMA node."""
    return [sorted(max(core) for core in host.physical_cores(node)) for node in host.numa_nodes(allowed)]


# What apply() wrote here without being asked: to a later engine in this process it is no user's choice.
_written: dict[str, str] = {}


def apply(
    environ: MutableMapping[str, str], world_size: int, replicas: int = 1, replica: int | None = None
) -> list[Correction]:
    """Checks all three variables on this host and writes corrections into `environ`, for vLLM to read.

    `world_size` is the number of workers of one engine on this host, `replicas` the number of data-parallel
    engines this process starts here, and `replica` the local rank of this one where something else starts
    them: vLLM then takes that rank's share of the lists. Raises EnvironmentVariableError.
    """
    if environ.get(BIND) is not None and environ[BIND] == _written.get(BIND):
        del environ[BIND]
    allowed = host.allowed_cpus()
    check_reserved(environ, len(host.physical_cores(allowed)))
    check_kv_space(environ, host.memory_limit())
    lists = environ.get(BIND, "").count("|") + 1
    if replica is not None:
        ranks = max(lists, (replica + 1) * world_size)
    else:
        ranks = world_size * max(1, replicas)
        # vLLM tells an engine of a dense model that it is the only one (reconfigure_for_independent_dp_rank);
        # the process that started it has seen the whole, and checked it.
        if multiprocessing.parent_process() is not None:
            ranks = max(lists, ranks)
    corrections = check_binding(environ, ranks, allowed)
    # With either of these the user has placed the worker, and vLLM follows.
    placed = environ.get("CPU_VISIBLE_MEMORY_NODES") or environ.get("VLLM_CPU_SIM_MULTI_NUMA", "0") != "0"
    if not placed and replica is None:
        corrections += better_default(environ, ranks, cores_of_nodes(allowed), host.cpu_quota())
    for correction in corrections:
        environ[correction.name] = correction.value
        if not correction.of_user:
            _written[correction.name] = correction.value
    return corrections

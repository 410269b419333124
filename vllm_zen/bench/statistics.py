"""Whether two sides measured in turn differ, or only the machine's mood did."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# Two-sided 95 % quantiles of Student's t for 1 to 10 degrees of freedom; more pairs take the last, a little
# too careful.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)

Verdict = Literal["better", "worse", "within the noise", "too few runs"]


@dataclass(frozen=True)
class Spread:
    """Smallest, median and largest."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least one value."""
        return cls(min(values), statistics.median(values), max(values))


@dataclass(frozen=True)
class Comparison:
    """One figure of both sides over the pairs."""

    metric: str
    unit: str
    higher_is_better: bool
    ours: Spread
    stock: Spread
    ratio: Spread  # ours / stock, pair by pair
    interval: tuple[float, float] | None  # 95 % of the mean ratio
    verdict: Verdict


def compare(
    metric: str, unit: str, higher_is_better: bool, ours: Sequence[float], stock: Sequence[float]
) -> Comparison:
    """Pairs the runs by their order.

    A run of ours and the run of stock's beside it saw the same machine, so the pairwise ratio is what drift
    leaves alone. The verdict asks whether 1 lies outside the 95 % interval of the mean logarithm of it.
    """
    ratios = [a / b for a, b in zip(ours, stock, strict=True)]
    interval = confidence(ratios)
    verdict: Verdict
    if interval is None:
        verdict = "too few runs"
    elif interval[0] <= 1 <= interval[1]:
        verdict = "within the noise"
    else:
        verdict = "better" if (interval[0] > 1) == higher_is_better else "worse"
    return Comparison(
        metric,
        unit,
        higher_is_better,
        Spread.of(ours),
        Spread.of(stock),
        Spread.of(ratios),
        interval,
        verdict,
    )


def confidence(ratios: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of the geometric mean of positive ratios, or None for fewer than three of them."""
    if len(ratios) < 3:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    middle = statistics.fmean(logs)
    freedom = len(logs) - 1
    half = T95[min(freedom, len(T95)) - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(middle - half), math.exp(middle + half)

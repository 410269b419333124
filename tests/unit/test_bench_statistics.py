"""The verdict of a comparison: drift is not a difference, and a difference is not drift."""

import math
import random

import pytest

from vllm_zen.bench import statistics


def test_a_clear_difference_is_one():
    faster = statistics.compare("throughput", "tok/s", True, [20, 21, 20, 22, 20], [10, 10.5, 10, 11, 10])
    assert faster.verdict == "better"
    assert faster.ratio.median == 2
    slower = statistics.compare("TPOT", "ms", False, [20, 21, 20, 22, 20], [10, 10.5, 10, 11, 10])
    assert slower.verdict == "worse"


def test_drift_that_both_sides_share_is_cancelled():
    """The machine slows to a third over the run; ours is 10 % faster throughout."""
    stock = [30, 25, 20, 15, 10]
    ours = [value * factor for value, factor in zip(stock, [1.1, 1.11, 1.09, 1.1, 1.1], strict=True)]
    assert statistics.compare("throughput", "tok/s", True, ours, stock).verdict == "better"


def test_noise_is_not_a_difference():
    assert statistics.compare("x", "", True, [10, 12, 9, 11, 10], [11, 10, 10, 12, 9]).verdict == (
        "within the noise"
    )


@pytest.mark.parametrize("pairs", [1, 2])
def test_two_pairs_prove_nothing(pairs):
    compared = statistics.compare("x", "", True, [2.0] * pairs, [1.0] * pairs)
    assert compared.verdict == "too few runs"
    assert compared.interval is None


def test_the_interval_is_one_for_95_of_100():
    """Of intervals drawn around a known ratio, about 5 % miss it."""
    draw = random.Random(0)  # noqa: S311 (reproducible, no secret)
    hits = 0
    for _ in range(2000):
        ratios = [1.2 * math.exp(draw.gauss(0, 0.1)) for _ in range(5)]
        low, high = statistics.confidence(ratios)
        hits += low <= 1.2 <= high
    assert 0.93 < hits / 2000 < 0.97


def test_the_same_on_both_sides_is_within_the_noise():
    assert statistics.compare("x", "", True, [5.0] * 5, [5.0] * 5).verdict == "within the noise"

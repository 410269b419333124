"""Whether a running server runs as it should, from its /metrics, and if not, the likeliest reason."""

import http.client
import math
import urllib.request
from collections.abc import Iterator
from urllib.parse import urlsplit

from vllm_zen.doctor import Row, State

TIMEOUT_SECONDS = 10
MAX_BYTES = 50 * 2**20
# Below this share of the expected rate something is wrong; the estimate itself is good to a quarter.
AS_EXPECTED = 0.75
# Shares of time or of space from which on they are worth a line.
THROTTLED, CACHE_FULL = 0.05, 0.95
CHOOSE = "let vllm-zen choose the threads: unset VLLM_CPU_OMP_THREADS_BIND"
ROOM = "give the KV cache more memory, or take fewer requests at once (--max-num-seqs)"

Samples = dict[str, list[tuple[dict[str, str], float]]]


def examine(url: str, expected_tokens_per_second: float | None = None) -> Iterator[Row]:
    """Rows like doctor's. Never raises: what cannot be asked is a row."""
    try:
        samples = parse(fetch(url))
    except (OSError, ValueError, ImportError, http.client.HTTPException) as error:
        yield Row(
            "live",
            "fail",
            f"{url}: {type(error).__name__} {error}",
            "name a running server, as http://127.0.0.1:8000",
        )
        return
    yield from judge(samples, expected_tokens_per_second)


def fetch(url: str) -> str:
    """A server's /metrics. Raises ValueError for what is no http address, OSError where nobody answers."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError("not an http address")
    address = f"{parts.scheme}://{parts.netloc}/metrics"
    with urllib.request.urlopen(address, timeout=TIMEOUT_SECONDS) as answer:  # noqa: S310 (scheme checked)
        text: bytes = answer.read(MAX_BYTES)
    return text.decode(errors="replace")


def parse(text: str) -> Samples:
    """Samples by name. Raises ValueError for what is no exposition."""
    from prometheus_client.parser import text_string_to_metric_families

    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples


def judge(samples: Samples, expected: float | None = None) -> Iterator[Row]:
    """What a server's samples say. `expected` is the rate of one request in tokens per second."""
    if not any(name.startswith("vllm:") for name in samples):
        yield Row("live", "fail", "these are no metrics of vLLM", "name the address of a vLLM server")
        return
    yield _platform(samples)
    suspects = list(_suspects(samples))
    for what, fix in suspects:
        yield Row("live", "warn", what, fix)
    tpot = mean(samples, "vllm:request_time_per_output_token_seconds")
    if math.isnan(tpot) or tpot <= 0:
        yield Row("rate", "ok", "no request has been answered yet", "ask again after some")
        return
    yield _rate(samples, 1 / tpot, expected, [what for what, _ in suspects])


def _platform(samples: Samples) -> Row:
    for labels, _ in samples.get("vllm_zen_info", []):
        said = " | ".join(f"{name} {labels[name]}" for name in sorted(labels))
        return Row("platform", "ok", f"{said} | {total(samples, 'vllm_zen_compute_threads'):.0f} threads")
    fix = "vllm-zen doctor on that machine says which"
    detail = "no vllm_zen_info: stock vLLM serves, or several API servers, which data parallelism starts too"
    return Row("platform", "warn", detail, fix)


def _suspects(samples: Samples) -> Iterator[tuple[str, str]]:
    """What could slow this server, the likeliest first, each with the way out."""
    periods = total(samples, "vllm_zen_cpu_periods_total")
    stopped = total(samples, "vllm_zen_cpu_throttled_periods_total") / periods if periods else 0.0
    threads, granted = (total(samples, f"vllm_zen_{n}") for n in ("compute_threads", "granted_cpus"))
    if stopped > THROTTLED:
        yield (
            f"the CPU time quota stopped it in {stopped:.0%} of its periods",
            f"raise the quota, or {CHOOSE}",
        )
    if threads and granted and threads > max(1, granted):
        yield (
            f"{threads:.0f} threads on {granted:g} CPUs wait for each other",
            CHOOSE,
        )
    if threads and granted and threads < granted // 2:
        yield f"{threads:.0f} threads on {granted:g} CPUs leave most idle", CHOOSE
    if preempted := total(samples, "vllm:num_preemptions_total"):
        yield (
            f"{preempted:.0f} requests were put back for want of cache",
            ROOM,
        )
    if (usage := peak(samples, "vllm:kv_cache_usage_perc")) > CACHE_FULL:
        yield f"the KV cache is {usage:.0%} full", ROOM
    if waiting := total(samples, "vllm:num_requests_waiting"):
        yield f"{waiting:.0f} requests wait for their turn", "more servers, or a larger --max-num-seqs"
    if (running := total(samples, "vllm:num_requests_running")) > 1:
        yield (
            f"{running:.0f} requests share each step",
            "each is slower so, and all together faster",
        )


def _rate(samples: Samples, rate: float, expected: float | None, suspects: list[str]) -> Row:
    detail = f"{rate:.1f} tok/s a request since the start"
    if expected is None or expected <= 0:
        return Row("rate", "ok", detail, "--expected TOK/S compares it with what `vllm-zen plan` says")
    share = rate / expected
    state: State = "ok" if share >= AS_EXPECTED else "warn"
    detail += f", {share:.0%} of the {expected:.1f} expected"
    if state == "ok":
        return Row("rate", state, detail)
    reason = suspects[0] if suspects else "other processes on these CPUs, or several requests at once"
    return Row("rate", state, f"{detail}; likeliest: {reason}", "see the rows above")


def total(samples: Samples, name: str) -> float:
    """The sum over engines, 0 where there is none."""
    return sum(value for _, value in samples.get(name, []))


def peak(samples: Samples, name: str) -> float:
    """The largest over engines, 0 where there is none."""
    return max((value for _, value in samples.get(name, [])), default=0.0)


def mean(samples: Samples, histogram: str) -> float:
    """A histogram's mean over engines, nan where nothing was counted."""
    count = total(samples, f"{histogram}_count")
    return total(samples, f"{histogram}_sum") / count if count else math.nan

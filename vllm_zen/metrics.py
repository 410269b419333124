"""What runs, and how much of the CPU it is denied, on the server's /metrics.

One collector in the API server's process, asked at every scrape: nothing runs between scrapes. vLLM collects
from several API servers (--api-server-count) through files, where a collector has no place; it is left out
there.
"""

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import REGISTRY, Collector

from vllm_zen import __version__, binding, host, ops, zentorch
from vllm_zen.host import Host

MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"


class ZenCollector(Collector):  # type: ignore[misc]
    """The facts of this engine's configuration, and the control group's time."""

    def __init__(
        self, facts: dict[str, str], threads: int, read: Callable[[], Host] = host.read_host
    ) -> None:
        self._facts, self._threads, self._read = facts, threads, read

    def collect(self) -> Iterator[Any]:
        """Called at a scrape."""
        machine = self._read()
        yield InfoMetricFamily("vllm_zen", "What serves: platform, CPU, kernels, backends.", self._facts)
        yield GaugeMetricFamily("vllm_zen_compute_threads", "Compute threads of all workers.", self._threads)
        granted = machine.quota.value if machine.quota else len(machine.cpus)
        yield GaugeMetricFamily("vllm_zen_granted_cpus", "CPUs of time this server may use.", granted)
        throttled = CounterMetricFamily(
            "vllm_zen_cpu_throttled_seconds", "Time for which the control group's quota stopped its threads."
        )
        throttled.add_metric([], throttled_seconds(machine))
        yield throttled


def throttled_seconds(machine: Host, root: Path = Path("/")) -> float:
    """Seconds, from cpu.stat beside the quota's file (nanoseconds in v1, microseconds in v2); 0 without."""
    if machine.quota is None:
        return 0.0
    file = root / machine.quota.source.lstrip("/")
    try:
        lines = (file.parent / "cpu.stat").read_text().splitlines()
        stat = {name: int(value) for name, value in (line.split() for line in lines)}
    except (OSError, ValueError):
        return 0.0
    return stat.get("throttled_time", 0) / 1e9 + stat.get("throttled_usec", 0) / 1e6


def describe(quantization: str | None, attention: str, dtype: Any) -> dict[str, str]:
    """The labels of vllm_zen_info: what a worker of this configuration chooses, by the functions it uses."""
    import torch

    from vllm_zen import activation
    from vllm_zen.linear import dispatch

    native = ops.load()
    backend, _ = dispatch.select(torch.empty(64, 64, dtype=dtype, device="meta"))
    return {
        "version": __version__,
        "platform": activation.PLATFORM_CLASS,
        "cpu": activation.decide().info.describe(),
        "isa": ops.isa() if native.ok else "none",
        "zentorch": zentorch.load().describe(),
        "linear": backend.name if backend else "none",
        "attention": attention,
        "quantization": quantization or "none",
    }


@functools.cache
def _register(facts: tuple[tuple[str, str], ...], threads: int) -> None:
    REGISTRY.register(ZenCollector(dict(facts), threads))


def publish(quantization: str | None, dtype: Any) -> None:
    """Puts the collector into this process's registry, once for a configuration."""
    if os.environ.get(MULTIPROCESS):
        return
    lists = binding.compute_cpus(os.environ, host.read_host())
    _register(tuple(describe(quantization, "vllm", dtype).items()), sum(map(len, lists)))

"""What runs, and how much of the CPU it is denied, on the server's /metrics.

One collector in the API server's process, asked at every scrape: nothing runs between scrapes. vLLM collects
from several API servers (--api-server-count, which data parallelism sets too) through files, where a
collector has no place; it is left out there.
"""

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import REGISTRY, Collector

from vllm_zen import __version__, binding, host, ops, zentorch
from vllm_zen.host import Host

MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"


class ZenCollector(Collector):  # type: ignore[misc]
    """The facts of the last configuration of this process, and its control group's time since it began."""

    def __init__(self, machine: Host, root: Path = Path("/")) -> None:
        self.facts: dict[str, str] = {}
        self.threads = 0
        self.machine, self._root = machine, root
        self._before = cpu_stat(machine, root)

    def collect(self) -> Iterator[Any]:
        """Called at a scrape; reads one file."""
        machine, now = self.machine, cpu_stat(self.machine, self._root)
        yield InfoMetricFamily("vllm_zen", "What serves: platform, CPU, kernels, backends.", self.facts)
        yield GaugeMetricFamily("vllm_zen_compute_threads", "Compute threads of all workers.", self.threads)
        granted = machine.quota.value if machine.quota else len(machine.cpus)
        yield GaugeMetricFamily("vllm_zen_granted_cpus", "CPUs of time this server may use.", granted)
        texts = {
            "throttled_seconds": "Time for which the quota stopped the control group, over all its CPUs.",
            "throttled_periods": "Periods of the quota in which it stopped the control group.",
            "periods": "Periods of the quota in which the control group ran.",
        }
        for name, text in texts.items():
            counter = CounterMetricFamily(f"vllm_zen_cpu_{name}", text)
            counter.add_metric([], now[name] - self._before[name])
            yield counter


def cpu_stat(machine: Host, root: Path = Path("/")) -> dict[str, float]:
    """What cpu.stat beside the quota's file counts since the group was made; zeros without a quota.

    Seconds from nanoseconds in v1, from microseconds in v2.
    """
    stat: dict[str, int] = {}
    if machine.quota is not None:
        file = (root / machine.quota.source.lstrip("/")).parent / "cpu.stat"
        try:
            lines = file.read_text().splitlines()
            stat = {name: int(value) for name, value in (line.split() for line in lines)}
        except (OSError, ValueError):
            stat = {}
    return {
        "throttled_seconds": stat.get("throttled_time", 0) / 1e9 + stat.get("throttled_usec", 0) / 1e6,
        "throttled_periods": float(stat.get("nr_throttled", 0)),
        "periods": float(stat.get("nr_periods", 0)),
    }


def describe(quantization: str | None, attention: str, dtype: Any) -> dict[str, str]:
    """The labels of vllm_zen_info: what a worker of this configuration chooses, by the functions it uses.

    `linear` is who runs a plain layer of the model's dtype; the start-up line counts the layers themselves.
    """
    import torch

    from vllm_zen import activation
    from vllm_zen.linear import dispatch
    from vllm_zen.quantization.settings import INT4, INT8

    native = ops.load()
    backend, _ = dispatch.select(torch.empty(64, 64, dtype=dtype, device="meta"))
    return {
        "version": __version__,
        "platform": activation.PLATFORM_CLASS,
        "cpu": activation.decide().info.describe(),
        "isa": ops.isa() if native.ok else "none",
        "zentorch": zentorch.load().describe(),
        "linear": quantization if quantization in (INT8, INT4) else backend.name if backend else "none",
        "attention": attention,
        "quantization": quantization or "none",
    }


@functools.cache
def _collector() -> ZenCollector:
    """The one of this process."""
    collector = ZenCollector(host.read_host())
    REGISTRY.register(collector)
    return collector


def publish(quantization: str | None, attention: str, dtype: Any) -> None:
    """Puts this configuration on /metrics; a later engine of the process replaces it."""
    if os.environ.get(MULTIPROCESS):
        return
    collector = _collector()
    collector.facts = describe(quantization, attention, dtype)
    collector.threads = sum(map(len, binding.compute_cpus(os.environ, collector.machine)))

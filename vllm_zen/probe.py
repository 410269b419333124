"""How fast this host reads a model's weights: one token through its own matrices, for about a second.

A rate from a memory benchmark would be wrong wherever the kernels are slower than memory, or the matrices so
small that starting a kernel costs more than running it. So the probe runs the backend that will serve, with
the threads of the plan, in a process of its own (`python -m vllm_zen.probe`).
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_zen.checkpoint import Linear, Model
from vllm_zen.errors import PlanError
from vllm_zen.plan import Rate

SECONDS = 1.0
TIMEOUT_SECONDS = 120
# Enough that no cache holds it, and little enough to be made in a moment.
WORKING_SET_BYTES = 768 * 2**20
CACHE_MULTIPLE = 4


def measure(model: Model, cpus: tuple[int, ...], dtype: str, l3_bytes: int | None) -> Rate:
    """Runs the probe on the CPUs of one rank. Raises PlanError when the child fails."""
    request = {
        "shapes": [list(shape) for shape in sample(model, 4 if dtype == "float32" else 2, l3_bytes or 0)],
        "dtype": dtype,
        "cpus": list(cpus),
    }
    with tempfile.TemporaryDirectory(prefix="vllm-zen-probe-") as folder:
        output = Path(folder) / "rate.json"
        child = subprocess.run(
            [sys.executable, "-m", "vllm_zen.probe", json.dumps(request), str(output)],
            env={**os.environ, "OMP_NUM_THREADS": str(len(cpus)), "VLLM_LOGGING_LEVEL": "ERROR"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        if child.returncode or not output.exists():
            last = child.stderr.strip().splitlines()[-1:] or ["no message"]
            raise PlanError(f"the probe ended with {child.returncode}: {last[0]}. --no-probe plans without.")
        return Rate(**json.loads(output.read_text()))


def sample(model: Model, bytes_per_value: int, l3_bytes: int) -> Iterator[tuple[int, int]]:
    """Matrices [n, k] in the proportions of the model, the head among them, about a working set's worth.

    Whole rounds of (one of each shape, repeated as often as the model does) until the set is full.
    """
    head = Linear(model.vocabulary, model.hidden, 1)
    wanted = max(WORKING_SET_BYTES, CACHE_MULTIPLE * l3_bytes)
    total = sum(linear.parameters for linear in (*model.linears, head)) * bytes_per_value
    share = min(1.0, wanted / total)
    for linear in (*model.linears, head):
        for _ in range(max(1, math.ceil(linear.count * share))):
            yield linear.n, linear.k


def _run(request: dict[str, Any]) -> dict[str, Any]:
    """The child: binds itself, makes the layers, and times whole passes over them."""
    os.sched_setaffinity(0, request["cpus"])
    import time

    import torch

    from vllm_zen.linear import dispatch

    torch.set_num_threads(len(request["cpus"]))
    dtype = getattr(torch, request["dtype"])
    layers: list[tuple[Any, torch.Tensor]] = []
    size = 0
    for n, k in request["shapes"]:
        layer = torch.nn.Linear(k, n, bias=False, dtype=dtype, device="meta")
        layer.weight = torch.nn.Parameter(torch.zeros(n, k, dtype=dtype).fill_(0.01), requires_grad=False)
        backend = dispatch.choose(layer.weight).attach(layer, True)
        layers.append((layer, torch.full((1, k), 0.5, dtype=dtype)))
        size += n * k * dtype.itemsize

    def one_pass() -> float:
        began = time.perf_counter()
        for layer, x in layers:
            layer.cpu_linear(x, layer.weight, None)
        return time.perf_counter() - began

    times: list[float] = []
    with torch.inference_mode():
        one_pass()
        began = time.perf_counter()
        while time.perf_counter() - began < SECONDS or len(times) < 3:
            times.append(one_pass())
    middle = sorted(times)[len(times) // 2]
    return {"bytes_per_second": size / middle, "backend": backend, "threads": len(request["cpus"])}


def main() -> None:
    """`python -m vllm_zen.probe REQUEST OUTPUT`."""
    request, output = json.loads(sys.argv[1]), Path(sys.argv[2])
    output.write_text(json.dumps(_run(request)))


if __name__ == "__main__":
    main()

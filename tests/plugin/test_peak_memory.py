"""Packing needs one layer's copy above the weights, read from the process's own peak."""

import fakes
import pytest
import torch

from vllm_zen import zentorch

LAYERS = 8
LAYER_MIB = 64

PACK = f"""
import sys
import torch
from torch.nn import Module, Parameter
from vllm_zen import zentorch
from vllm_zen.linear.dispatch import dispatch

dtype = getattr(torch, sys.argv[1])
n, k = 4096, {LAYER_MIB} * 2**20 // 4096 // dtype.itemsize

def status(key):
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith(key))

def make(k):
    layer = Module()
    layer.weight = Parameter(torch.ones(n, k, dtype=dtype), requires_grad=False)
    return layer

warm = make(64)
dispatch(warm, True)
warm.cpu_linear(torch.ones(1, 64, dtype=dtype), warm.weight, None)
layers = [make(k) for _ in range({LAYERS})]
open("/proc/self/clear_refs", "w").write("5")  # the peak so far is the imports', not ours
before = status("VmRSS")
for layer in layers:
    dispatch(layer, True)
print(before, status("VmHWM"), status("VmRSS"))
"""


def test_peak_is_one_layer_above_the_weights():
    dtype = "bfloat16" if zentorch.supports_linear(torch.bfloat16)[0] else "float32"
    supported, reason = zentorch.supports_linear(getattr(torch, dtype))
    if not supported:
        pytest.skip(reason)
    result = fakes.python(PACK, arguments=[dtype], timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]
    before, peak, after = (float(value) for value in result.stdout.split()[-3:])
    print(
        f"{LAYERS} layers of {LAYER_MIB} MiB {dtype}: "
        f"peak {peak - before:+.0f} MiB, then {after - before:+.0f} MiB"
    )
    # A quarter of a layer for what else the process does meanwhile.
    assert peak - before <= 1.25 * LAYER_MIB
    assert after - before <= 0.25 * LAYER_MIB

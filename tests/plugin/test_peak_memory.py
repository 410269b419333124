"""Packing needs one layer's copy above the weights, and so does quantizing, by the process's own memory."""

import fakes
import pytest
import torch
from models import build_llama

from vllm_zen import zentorch
from vllm_zen.quantization import weights

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


LOAD = """
import sys
import threading

from vllm import LLM
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

load_model = BaseModelLoader.load_model

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("RssAnon"))

def measured(*arguments, **options):
    before, peak, loaded = anonymous(), 0.0, threading.Event()

    def watch():
        nonlocal peak
        while not loaded.wait(0.001):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load_model(*arguments, **options)
    loaded.set()
    watcher.join()
    print("grew", peak - before, anonymous() - before)
    return model

if __name__ == "__main__":
    BaseModelLoader.load_model = measured
    options = {"enforce_eager": True, "max_model_len": 64, "kv_cache_memory_bytes": 2**24}
    LLM(sys.argv[1], quantization=sys.argv[2], **options)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Of 10 layers, 300 MiB in bf16, whose largest weight is gate_up_proj [8192, 1024]."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 10, "vocab_size": 2048}
    return build_llama(tmp_path_factory.mktemp("model"), **sizes)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("quantization", "bits"), [("zen_int8", 8), ("zen_int4", 4.125)])
def test_peak_of_a_load_is_the_largest_layer_above_the_quantized_model(
    model, quantization, bits, platform_environment
):
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", **platform_environment}
    result = fakes.python(LOAD, arguments=[str(model), quantization], timeout=240, **environment)
    assert result.returncode == 0, result.stderr[-3000:]
    (grew,) = [line.split()[1:] for line in result.stdout.splitlines() if line.startswith("grew ")]
    peak, after = map(float, grew)
    print(f"{quantization}: peak {peak:+.0f} MiB, then {after:+.0f} MiB")
    values = 10 * (8192 * 1024 + 4096 * 1024 + 1024 * (1024 + 2 * 512 + 1024))
    # Quantized, and 24 MiB for tables, norms and what else the process took meanwhile.
    assert after <= values * bits / 8 / 2**20 + 24
    largest = 8192 * 1024 * 2 / 2**20
    assert peak - after <= largest + 12 * weights.SLAB / 2**20

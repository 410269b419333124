"""Each entry of compat.py is still needed, and still takes."""

import inspect

import fakes
import pytest
import torch
from torch.nn import Module, Parameter


def test_vllm_has_no_public_seam_for_unquantized_linear_layers():
    """Delete the compat entry when this fails: vLLM then registers unquantized kernels like the others."""
    from vllm.model_executor.kernels import linear

    source = inspect.getsource(linear.register_linear_kernel)
    assert "unquantized" not in source.lower()


def test_the_replaced_function_is_the_one_vllm_calls():
    """By name, at call time, with these two arguments."""
    from vllm.model_executor.layers import linear, utils, vocab_parallel_embedding

    function = getattr(
        utils.dispatch_cpu_unquantized_gemm, "_vllm_zen_stock", utils.dispatch_cpu_unquantized_gemm
    )
    assert list(inspect.signature(function).parameters) == ["layer", "remove_weight"]
    call = "from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm"
    for method in (linear.UnquantizedLinearMethod, vocab_parallel_embedding.UnquantizedEmbeddingMethod):
        assert call in inspect.getsource(method.process_weights_after_loading)


def test_vllm_still_finalizes_every_saved_graph():
    """Delete the second compat entry when this fails: vLLM then loads inductor's artifacts by itself."""
    from vllm.compilation import decorators

    source = inspect.getsource(decorators._try_load_aot_compiled_fn)
    assert "loaded_fn = torch.compiler.load_compiled_function(" in source
    assert "loaded_fn._artifacts.compiled_fn.finalize_loading(model.vllm_config)" in source
    assert "hasattr" not in source


APPLY_TWICE = """
import torch
stock_loader = torch.compiler.load_compiled_function
from vllm.model_executor.layers import utils
stock = utils.dispatch_cpu_unquantized_gemm
from vllm_zen import compat
compat.apply()
ours, loader = utils.dispatch_cpu_unquantized_gemm, torch.compiler.load_compiled_function
compat.apply()
assert utils.dispatch_cpu_unquantized_gemm is ours is not stock
assert torch.compiler.load_compiled_function is loader is not stock_loader
assert ours._vllm_zen_stock is stock and loader._vllm_zen_stock is stock_loader
print("applied")
"""


def test_apply_is_idempotent_and_keeps_the_original():
    result = fakes.python(APPLY_TWICE)
    assert result.stdout.strip().endswith("applied"), result.stderr[-2000:]


@pytest.mark.parametrize("remove_weight", [False, True])
def test_the_stock_path_never_reaches_zentorch(remove_weight):
    """vLLM's function tries zentorch first on a Zen platform: compat hides it for the call."""
    from vllm_zen import compat, zentorch
    from vllm_zen.platform import ZenCpuPlatform

    zentorch.load()
    layer = Module()
    layer.weight = Parameter(torch.randn(64, 64), requires_grad=False)
    compat.stock_dispatch(layer, remove_weight)
    x = torch.randn(2, 64)
    with torch.profiler.profile() as profile:
        layer.cpu_linear(x, layer.weight, None)
    assert not any("zentorch" in event.name for event in profile.events())
    assert ZenCpuPlatform.hide_zen is False

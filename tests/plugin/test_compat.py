"""Each entry of compat.py is still needed, and still takes."""

import inspect
import shutil
from pathlib import Path
from types import SimpleNamespace

import fakes
import pytest
import torch
from torch.nn import Module, Parameter

from vllm_zen import host


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


def test_the_pipeline_buffer_is_still_left_to_a_dummy_run():
    """Delete the fourth compat entry when this fails: eager CPU runners then have the buffer too."""
    from vllm.v1.worker import cpu_model_runner, gpu_model_runner

    assert "== CompilationMode.NONE:\n            return" in inspect.getsource(
        cpu_model_runner.CPUModelRunner.warming_up_model
    )
    runner = gpu_model_runner.GPUModelRunner
    allocation = "self.model.make_empty_intermediate_tensors("
    assert inspect.getsource(gpu_model_runner).count(allocation) == 1
    assert allocation in inspect.getsource(runner._dummy_run)


@pytest.mark.parametrize("first", [True, False])
def test_ranks_behind_the_first_get_their_buffer_once(monkeypatch, first):
    import vllm.distributed

    from vllm_zen import compat

    model = SimpleNamespace(make_empty_intermediate_tensors=lambda **settings: settings)
    runner = SimpleNamespace(
        intermediate_tensors=None,
        get_model=lambda: model,
        max_num_tokens=64,
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        device=torch.device("cpu"),
    )
    monkeypatch.setattr(vllm.distributed, "get_pp_group", lambda: SimpleNamespace(is_first_rank=first))
    compat.allocate_pipeline_input(runner)
    settings = {"batch_size": 64, "dtype": torch.bfloat16, "device": torch.device("cpu")}
    assert runner.intermediate_tensors == (None if first else settings)
    made = runner.intermediate_tensors
    compat.allocate_pipeline_input(runner)
    assert runner.intermediate_tensors is made


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


def test_vllm_still_asks_lscpu_and_the_mount_root():
    """Delete the fourth compat entry when this fails: vLLM then reads the host as we do."""
    from vllm.utils import cpu_resource_utils as stock

    source = inspect.getsource(stock)
    assert "lscpu --json --extended=CPU,CORE,NODE --online" in source
    assert '_read_int_file("/sys/fs/cgroup/memory.max")' in source


UNDER_A_QUOTA = """
import json
import examples
from vllm.distributed.device_communicators import shm_broadcast
from vllm_zen import compat, host

stock = shm_broadcast.sched_yield
free = compat.apply(examples.machine()), shm_broadcast.sched_yield is stock
bound = compat.apply(examples.machine(quota=host.Limit(1.5, "/cpu.max"))), shm_broadcast.sched_yield is stock
print(json.dumps([free, bound]))
"""


def test_waiting_processes_nap_only_under_a_quota():
    (said, stock), (said_under, stock_under) = fakes.ask(UNDER_A_QUOTA, Path(__file__).parents[1])
    assert said == []
    assert stock
    assert "/cpu.max" in said_under[0]
    assert not stock_under


def test_vllm_still_looks_again_and_again():
    """Delete the fifth compat entry when this fails."""
    from vllm.distributed.device_communicators import shm_broadcast

    assert "sched_yield()" in inspect.getsource(shm_broadcast.SpinCondition.wait)


SAME_HOST = """
import json
from vllm.utils import cpu_resource_utils as utils
stock = utils.get_allowed_cpu_list()
from vllm_zen import compat
compat.apply()
print(json.dumps([[[c.id, c.numa_node] for c in cpus] for cpus in (stock, utils.get_allowed_cpu_list())]))
"""


@pytest.mark.skipif(shutil.which("lscpu") is None, reason="there is no lscpu here to compare with")
def test_the_cpus_are_those_lscpu_lists():
    stock, ours = fakes.ask(SAME_HOST)
    assert ours == stock


WITHOUT_LSCPU = """
import json
from vllm_zen import compat
compat.apply()
from vllm.utils import cpu_resource_utils as utils
cpus = utils.get_allowed_cpu_list()
memory = utils.get_memory_node_info(cpus[0].numa_node)
print(json.dumps([[c.id for c in cpus], memory.total_memory]))
"""


def test_the_host_is_read_without_any_program(tmp_path):
    cpus, total = fakes.ask(WITHOUT_LSCPU, PATH=str(tmp_path))
    assert cpus == host.allowed_cpus()
    assert 0 < total <= host.read_host().memory_total


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

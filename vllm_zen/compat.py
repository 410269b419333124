"""Every touch of a vLLM private. Budget: five entries. Used: four.

1. dispatch_cpu_unquantized_gemm (vllm.model_executor.layers.utils)
   Symptom: vLLM 0.32 has no registry for unquantized linear layers; its function packs embedding tables
   that are only looked up, keeps an untied head twice, packs for any ZENDNNL_MATMUL_ALGO, and raises in the
   first request where zentorch has no kernel for the dtype.
   Upstream: vllm/model_executor/layers/utils.py, from PR 35970.
   Delete when: vLLM lets a platform provide the unquantized linear method.
   Test: tests/plugin/test_compat.py fails when the name, its signature or its callers move.

2. torch.compiler.load_compiled_function, as vllm.compilation.decorators calls it
   Symptom: on CPU every start with a warm cache logs "Compiling model again due to a load failure ...
   'function' object has no attribute 'finalize_loading'" and compiles everything once more. vLLM calls that
   method of its own backend's artifact, and on CPU the artifact is inductor's plain function.
   Upstream: vllm/compilation/decorators.py, _try_load_aot_compiled_fn.
   Delete when: vLLM asks whether the artifact has the method.
   Test: tests/plugin/test_compat.py fails when vLLM's call changes; tests/e2e/test_engine.py restarts one.

3. vllm.envs.environment_variables
   Symptom: vLLM warns of every VLLM_* name it does not know, and refuses it under
   --fail-on-environ-validation. The names are declared with a constant, because vLLM hashes the values for
   its compile cache: moving the demo model's folder must not compile everything anew. What does decide a
   graph is in the platform's _key_compile_cache.
   Upstream: vllm/platforms/interface.py, validate_environ.
   Delete when: a platform can declare variables.
   Test: tests/plugin/test_platform.py validates with all of them set.

4. GPUModelRunner.intermediate_tensors
   Symptom: with --enforce-eager and pipeline parallelism every rank behind the first ends its first step in
   `assert self.intermediate_tensors is not None`. A dummy run allocates that buffer, and the CPU runner
   leaves the dummy run out where there is nothing to compile.
   Upstream: vllm/v1/worker/cpu_model_runner.py, warming_up_model; gpu_model_runner.py, _dummy_run.
   Delete when: the buffer is allocated outside the dummy run.
   Test: tests/plugin/test_compat.py fails when it is; tests/e2e/test_parallel.py runs a pipeline eagerly.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

_PATCHED = "_vllm_zen_stock"


def apply() -> None:
    """Applies every entry. Idempotent. Raises AttributeError where vLLM or torch moved a name."""
    _replace_linear_dispatch()
    _let_saved_graphs_load()


def _replace_linear_dispatch() -> None:
    from vllm.model_executor.layers import utils

    from vllm_zen.linear.dispatch import dispatch

    stock = utils.dispatch_cpu_unquantized_gemm
    if hasattr(stock, _PATCHED):
        return

    def dispatch_cpu_unquantized_gemm(layer: torch.nn.Module, remove_weight: bool) -> None:
        dispatch(layer, remove_weight)

    setattr(dispatch_cpu_unquantized_gemm, _PATCHED, stock)
    utils.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm


def _let_saved_graphs_load() -> None:
    stock = torch.compiler.load_compiled_function
    if hasattr(stock, _PATCHED):
        return

    @functools.wraps(stock)
    def load_compiled_function(*args: Any, **kwargs: Any) -> Any:
        loaded: Any = stock(*args, **kwargs)
        artifact = getattr(getattr(loaded, "_artifacts", None), "compiled_fn", None)
        if artifact is not None and not hasattr(artifact, "finalize_loading"):
            artifact.finalize_loading = lambda _: None  # inductor's function is complete once loaded
        return loaded

    setattr(load_compiled_function, _PATCHED, stock)
    torch.compiler.load_compiled_function = load_compiled_function


def declare_variables() -> None:
    """Makes our variables known to vLLM's check for unknown names. Idempotent."""
    import vllm.envs

    from vllm_zen import envs

    for variable in envs.VARIABLES:
        vllm.envs.environment_variables.setdefault(variable.name, lambda: None)


def allocate_pipeline_input(runner: Any) -> None:
    """Gives a pipeline rank behind the first the buffer it copies its input into. Idempotent."""
    from vllm.distributed import get_pp_group

    if get_pp_group().is_first_rank or runner.intermediate_tensors is not None:
        return
    runner.intermediate_tensors = runner.get_model().make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
    )


def stock_dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
    """vLLM's own choice for a layer, as it is without zentorch: SGL, oneDNN or torch."""
    from vllm.model_executor.layers import utils

    current = utils.dispatch_cpu_unquantized_gemm
    with _stock_linear_path():
        getattr(current, _PATCHED, current)(layer, remove_weight)


@contextlib.contextmanager
def _stock_linear_path() -> Iterator[None]:
    """Hides the Zen platform from vLLM's function, whose zentorch branch comes first otherwise."""
    from vllm_zen.platform import ZenCpuPlatform

    ZenCpuPlatform.hide_zen = True
    try:
        yield
    finally:
        ZenCpuPlatform.hide_zen = False

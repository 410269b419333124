"""Every touch of a vLLM private. Budget: five entries; seven are used, as none can go yet.

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

4. _get_cpu_list, get_cgroup_memory_limit and get_cgroup_memory_usage (vllm.utils.cpu_resource_utils)
   Symptom: vLLM asks the program lscpu which CPUs there are, through a shell: an image without util-linux
   does not start, and a program that hangs or prints oddly takes vLLM with it. And it reads the memory limit
   at the control groups' mount only: a process in a nested group is sized from the host, and killed.
   Upstream: vllm/utils/cpu_resource_utils.py; issues 38681, 40161, 45086.
   Delete when: vLLM reads sysfs, and the limits of the whole path of groups.
   Test: tests/plugin/test_compat.py compares both on this machine, and starts without lscpu.

5. sched_yield (vllm.distributed.device_communicators.shm_broadcast), under a CPU time quota only
   Symptom: between vLLM's processes a reader looks again and again for a second before it sleeps, so the
   engine core burns a CPU while a worker computes. On CPUs of its own that costs nothing; a quota counts it,
   and stops the workers: a sixth of the periods of a quota of 1.5 on the demo model, and a decode step takes
   1.3 times as long. Sleeping at once is no way out: its wake-up call is dropped where two come close, and
   the reader then sleeps for seconds.
   Upstream: vllm/distributed/device_communicators/shm_broadcast.py, SpinCondition.wait.
   Delete when: the time is a setting of vLLM's.
   Test: tests/plugin/test_compat.py fails when the attribute moves; tests/e2e/test_cases.py counts periods.

6. GPUModelRunner.intermediate_tensors
   Symptom: with --enforce-eager and pipeline parallelism every rank behind the first ends its first step in
   `assert self.intermediate_tensors is not None`. A dummy run allocates that buffer, and the CPU runner
   leaves the dummy run out where there is nothing to compile.
   Upstream: vllm/v1/worker/cpu_model_runner.py, warming_up_model; gpu_model_runner.py, _dummy_run.
   Delete when: the buffer is allocated outside the dummy run.
   Test: tests/plugin/test_compat.py fails when it is; tests/e2e/test_parallel.py runs a pipeline eagerly.

7. _POSSIBLE_KERNELS and _POSSIBLE_INT8_KERNELS (vllm.model_executor.kernels.linear)
   Symptom: stock runs AutoGPTQ and AWQ checkpoints on a generic kernel, int8 ones on weights that are not
   packed. vLLM's register_linear_kernel() puts a plugin's kernels behind its own, which take every layer.
   Upstream: vllm/model_executor/kernels/linear/__init__.py.
   Delete when: it can put them in front.
   Test: tests/plugin/test_prepared.py loads a layer of each format through vLLM and asks who runs it.
"""

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any

import torch

from vllm_zen import host
from vllm_zen.host import Host

_PATCHED = "_vllm_zen_stock"


def apply(machine: Host | None = None) -> list[str]:
    """Applies every entry; returns what to say of those that depend on the host. Idempotent.

    Raises AttributeError where vLLM or torch moved a name.
    """
    machine = host.read_host() if machine is None else machine
    _replace_linear_dispatch()
    _let_saved_graphs_load()
    _read_the_host_ourselves()
    run_prepared_checkpoints()
    if machine.quota is None or machine.quota.value >= len(machine.cpus):
        return []
    _nap_between_looks()
    return [
        f"waiting processes nap between looks at their messages, as {machine.quota.source} counts the time"
    ]


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


def run_prepared_checkpoints() -> None:
    """Puts our kernels for prepared checkpoints before vLLM's. Idempotent."""
    from vllm.model_executor.kernels import linear
    from vllm.platforms.interface import PlatformEnum

    from vllm_zen.quantization.prepared import ZenInt4LinearKernel, ZenInt8LinearKernel

    for kernels, ours in (
        (linear._POSSIBLE_KERNELS[PlatformEnum.CPU], ZenInt4LinearKernel),
        (linear._POSSIBLE_INT8_KERNELS[PlatformEnum.CPU], ZenInt8LinearKernel),
    ):
        if ours not in kernels:
            kernels.insert(0, ours)


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


def _read_the_host_ourselves() -> None:
    from vllm.utils import cpu_resource_utils

    if hasattr(cpu_resource_utils._get_cpu_list, _PATCHED):
        return

    def _get_cpu_list() -> list[Any]:
        machine = host.read_host()
        core_of = {cpu: core[0] for core in machine.cores for cpu in core}
        return [
            cpu_resource_utils.LogicalCPUInfo(cpu, core_of.get(cpu, cpu), node.id)
            for node in machine.nodes
            for cpu in node.cpus
        ]

    def get_cgroup_memory_limit() -> int | None:
        limit = host.read_host().memory_limit
        return None if limit is None else int(limit.value)

    def get_cgroup_memory_usage() -> int | None:
        limit = host.read_host().memory_limit
        return None if limit is None else limit.used

    setattr(_get_cpu_list, _PATCHED, cpu_resource_utils._get_cpu_list)
    for function in (_get_cpu_list, get_cgroup_memory_limit, get_cgroup_memory_usage):
        if not hasattr(cpu_resource_utils, function.__name__):
            raise AttributeError(f"vllm.utils.cpu_resource_utils has no {function.__name__} any more")
        setattr(cpu_resource_utils, function.__name__, function)


# Between two looks at the shared memory. A look takes some microseconds, a step at least some milliseconds.
_NAP_SECONDS = 100e-6


def _nap() -> None:
    time.sleep(_NAP_SECONDS)


def _nap_between_looks() -> None:
    from vllm.distributed.device_communicators import shm_broadcast

    if not hasattr(shm_broadcast, "sched_yield"):
        raise AttributeError("vllm's shm_broadcast has no sched_yield any more")
    shm_broadcast.sched_yield = _nap


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

"""ZenCpuPlatform: vLLM's CPU platform with this project's parts in place of the slow ones."""

import functools
import logging
import multiprocessing
import os
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms.cpu import CpuPlatform

from vllm_zen import activation, binding, checkpoint, compat, envs, host, metrics, plan, ray_worker, zentorch
from vllm_zen.activation import logger
from vllm_zen.attention import choice
from vllm_zen.errors import UnsupportedError, ZenError
from vllm_zen.options import Options
from vllm_zen.quantization import weights
from vllm_zen.quantization.settings import INT4, INT8

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WORKER_CLASS = "vllm_zen.worker.ZenWorker"
COMMUNICATOR_CLASS = "vllm_zen.communicator.ZenCommunicator"


class ZenCpuPlatform(CpuPlatform):  # type: ignore[misc]
    """The platform of a process on a Zen CPU. `_enum` stays CPU: all of vLLM's CPU code applies."""

    device_name: str = "cpu"
    device_type: str = "cpu"
    # Without a name vLLM refuses Ray on this platform.
    ray_device_key: str = ray_worker.RESOURCE

    # True while compat.stock_dispatch() lets vLLM choose as it would without zentorch.
    hide_zen: bool = False

    def is_zen_cpu(self) -> bool:
        """Turns on vLLM's in-tree zentorch branches (quantized, MoE and vision layers).

        Those ask whether an op exists, not whether it runs here. So where zentorch is broken or has no
        bfloat16 on this CPU, the answer is no, and they take vLLM's other kernels.
        """
        return not type(self).hide_zen and _in_tree_zentorch_runs()

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        """No float16: no Zen up to 5 computes in it. The first is what `auto` falls back to."""
        return [torch.bfloat16, torch.float32]

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        """Before arguments are parsed: names of quantization methods are checked there."""
        from vllm_zen.quantization import config

        super().pre_register_and_update(parser)
        config.register()

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Refuses what no Zen CPU runs, then fills in this platform's choices."""
        from vllm_zen.compile import backports

        model_config = vllm_config.model_config
        if model_config is not None and model_config.dtype == torch.float16:
            raise UnsupportedError(
                "--dtype float16 is refused: zentorch and vllm-zen have no float16 kernels for Zen CPUs. "
                "Use --dtype bfloat16 (what auto chooses for float16 checkpoints) or --dtype float32."
            )
        if model_config is not None and model_config.quantization in (INT8, INT4):
            weights.check_table()
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = WORKER_CLASS
        options = Options.from_additional_config(vllm_config.additional_config)
        machine = host.read_host()
        cls._bind_threads(vllm_config, machine)
        cls._size_kv_cache(vllm_config, machine, options)
        cls._key_compile_cache(vllm_config)
        backports.apply()
        super().check_and_update_config(vllm_config)
        if model_config is not None and multiprocessing.parent_process() is None:
            metrics.publish(model_config.quantization, choice.of_model(vllm_config), model_config.dtype)

    @classmethod
    def _bind_threads(cls, vllm_config: "VllmConfig", machine: host.Host) -> None:
        """Refuses wrong values of vLLM's CPU variables now, not deep in a worker, and says what is corrected.

        The processes vLLM starts later inherit the corrected environment, and find nothing to correct.
        """
        parallel = vllm_config.parallel_config
        if parallel.use_ray:
            binding.check_under_ray(os.environ)
            return
        # Without data parallelism the local rank says 0, not None.
        replica = parallel.data_parallel_rank_local if parallel.data_parallel_size > 1 else None
        for correction in binding.apply(
            os.environ, parallel.local_world_size, parallel.data_parallel_size_local, replica, machine
        ):
            _log_once(logging.WARNING if correction.of_user else logging.INFO, correction.why)

    @classmethod
    def _size_kv_cache(cls, vllm_config: "VllmConfig", machine: host.Host, options: Options) -> None:
        """Sizes the KV cache from what this process may really use, where the user left it to vLLM.

        vLLM takes 92 % of a node whatever else lives there, and refuses to start where less is free.
        """
        cache, model = vllm_config.cache_config, vllm_config.model_config
        untouched = (
            cache.kv_cache_memory_bytes is None
            and cache.gpu_memory_utilization == type(cache).gpu_memory_utilization
            and not os.environ.get(binding.KV_SPACE)
        )
        if not untouched or model is None:
            return
        parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
        ranks, engines = parallel.local_world_size, max(1, parallel.data_parallel_size_local)
        request = plan.Request(
            max_model_len=model.max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            dtype=str(model.dtype).removeprefix("torch."),
            pack_tied_head=options.pack_tied_head,
            quantization=model.quantization,
        )
        try:
            sizing = plan.size(checkpoint.read(model.model), machine, request, ranks, engines)
        except ZenError as error:
            _log_once(logging.INFO, f"the KV cache is sized by vLLM: {error}")
            return
        cache.kv_cache_memory_bytes = sizing.memory.kv_cache // ranks
        _log_once(logging.INFO, sizing.cache_reason)

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """Our backend for a layer it supports, vLLM's for the others."""
        from vllm.config import get_current_vllm_config_or_none

        native, reason = choice.choose(
            selected_backend, attn_selector_config, get_current_vllm_config_or_none()
        )
        choice.record(native, reason)
        if native:
            return choice.BACKEND_CLASS
        path: str = super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
        return path

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """vLLM's own, which takes two machines for one."""
        return COMMUNICATOR_CLASS

    @classmethod
    def _key_compile_cache(cls, vllm_config: "VllmConfig") -> None:
        """Adds what decides the traced graph to the configuration vLLM hashes for its compile cache.

        Without it a graph that calls zentorch with packed weights is found again by a start that packs
        nothing (vLLM leaves VLLM_ZENTORCH_WEIGHT_PREPACK out of the key) or that has no zentorch.
        """
        if not isinstance(vllm_config.additional_config, dict):
            logger.warning("additional_config is not a dict: run with a fresh VLLM_CACHE_ROOT after changes")
            return
        vllm_config.additional_config["vllm_zen_graph"] = {
            "linear": envs.linear(),
            # Our backend writes the cache in its forward, vLLM's in an op of its own in the graph.
            "attention": envs.attention(),
            "zentorch": zentorch.load().describe(),
            "prepack": envs.weight_prepack() and zentorch.prepack_agrees()[0],
            "features": sorted(activation.cpuid_features()),
            "isa": envs.isa(),
        }

    @classmethod
    def validate_environ(cls, hard_fail: bool) -> None:
        """vLLM's check for unknown VLLM_* names, with ours known to it."""
        compat.declare_variables()
        super().validate_environ(hard_fail)


@functools.cache
def _in_tree_zentorch_runs() -> bool:
    if zentorch.load().state == "absent":
        return True  # without the ops the branches are closed by themselves
    return zentorch.supports_linear(torch.bfloat16)[0]


@functools.cache
def _log_once(level: int, line: str) -> None:
    """vLLM makes further configurations from the first one, each of which comes through here."""
    logger.log(level, "vllm-zen: %s.", line)

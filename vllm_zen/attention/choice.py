"""Who runs a layer's attention: our kernels or vLLM's. Decided when the layer is made, with a reason."""

import logging
from typing import TYPE_CHECKING, Any

import torch

from vllm_zen import envs, ops
from vllm_zen.activation import logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BACKEND_CLASS = "vllm_zen.attention.backend.ZenAttentionBackend"
HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
# The most query heads of one KV head that a task of the kernel takes (csrc/kernels.h, kMaxRows).
MAX_GROUP = 96

# Who runs layers in this process, and why where it is not us, in the order of first use.
_decisions: dict[tuple[str, str], None] = {}


def choose(selected: Any, layer: Any, config: "VllmConfig | None") -> tuple[bool, str]:
    """Whether our kernels run a layer; the reason where they do not.

    selected is the AttentionBackendEnum the user asked for or None, layer vLLM's AttentionSelectorConfig.
    """
    reason = _asked_for(selected) or _process_cannot() or _layer_cannot(layer) or _model_cannot(config)
    return not reason, reason


def of_model(config: "VllmConfig") -> str:
    """native or vllm: what a plain layer of the model gets, before any layer is made."""
    from vllm.v1.attention.selector import AttentionSelectorConfig

    layer = AttentionSelectorConfig(
        head_size=config.model_config.get_head_size(),
        dtype=config.model_config.dtype,
        kv_cache_dtype=config.cache_config.cache_dtype,
        block_size=None,
        use_mla=config.model_config.use_mla,
    )
    native, _ = choose(config.attention_config.backend, layer, config)
    return "native" if native else "vllm"


def record(native: bool, reason: str) -> None:
    """Remembers a decision for summary(), and says once why a layer is left to vLLM."""
    decision = ("native" if native else "vllm", reason)
    if decision not in _decisions:
        _decisions[decision] = None
        if not native:
            logger.log(logging.INFO, "vllm-zen: attention is left to vLLM: %s.", reason)


def summary() -> str:
    """For the start-up line: native, or vllm with the reasons, or both."""
    parts = [name if not reason else f"{name} ({reason})" for name, reason in _decisions]
    return ", ".join(parts) or "none"


def _asked_for(selected: Any) -> str:
    if envs.attention() == "vllm":
        return f"{envs.ATTENTION.name}=vllm"
    if selected is not None and selected.name == "CPU_ATTN":
        return "--attention-backend CPU_ATTN"
    return ""


def _process_cannot() -> str:
    native = ops.load()
    if not native.ok:
        return f"no native kernels, {native.reason}"
    if ops.isa() == "ref" and envs.attention() != "native":
        return f"the portable kernels are slower than vLLM's, and {envs.ATTENTION.name}=native takes them"
    return ""


def _layer_cannot(layer: Any) -> str:
    if layer.use_mla or layer.use_sparse:
        return "multi-head latent attention" if layer.use_mla else "sparse attention"
    if layer.attn_type != "decoder":
        return f"{layer.attn_type} attention"
    if layer.dtype != torch.bfloat16:
        return f"dtype {str(layer.dtype).removeprefix('torch.')}"
    if layer.kv_cache_dtype not in (None, "auto", "bfloat16"):
        return f"KV cache of {layer.kv_cache_dtype}"
    if layer.head_size not in HEAD_SIZES:
        return f"head size {layer.head_size}"
    if layer.use_mm_prefix:
        return "bidirectional prefixes"
    if layer.use_non_causal and layer.has_sliding_window:
        return "a sliding window that is not causal"
    return ""


def _model_cannot(config: "VllmConfig | None") -> str:
    if config is None or config.model_config is None:
        return ""
    if config.kv_transfer_config is not None:
        return "KV caches are transferred, and the receiver may expect vLLM's layout"
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism"
    group = config.model_config.get_num_attention_heads(parallel) // config.model_config.get_num_kv_heads(
        parallel
    )
    if group > MAX_GROUP:
        return f"{group} query heads to a KV head"
    return ""

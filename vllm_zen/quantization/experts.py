"""Mixtures of experts: every expert's weights quantized as a linear layer's are, all run by one native op."""

import functools
from typing import Any

import torch
from torch.nn.functional import pad
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase

from vllm_zen.activation import logger
from vllm_zen.linear.backends import free_weight
from vllm_zen.ops_linear import COLUMNS
from vllm_zen.ops_moe import ACTIVATIONS, moe
from vllm_zen.quantization import weights
from vllm_zen.quantization.settings import Scheme

LAYERS = ("w13", "w2")


def method_of(layer: Any, scheme: Scheme, prefix: str, progress: weights.Progress) -> tuple[Any, Scheme]:
    """The method of a layer of experts and its scheme: ours, or vLLM's in bf16 with a line that says why."""
    config = layer.moe_config
    if scheme.bits == "bf16":
        return UnquantizedFusedMoEMethod(config), scheme
    if config.activation.value not in ACTIVATIONS:
        reason = f"their activation is {config.activation.value}, ours are {', '.join(ACTIVATIONS)}"
        _say_unquantized(reason)
        return UnquantizedFusedMoEMethod(config), Scheme("bf16")
    return ZenExpertsMethod(config, scheme, prefix, progress), scheme


class ZenExpertsMethod(OnlineMoEMethodBase):  # type: ignore[misc]
    """Experts of one scheme. vLLM's base class makes the weights on the meta device and fills them."""

    supports_eplb = False  # it would move weights between ranks as vLLM laid them out

    def __init__(self, moe: Any, scheme: Scheme, prefix: str, progress: weights.Progress) -> None:
        super().__init__(moe)
        self.scheme = scheme
        self.prefix = prefix
        self.progress = progress

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: what vLLM's own kernels would need."""
        return

    def process_weights_after_loading(self, layer: Any) -> None:
        """Quantizes and packs expert by expert, and frees what was loaded. Again: nothing."""
        if hasattr(layer, "zen_intermediate"):
            return
        self._zero_padding(layer)
        layer.zen_intermediate = layer.w2_weight.shape[-1]
        for name in LAYERS:
            all_experts = getattr(layer, f"{name}_weight").detach()
            operands = {**self._quantized(all_experts, name), "bias": self._bias(layer, name)}
            weights.attach(layer, operands, f"{name}_")
            self.progress.add(all_experts.numel())
            free_weight(layer, f"{name}_weight")

    def _quantized(self, all_experts: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
        parts = (
            weights.quantize(weight, self.scheme, f"{self.prefix}.{expert}.{name}")
            for expert, weight in enumerate(all_experts)
        )
        return weights.stacked(parts, len(all_experts))

    def _bias(self, layer: Any, name: str) -> torch.Tensor | None:
        if not self.moe.has_bias:
            return None
        bias = getattr(layer, f"{name}_bias").detach().float()
        return pad(bias, (0, -bias.shape[1] % COLUMNS))

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """x [tokens, K] through the experts that topk_ids [tokens, top_k] name, weighted."""
        if layer.apply_router_weight_on_input:  # top-1 only
            x, topk_weights = x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
        if layer.expert_map is not None:
            topk_ids = layer.expert_map[topk_ids.long()]
        w13, w2 = (
            {**weights.operands_of(layer, f"{of}_"), "bias": getattr(layer, f"{weights.OPERAND}{of}_bias")}
            for of in LAYERS
        )
        return moe(
            x.contiguous(),
            w13,
            w2,
            topk_weights.float().contiguous(),
            topk_ids.int().contiguous(),
            intermediate=layer.zen_intermediate,
            activation=layer.activation.value,
            rotated=self.scheme.rotated,
            act_bits=self.scheme.act_bits,
        )


@functools.cache
def _say_unquantized(reason: str) -> None:
    logger.info("experts stay in bf16: %s", reason)

"""Mixtures of experts on quantized weights: a typed wrapper of the native op."""

from collections.abc import Mapping
from typing import Any

import torch

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def moe(
    x: torch.Tensor,
    w13: Mapping[str, Any],
    w2: Mapping[str, Any],
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    intermediate: int,
    activation: str = "silu",
    rotated: bool = False,
    act_bits: int = 8,
) -> torch.Tensor:
    """Every token through the experts it chose: w2(activation(gate) * up), weighted and added up.

    x             bf16 or float32 [tokens, K]
    w13, w2       `weight`, `scale` and maybe `offset` of E experts, stacked, each as Int8Weight or Int4Weight
                  holds them; maybe `bias`, float32 [E, blocks * 64]. w13 are [2 * intermediate, K], gates
                  before ups; w2 are [K, intermediate].
    topk_weights  float32 [tokens, top_k]
    topk_ids      int32 [tokens, top_k]; negative: of no expert here, and adds nothing
    activation    one of ACTIVATIONS
    rotated       int8 weights were rotated before they were quantized, and inputs are too
    act_bits      of inputs: 8, or with int4 weights 16, which is bf16
    returns       [tokens, K] of x's dtype

    What lies between is in x's dtype. Equal for any number of threads, and for a token in any company.
    Raises RuntimeError naming the argument and the value for another dtype, shape, stride or activation.
    """
    output: torch.Tensor = torch.ops.vllm_zen.moe(
        x,
        *(w13.get(name) for name in ("weight", "scale", "offset", "bias")),
        *(w2.get(name) for name in ("weight", "scale", "offset", "bias")),
        topk_weights,
        topk_ids,
        intermediate,
        activation,
        rotated,
        act_bits,
    )
    return output


def register_fakes() -> None:
    """For torch.compile; once, after the library is loaded."""

    @torch.library.register_fake("vllm_zen::moe")  # type: ignore[misc]
    def _(x: torch.Tensor, *others: Any) -> torch.Tensor:
        return torch.empty_like(x)

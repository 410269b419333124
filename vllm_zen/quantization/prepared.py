"""Checkpoints that were quantized before, on our kernels.

vLLM asks classes in a list, in order, whether they can run a layer. Ours stand first (compat.py); what they
refuse goes on to vLLM's own kernels, and the reason is said once.
"""

import functools
from typing import Any

import torch
import vllm.envs
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.kernels.linear import Int8ScaledMMLinearKernel, MPLinearKernel, MPLinearLayerConfig
from vllm.model_executor.layers.quantization.utils.w8a8_utils import convert_to_channelwise
from vllm.scalar_type import scalar_types

from vllm_zen.activation import logger
from vllm_zen.errors import UnsupportedError
from vllm_zen.linear import dispatch
from vllm_zen.linear.backends import free_weight
from vllm_zen.ops_linear import GROUPS
from vllm_zen.options import Options
from vllm_zen.quantization import weights
from vllm_zen.quantization.settings import Scheme

# vLLM's switch: 0 keeps activations of int4 layers as they are.
W4A8 = "VLLM_CPU_INT4_W4A8"
# Codes of 8 are zero, zero points come along, and one byte a code.
INT4_TYPES = (scalar_types.uint4b8, scalar_types.uint4, scalar_types.int4)
# A layer's inputs in the order its kernel wants them, where the checkpoint has them in another.
ORDER = "zen_input_order"


class ZenInt4LinearKernel(MPLinearKernel):  # type: ignore[misc]
    """int4 weights in groups or with a scale an output: compressed-tensors, AutoGPTQ and AWQ."""

    @classmethod
    def get_min_capability(cls) -> int:
        """A matter of GPUs."""
        return 0

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Whether our kernels run the layer, and why not."""
        reason = _why_not_native() or _why_not_int4(c)
        if reason:
            _say_refusal("int4", reason)
        return not reason, reason or None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Packs the layer's codes, scales and zero points, and frees what was loaded."""
        inputs, outputs = self.config.partition_weight_shape
        words, scale, zero_points = self._get_weight_params(layer)
        codes = _by_output(words)
        if words.dtype == torch.int8:
            codes = (codes + 8).view(torch.uint8)
        order = getattr(layer, ORDER, None)
        scheme = Scheme("int4", self._group(), self.config.zero_points, _act_bits())
        operands = weights.pack_int4(
            codes if order is None else codes[:, order],
            _of_native_groups(_by_output(scale), inputs, scheme.group),
            _of_native_groups(_by_output(zero_points), inputs, scheme.group) if scheme.zero_points else None,
            scheme.group,
        )
        _attach(layer, operands, outputs, scheme)
        _free(layer, self.w_q_name, self.w_s_name, self.w_zp_name)
        _say_activations(scheme)

    def _group(self) -> int:
        """Our group: the checkpoint's, or 128 inputs of a larger one, which then share its scale."""
        size: int = self.config.group_size
        return size if size in GROUPS else max(GROUPS)

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] through the layer."""
        order = getattr(layer, ORDER, None)
        return _run(layer, x if order is None else x.index_select(-1, order), bias)


class ZenInt8LinearKernel(Int8ScaledMMLinearKernel):  # type: ignore[misc]
    """int8 weights with a scale an output or a tensor, and int8 activations.

    Activations get a scale for every token and 256 inputs, also where the checkpoint brings static scales and
    zero points for them: those stand for what a calibration saw, these for the values at hand.
    """

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Whether our kernels run here."""
        reason = _why_not_native()
        if reason:
            _say_refusal("int8", reason)
        return not reason, reason or None

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        """Every layer."""
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Packs codes and scales, and frees what was loaded."""
        weight_name, scale_name, *input_names = self.layer_param_names
        weight, scale = getattr(layer, weight_name).data, getattr(layer, scale_name).data
        if not self.config.is_channelwise:
            scale = convert_to_channelwise(scale, layer.logical_widths)
        scheme = Scheme("int8")
        _attach(layer, weights.pack_int8(weight, scale.flatten()), len(weight), scheme)
        _free(layer, weight_name, scale_name, *input_names)

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] through the layer."""
        return _run(layer, x, bias)


def _why_not_native() -> str:
    try:
        weights.check_table()
    except UnsupportedError as error:
        return str(error)
    return ""


def _why_not_int4(c: MPLinearLayerConfig) -> str:
    if c.weight_type not in INT4_TYPES:
        return f"weights of {c.weight_type}; ours are 4 bits wide"
    if c.act_type not in (torch.bfloat16, torch.float32):
        return f"activations in {c.act_type}; ours take bfloat16 and float32"
    if c.group_size != -1 and c.group_size not in GROUPS and c.group_size % max(GROUPS):
        return f"groups of {c.group_size}; ours have 32, 64 or a multiple of 128"
    return ""


def _act_bits() -> int:
    """As vLLM's variable or our option wants it: either can keep activations in bf16."""
    config = get_current_vllm_config_or_none()
    options = Options.from_additional_config(config.additional_config if config is not None else {})
    return options.quantization.act_bits if vllm.envs.VLLM_CPU_INT4_W4A8 else 16


def _by_output(parameter: Any) -> torch.Tensor:
    """A parameter of a checkpoint as [N, ...], with int32 words of eight codes as bytes of one."""
    values: torch.Tensor = parameter.data
    packed = getattr(parameter, "packed_dim", None)
    if packed is None:
        return values if parameter.output_dim == 0 else values.t()
    octets = (values if packed == 1 else values.t()).contiguous().view(torch.uint8)
    codes = torch.stack([octets & 15, octets >> 4], dim=-1).flatten(1)  # [the other dimension, 8 x words]
    return codes.t() if packed == parameter.output_dim else codes


def _of_native_groups(values: torch.Tensor, inputs: int, group: int) -> torch.Tensor:
    """[N, groups of the checkpoint] as [N, groups of ours], each within one of those."""
    repeats = -(-inputs // group) if values.shape[1] == 1 else inputs // values.shape[1] // group
    return values.repeat_interleave(repeats, dim=1)


def _attach(layer: Any, operands: dict[str, torch.Tensor], outputs: int, scheme: Scheme) -> None:
    weights.attach(layer, operands)
    layer.zen_columns, layer.zen_scheme = outputs, scheme
    dispatch.count(f"checkpoint's {scheme}")
    weights.return_memory()


def _run(layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return weights.run(layer.zen_scheme, weights.operands_of(layer), x, bias, layer.zen_columns)


def _free(layer: Any, *names: str | None) -> None:
    for name in names:
        if name and getattr(layer, name, None) is not None:
            free_weight(layer, name)


@functools.cache
def _say_refusal(bits: str, reason: str) -> None:
    logger.info("some %s layers of the checkpoint stay on vLLM's kernels: %s", bits, reason)


@functools.cache
def _say_activations(scheme: Scheme) -> None:
    if scheme.act_bits == 8:
        logger.info(
            "int4 layers of the checkpoint run with int8 activations, a scale a token and group (w4a8). "
            "To keep them in bfloat16 (w4a16, slower): %s=0",
            W4A8,
        )
    else:
        logger.info("int4 layers of the checkpoint run with bfloat16 activations (w4a16), as asked for")

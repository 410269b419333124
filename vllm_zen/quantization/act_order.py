"""Checkpoints with activation order, which vLLM 0.32 refuses: inputs are sorted by group when a layer loads.

GPTQ may quantize the most active inputs first and number groups in that order (AutoGPTQ's desc_act,
compressed-tensors' actorder "group"); an index says which group an input is in. Sorted by it, groups lie side
by side as the kernels want them, and a layer's inputs are put in the same order when they come.
"""

import copy
from typing import Any

import torch
from torch.nn import Parameter
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization import get_quantization_config, register_quantization_config
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig, AutoGPTQLinearMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
    CompressedTensorsLinearMethod,
)
from vllm.model_executor.models.utils import WeightsMapper

from vllm_zen.errors import ModelError, UnsupportedError
from vllm_zen.quantization.prepared import ORDER, ZenInt4LinearKernel


class _Ordered:
    """A linear method of vLLM's that also loads the index, and sorts inputs by it."""

    index_name: str

    def __init__(self, prefix: str, quant_config: Any) -> None:
        super().__init__(quant_config)  # type: ignore[call-arg]
        self.prefix = prefix

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        *others: Any,
        **attributes: Any,
    ) -> None:
        """vLLM's parameters and an index [K]. Raises UnsupportedError where the layer cannot be sorted."""
        if input_size_per_partition != input_size:
            raise UnsupportedError(
                f"{self.prefix}: the checkpoint has activation order, whose groups tensor parallelism would "
                "tear apart. Use --tensor-parallel-size 1."
            )
        super().create_weights(  # type: ignore[misc]
            layer, input_size_per_partition, output_partition_sizes, input_size, *others, **attributes
        )
        owner: Any = getattr(layer, "scheme", self)
        kernel = owner.kernel
        if not isinstance(kernel, ZenInt4LinearKernel):
            raise UnsupportedError(
                f"{self.prefix}: the checkpoint has activation order, and {type(kernel).__name__}, which "
                "runs this layer, does not know it. Why ours does not is logged above."
            )
        index: Any = Parameter(torch.full((input_size,), -1, dtype=torch.int32), requires_grad=False)
        index.weight_loader = self._load
        layer.register_parameter(self.index_name, index)

    def _load(self, index: Parameter, loaded: torch.Tensor, shard: Any = None) -> None:
        if index[0] >= 0 and not torch.equal(index.data, loaded.to(index.dtype)):
            raise ModelError(
                f"{self.prefix} is fused from layers whose inputs are ordered differently. Ask for the "
                "checkpoint without activation order."
            )
        index.data.copy_(loaded)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Sorts, then lets the kernel pack."""
        if hasattr(layer, self.index_name):
            order = torch.argsort(getattr(layer, self.index_name).data, stable=True)
            delattr(layer, self.index_name)
            if not torch.equal(order, torch.arange(len(order))):
                layer.register_buffer(ORDER, order, persistent=False)
        super().process_weights_after_loading(layer)  # type: ignore[misc]


@register_weight_loader_v2_supported_method
class OrderedGPTQMethod(_Ordered, AutoGPTQLinearMethod):  # type: ignore[misc]
    """AutoGPTQ's desc_act."""

    index_name = "g_idx"


@register_weight_loader_v2_supported_method
class OrderedCompressedTensorsMethod(_Ordered, CompressedTensorsLinearMethod):  # type: ignore[misc]
    """compressed-tensors' actorder "group"."""

    index_name = "weight_g_idx"


def _refuse_experts(layer: torch.nn.Module, prefix: str) -> None:
    if isinstance(layer, RoutedExperts):
        raise UnsupportedError(
            f"{prefix}: experts with activation order are not supported. Use a checkpoint without."
        )


class _OrderedConfig:
    """A configuration of vLLM's whose linear layers may have activation order."""

    act_order = False
    stock_method: type[Any]
    ordered_method: type[Any]
    config_name: str  # where a stock method keeps its configuration

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """vLLM's method of the layer, with the index where there is one."""
        method = super().get_quant_method(layer, prefix)  # type: ignore[misc]
        if not self.act_order:
            return method
        _refuse_experts(layer, prefix)
        if isinstance(method, self.stock_method):
            return self.ordered_method(prefix, getattr(method, self.config_name))
        return method


class ZenGPTQConfig(_OrderedConfig, AutoGPTQConfig):  # type: ignore[misc]
    """vLLM's, and desc_act."""

    stock_method = AutoGPTQLinearMethod
    ordered_method = OrderedGPTQMethod
    config_name = "quant_config"

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ZenGPTQConfig":
        """Reads quantize_config.json's or config.json's entry."""
        made: ZenGPTQConfig = super().from_config({**config, "desc_act": False})
        made.act_order = bool(config.get("desc_act")) and made.group_size != -1
        return made

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:
        """Every checkpoint of AutoGPTQ has an index; where it says nothing it is not read."""
        return WeightsMapper() if self.act_order else super().get_checkpoint_weight_mapper()


class ZenCompressedTensorsConfig(_OrderedConfig, CompressedTensorsConfig):  # type: ignore[misc]
    """vLLM's, and actorder "group"."""

    stock_method = CompressedTensorsLinearMethod
    ordered_method = OrderedCompressedTensorsMethod
    config_name = "quantization_config"

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ZenCompressedTensorsConfig":
        """Reads config.json's entry."""
        config = copy.deepcopy(config)
        ordered = False
        for group in config.get("config_groups", {}).values():
            weights = group.get("weights") or {}
            if weights.get("actorder") in ("group", "dynamic"):
                weights["actorder"] = None
                ordered = True
        made: ZenCompressedTensorsConfig = super().from_config(config)
        made.act_order = ordered
        return made


REPLACED = {
    "auto_gptq": (AutoGPTQConfig, ZenGPTQConfig),
    "gptq": (AutoGPTQConfig, ZenGPTQConfig),
    "gptq_marlin": (AutoGPTQConfig, ZenGPTQConfig),
    "compressed-tensors": (CompressedTensorsConfig, ZenCompressedTensorsConfig),
}


def register() -> None:
    """Puts ours in the place of vLLM's. Again, or where another plugin was first: nothing."""
    for name, (stock, ours) in REPLACED.items():
        if get_quantization_config(name) is stock:
            register_quantization_config(name)(ours)

"""What vLLM's layers call: weights are made on the meta device, loaded, and quantized one layer at a time."""

from typing import Any

import torch
from torch.nn import Parameter
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import (
    get_layerwise_info,
    initialize_online_processing,
)
from vllm.model_executor.parameter import ModelWeightParameter

from vllm_zen import ops_linear
from vllm_zen.errors import UnsupportedError
from vllm_zen.linear.backends import free_weight
from vllm_zen.quantization import weights
from vllm_zen.quantization.settings import Scheme
from vllm_zen.quantization.weights import OPERAND


@register_weight_loader_v2_supported_method
class ZenLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """A linear layer, or an output head with a weight of its own, of one scheme."""

    uses_meta_device = True

    def __init__(self, scheme: Scheme, prefix: str, progress: weights.Progress) -> None:
        self.scheme = scheme
        self.prefix = prefix
        self.progress = progress

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """A weight [N, K] on the meta device, which vLLM fills when all its parts are read."""
        group = self.scheme.group
        if input_size_per_partition != input_size and group and input_size_per_partition % group:
            fitting = [f"group_size {g}" for g in ops_linear.GROUPS if input_size_per_partition % g == 0]
            raise UnsupportedError(
                f"{self.prefix}: tensor parallelism gives each rank {input_size_per_partition} of "
                f"{input_size} inputs, which groups of {group} do not divide. Use "
                f"{' or '.join(['another tensor-parallel size', *fitting])}, or keep the layer "
                "in int8 or bf16 with `layers`."
            )
        weight = ModelWeightParameter(
            data=torch.empty(
                sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype, device="meta"
            ),
            input_dim=1,
            output_dim=0,
            weight_loader=extra_weight_attrs["weight_loader"],
        )
        layer.register_parameter("weight", weight)
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Quantizes, packs, and frees the weight that was loaded. Again: nothing."""
        if not hasattr(layer, OPERAND + "weight"):
            self.quantize(layer, layer.weight.detach())
            free_weight(layer)

    def quantize(self, layer: Any, weight: torch.Tensor) -> None:
        """Gives the layer the operands of a weight [N, K]."""
        weights.attach(layer, weights.quantize(weight, self.scheme, self.prefix))
        layer.zen_columns = len(weight)
        self.progress.add(weight.numel())

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] through the layer."""
        return weights.run(self.scheme, weights.operands_of(layer), x, bias, layer.zen_columns)


class ZenHeadMethod(ZenLinearMethod):
    """An output head, which may be tied to the embedding table."""

    def __init__(
        self, scheme: Scheme, prefix: str, progress: weights.Progress, *, embedding_from_head: bool
    ) -> None:
        super().__init__(scheme, prefix, progress)
        self._embedding_from_head = embedding_from_head

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """As of a linear layer; the loader of a vocabulary pads it."""
        super().create_weights(layer, *args, **kwargs)
        # Rows that fill the vocabulary up are not in the checkpoint, and vLLM counts what is read.
        layer.weight.weight_loader_numel = layer.shard_indices.num_org_elements * layer.weight.shape[1]

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """Waits for the table: the head has no weight of its own to load."""
        del layer.weight
        get_layerwise_info(layer).reset()
        layer.zen_table = [embed_tokens]  # in a list, or it would become a module of the head
        return layer

    def process_weights_after_loading(self, layer: Any) -> None:
        """Quantizes the head's own weight, or the table's."""
        if not hasattr(layer, "zen_table"):
            super().process_weights_after_loading(layer)
            return
        (table,) = layer.zen_table
        if hasattr(layer, OPERAND + "weight") or table.weight.is_meta:
            return
        self.quantize(layer, table.weight.detach())
        if self._embedding_from_head and isinstance(table.quant_method, ZenEmbeddingMethod):
            table.quant_method.read_from(table, layer)
        layer.weight = Parameter(torch.empty(0, dtype=table.params_dtype), requires_grad=False)


class ZenEmbeddingMethod(UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """An embedding table that gives way to the int8 rows of the head it is tied to."""

    def read_from(self, layer: Any, head: Any) -> None:
        """Frees the table: from now on the head's rows are looked up."""
        layer.register_buffer("zen_rows", head.zen_weight, persistent=False)
        layer.register_buffer("zen_rows_scale", head.zen_scale, persistent=False)
        layer.zen_rows_rotated = head.quant_method.scheme.rotated
        free_weight(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """The table's own business, as long as it is there."""
        if not hasattr(layer, "zen_rows"):
            super().process_weights_after_loading(layer)

    def embedding(self, layer: Any, input_: torch.Tensor) -> torch.Tensor:
        """Rows of the table, or of the head."""
        if not hasattr(layer, "zen_rows"):
            rows: torch.Tensor = super().embedding(layer, input_)
            return rows
        return ops_linear.embedding_w8(
            input_,
            layer.zen_rows,
            layer.zen_rows_scale,
            layer.embedding_dim,
            layer.params_dtype,
            rotated=layer.zen_rows_rotated,
        )

"""The attention backend vLLM gets: metadata once a step, two op calls a layer."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from vllm_zen import ops
from vllm_zen.attention.choice import HEAD_SIZES
from vllm_zen.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata

# A tile of the cache (csrc/kernels.h, kKvTile).
BLOCK_MULTIPLE = 32


class ZenAttentionBackend(AttentionBackend):  # type: ignore[misc]
    """Decoder attention on vllm_zen's kernels, over a cache in their own layout (csrc/README.md)."""

    # The cache is written in forward(): one call between Python and the graph fewer a layer.
    forward_includes_kv_cache_update: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's AttentionBackendEnum meant for plugins."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["ZenAttentionImpl"]:
        return ZenAttentionImpl

    @staticmethod
    def get_builder_cls() -> type["ZenAttentionMetadataBuilder"]:
        return ZenAttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(BLOCK_MULTIPLE)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_SIZES)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Blocks whose heads lie one after the other, as for vLLM's own CPU backend."""
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False


@dataclass
class ZenAttentionMetadata(AttentionMetadata):  # type: ignore[misc]
    """What all layers of a group share in a step."""

    num_actual_tokens: int
    tasks: torch.Tensor  # int32 [tasks, fields], from ops.plan_attention
    seq_lens: torch.Tensor  # int32 [sequences]
    block_table: torch.Tensor  # int32 [sequences, blocks]
    slot_mapping: torch.Tensor  # int64 [>= num_actual_tokens]


class ZenAttentionMetadataBuilder(AttentionMetadataBuilder[ZenAttentionMetadata]):  # type: ignore[misc]
    """Plans a step's attention for a group of layers."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: "VllmConfig", device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if kv_cache_spec.head_size_v != kv_cache_spec.head_size:
            raise UnsupportedError(
                f"values of head size {kv_cache_spec.head_size_v} beside keys of {kv_cache_spec.head_size} "
                "are not supported natively. Set VLLM_ZEN_ATTENTION=vllm."
            )
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names).values()
        windows = {layer.impl.window for layer in layers}
        # The plan leaves out what no layer sees. Layers of different windows see different keys.
        self._window = windows.pop() if len(windows) == 1 else 0
        self._heads = {layer.num_heads for layer in layers}.pop()
        self._kv_heads = kv_cache_spec.num_kv_heads

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: "CommonAttentionMetadata",
        fast_build: bool = False,
    ) -> ZenAttentionMetadata:
        common = common_attn_metadata
        tasks = ops.plan_attention(
            common.query_start_loc,
            common.seq_lens,
            self._heads,
            self._kv_heads,
            causal=common.causal,
            window=self._window,
        )
        return ZenAttentionMetadata(
            common.num_actual_tokens, tasks, common.seq_lens, common.block_table_tensor, common.slot_mapping
        )


class ZenAttentionImpl(AttentionImpl[ZenAttentionMetadata]):  # type: ignore[misc]
    """One layer's attention."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.kv_cache_dtype = kv_cache_dtype
        self.window = sliding_window or 0
        self._soft_cap = float(logits_soft_cap or 0.0)
        self._writes_cache = kv_sharing_target_layer_name is None
        self._alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sinks = sinks

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Sinks come with the weights, in the model's dtype; the kernel takes float32."""
        if self.sinks is not None:
            self.sinks = self.sinks.detach().float().contiguous()

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: ZenAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes keys and values [tokens, kv_heads, head_size], then attends for query, into output.

        query and output are [tokens, heads, head_size], of which metadata says how many tokens are real.
        """
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("attention does not quantize its output")
        if attn_metadata is None:  # vLLM measures memory or warms up, without a cache
            return output.zero_()
        tokens = attn_metadata.num_actual_tokens
        if self._writes_cache and key is not None:
            ops.reshape_and_cache(key, value, kv_cache, attn_metadata.slot_mapping[:tokens])
        ops.paged_attention(
            query[:tokens],
            kv_cache,
            attn_metadata.block_table,
            attn_metadata.seq_lens,
            attn_metadata.tasks,
            output,
            self.scale,
            soft_cap=self._soft_cap,
            window=self.window,
            alibi_slopes=self._alibi_slopes,
            sinks=self.sinks,
        )
        return output

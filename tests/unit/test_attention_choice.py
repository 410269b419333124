"""Which layers our attention takes, and the reason for each it leaves to vLLM."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_zen import ops
from vllm_zen.attention import choice

LAYER = {
    "head_size": 128,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "use_mla": False,
    "use_sparse": False,
    "attn_type": "decoder",
    "use_mm_prefix": False,
    "use_non_causal": False,
    "has_sliding_window": False,
}


def choose(
    monkeypatch, selected: str | None = None, attention: str = "native", config: Any = None, **layer: Any
):
    monkeypatch.setenv("VLLM_ZEN_ATTENTION", attention)
    backend = None if selected is None else SimpleNamespace(name=selected)
    return choice.choose(backend, SimpleNamespace(**{**LAYER, **layer}), config)


def config(heads: int = 32, kv_heads: int = 8, transfer: Any = None, context_parallel: int = 1) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            get_num_attention_heads=lambda _: heads, get_num_kv_heads=lambda _: kv_heads
        ),
        kv_transfer_config=transfer,
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=context_parallel, prefill_context_parallel_size=1
        ),
    )


@pytest.mark.parametrize("head_size", choice.HEAD_SIZES)
def test_takes_what_the_kernels_support(monkeypatch, head_size):
    assert choose(monkeypatch, config=config(), head_size=head_size) == (True, "")
    assert choose(monkeypatch, has_sliding_window=True, kv_cache_dtype="bfloat16") == (True, "")
    assert choose(monkeypatch, selected="CUSTOM", use_non_causal=True) == (True, "")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention": "vllm"}, "VLLM_ZEN_ATTENTION=vllm"),
        ({"selected": "CPU_ATTN"}, "--attention-backend CPU_ATTN"),
        ({"use_mla": True}, "multi-head latent attention"),
        ({"use_sparse": True}, "sparse attention"),
        ({"attn_type": "encoder_only"}, "encoder_only attention"),
        ({"attn_type": "encoder_decoder"}, "encoder_decoder attention"),
        ({"dtype": torch.float32}, "dtype float32"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "KV cache of fp8_e4m3"),
        ({"head_size": 72}, "head size 72"),
        ({"head_size": 512}, "head size 512"),
        ({"use_mm_prefix": True}, "bidirectional prefixes"),
        ({"use_non_causal": True, "has_sliding_window": True}, "a sliding window that is not causal"),
        ({"config": config(transfer=object())}, "KV caches are transferred"),
        ({"config": config(context_parallel=2)}, "context parallelism"),
        ({"config": config(heads=128, kv_heads=1)}, "128 query heads to a KV head"),
    ],
)
def test_leaves_the_rest_with_a_reason(monkeypatch, changes, reason):
    native, why = choose(monkeypatch, **changes)
    assert not native and reason in why


def test_auto_takes_only_kernels_made_for_the_cpu(monkeypatch):
    native, why = choose(monkeypatch, attention="auto")
    if ops.isa() == "ref":
        assert not native and "portable kernels are slower" in why and "VLLM_ZEN_ATTENTION=native" in why
    else:
        assert native


def test_the_summary_names_each_reason_once(monkeypatch):
    monkeypatch.setattr(choice, "_decisions", {})
    assert choice.summary() == "none"
    for native, reason in ((True, ""), (False, "head size 72"), (True, ""), (False, "head size 72")):
        choice.record(native, reason)
    assert choice.summary() == "native, vllm (head size 72)"

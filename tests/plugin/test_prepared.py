"""Prepared checkpoints, each format loaded through vLLM's own layers: our kernels run it, and it is right."""

from typing import Any

import pytest
import torch
from bounds import EPS
from checkpoints import FORMATS, Prepared, compressed_tensors_int4, gptq

from vllm_zen import compat, envs, ops
from vllm_zen.errors import ModelError, UnsupportedError
from vllm_zen.linear import dispatch
from vllm_zen.quantization import act_order, config, prepared

PREFIX = "model.layers.3.self_attn"
OUTPUTS, INPUTS = 128, 512


@pytest.fixture(scope="module", autouse=True)
def ours_first():
    if not ops.load().ok:
        pytest.skip(f"no native kernels: {ops.load().reason}")
    config.register()
    compat.run_prepared_checkpoints()


@pytest.fixture(autouse=True)
def kernels_asked_for(monkeypatch):
    if ops.isa() == "ref":
        monkeypatch.setenv(envs.ISA.name, "ref")


def quant_config(described: dict[str, Any], *names: str) -> Any:
    from vllm.model_executor.layers.quantization import get_quantization_config

    made = get_quantization_config(described["quant_method"]).from_config(described)
    made.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    if described["quant_method"] == "gptq":
        made.modules_in_block_to_quantize = [f"{PREFIX}.{name}" for name in names]
    return made


def fill(layer: Any, tensors: dict[str, torch.Tensor], made: Any, *shard: str) -> None:
    """Loads a checkpoint's tensors by vLLM's rules for names."""
    parameters = dict(layer.named_parameters())
    named = made.get_checkpoint_weight_mapper().apply(
        (f"x.{name}", tensor) for name, tensor in tensors.items()
    )
    for name, tensor in named:
        parameter = parameters[name.removeprefix("x.")]
        parameter.weight_loader(parameter, tensor, *shard)


def linear(layer_of: Prepared, bias: torch.Tensor | None = None) -> Any:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.linear import ReplicatedLinear

    made = quant_config(layer_of.config, "o_proj")
    outputs, inputs = layer_of.weight.shape
    with set_current_vllm_config(VllmConfig()):
        layer = ReplicatedLinear(
            inputs,
            outputs,
            bias=bias is not None,
            params_dtype=torch.bfloat16,
            quant_config=made,
            prefix=f"{PREFIX}.o_proj",
        )
        fill(layer, layer_of.tensors, made)
        if bias is not None:
            layer.bias.data.copy_(bias)
        layer.quant_method.process_weights_after_loading(layer)
    return layer


def assert_near(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, layer: Any) -> None:
    """Within half a code of every input and the rounding of offsets and result; on average far closer.

    A code is at most off by half a step, a 254th of the chunk's largest value. An offset is a product of a
    scale with a small number, rounded once.
    """
    chunk = layer.zen_scheme.group or 256
    wide = torch.nn.functional.pad(x.double(), (0, -x.shape[-1] % chunk)).unflatten(-1, (-1, chunk))
    half_step = (wide.abs().amax(-1, keepdim=True) / 254).expand_as(wide).flatten(-2)[..., : x.shape[-1]]
    exact = x.double() @ weight.double().t()
    limit = half_step @ weight.double().abs().t() * (1 + 1e-4) + exact.abs() * EPS[x.dtype]
    if layer.zen_offset is not None:
        offset = float(layer.zen_offset.abs().max()) * EPS[torch.bfloat16] / 2
        limit += offset * (x.double().abs() + half_step).sum(-1, keepdim=True)
    error = (got.double() - exact).abs()
    assert (error <= limit).all(), f"{float((error / limit).max())} of the bound"
    # The largest of 256 normal variables is 3.5 at most here: a step of 3.5 / 127 / sqrt(12) is 0.8 %.
    assert error.square().mean().sqrt() < 0.01 * exact.square().mean().sqrt()


def inputs(rows: int) -> torch.Tensor:
    return torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_runs_on_our_kernels(process_group, name, rows):
    layer_of = FORMATS[name](OUTPUTS, INPUTS)
    layer = linear(layer_of)
    assert layer.zen_scheme.bits == ("int8" if name.startswith("int8") else "int4")
    x = inputs(rows)
    got, _ = layer(x)
    assert_near(got, x, layer_of.weight, layer)
    loaded = sum(parameter.numel() for parameter in layer.parameters())
    assert loaded <= 4, "what was loaded is freed, but for the shape and an input's scale"
    assert f"checkpoint's {layer.zen_scheme}" in dispatch.summary()


def test_a_bias_is_added(process_group):
    bias = torch.randn(OUTPUTS, generator=torch.Generator().manual_seed(2)).bfloat16()
    layer_of = FORMATS["awq g64"](OUTPUTS, INPUTS)
    with_bias, without = (linear(layer_of, b)(inputs(3))[0] for b in (bias, None))
    torch.testing.assert_close(with_bias.float(), without.float() + bias.float(), rtol=2**-7, atol=2**-7)


def fused(parts: list[Prepared]) -> Any:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.linear import QKVParallelLinear

    made = quant_config(parts[0].config, "q_proj", "k_proj", "v_proj")
    with set_current_vllm_config(VllmConfig()):
        layer = QKVParallelLinear(
            INPUTS,
            32,
            len(parts[0].weight) // 32,
            len(parts[1].weight) // 32,
            bias=False,
            params_dtype=torch.bfloat16,
            quant_config=made,
            prefix=f"{PREFIX}.qkv_proj",
        )
        for shard, part in zip("qkv", parts, strict=True):
            fill(layer, part.tensors, made, shard)
        layer.quant_method.process_weights_after_loading(layer)
    return layer


@pytest.mark.parametrize("name", FORMATS)
def test_fused_layers(process_group, name):
    parts = [FORMATS[name](outputs, INPUTS, seed=seed) for seed, outputs in enumerate([128, 64, 64])]
    layer = fused(parts)
    x = inputs(4)
    got, _ = layer(x)
    assert_near(got, x, torch.cat([part.weight for part in parts]), layer)


def test_fused_layers_of_different_orders_are_refused(process_group):
    parts = [gptq(64, INPUTS, 32, ordered=True, seed=seed) for seed in range(3)]
    parts[1].tensors["g_idx"] = parts[1].tensors["g_idx"].roll(1)
    with pytest.raises(
        ModelError, match=r"qkv_proj is fused from layers whose inputs are ordered differently"
    ):
        fused(parts)


def test_an_order_that_is_none_costs_nothing(process_group):
    layer_of = gptq(OUTPUTS, INPUTS, 64, ordered=True)
    plain = gptq(OUTPUTS, INPUTS, 64)
    layer_of.tensors["g_idx"] = plain.tensors["g_idx"]
    layer = linear(layer_of)
    assert not hasattr(layer, prepared.ORDER)
    assert torch.equal(layer(inputs(2))[0], linear(plain)(inputs(2))[0])


def test_an_order_that_a_rank_would_tear_apart_is_refused(process_group):
    method = linear(gptq(OUTPUTS, INPUTS, 32, ordered=True)).quant_method
    with pytest.raises(UnsupportedError, match="Use --tensor-parallel-size 1"):
        method.create_weights(torch.nn.Module(), INPUTS // 2, [OUTPUTS], INPUTS, OUTPUTS, torch.bfloat16)


def test_an_order_that_vllms_kernels_would_ignore_is_refused(process_group, monkeypatch):
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "ZenInt4LinearKernel")
    with pytest.raises(UnsupportedError, match=r"has activation order, and \w+, which runs this layer"):
        linear(compressed_tensors_int4(OUTPUTS, INPUTS, 64, ordered=True))


def test_experts_with_an_order_are_refused():
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    experts = RoutedExperts.__new__(RoutedExperts)
    with pytest.raises(UnsupportedError, match="experts with activation order"):
        act_order._refuse_experts(experts, "model.layers.0.mlp.experts")


def configuration(**changes: Any) -> Any:
    from vllm.model_executor.kernels.linear import MPLinearLayerConfig
    from vllm.scalar_type import scalar_types

    settings = {
        "full_weight_shape": (512, 128),
        "partition_weight_shape": (512, 128),
        "weight_type": scalar_types.uint4b8,
        "act_type": torch.bfloat16,
        "group_size": 64,
        "zero_points": False,
    }
    return MPLinearLayerConfig(**{**settings, **changes})


def test_what_ours_cannot_run_goes_on_with_a_reason(monkeypatch):
    from vllm.scalar_type import scalar_types

    said: list[str] = []
    monkeypatch.setattr(prepared.logger, "info", lambda text, *values: said.append(text % values))
    prepared._say_refusal.cache_clear()
    can = prepared.ZenInt4LinearKernel.can_implement
    assert can(configuration()) == (True, None)
    for changes, reason in (
        ({"group_size": 16}, "groups of 16; ours have 32, 64 or a multiple of 128"),
        ({"weight_type": scalar_types.uint8b128}, "weights of uint8b128; ours are 4 bits wide"),
        ({"act_type": torch.float16}, "activations in torch.float16; ours take bfloat16 and float32"),
    ):
        assert can(configuration(**changes)) == (False, reason)
        assert said[-1] == f"some int4 layers of the checkpoint stay on vLLM's kernels: {reason}"


def test_a_group_that_is_not_ours_is_served_by_vllm(process_group):
    layer_of = compressed_tensors_int4(OUTPUTS, INPUTS, 16)
    layer = linear(layer_of)
    assert not hasattr(layer, "zen_scheme")
    got, _ = layer(inputs(2))
    assert_rms(got, inputs(2), layer_of.weight, 0.02)


def assert_rms(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, limit: float) -> None:
    exact = x.double() @ weight.double().t()
    assert (got.double() - exact).square().mean().sqrt() < limit * exact.square().mean().sqrt()


@pytest.mark.parametrize("name", ["int4 g64", "int4 g128 zero points", "gptq ordered", "awq g64"])
def test_activations_stay_in_bfloat16_where_asked(process_group, monkeypatch, name):
    monkeypatch.setenv(prepared.W4A8, "0")
    layer_of = FORMATS[name](OUTPUTS, INPUTS)
    layer = linear(layer_of)
    assert layer.zen_scheme.act_bits == 16
    x = inputs(3)
    assert_rms(layer(x)[0], x, layer_of.weight, 0.004)  # of bf16: a 256th, rounded once on each side


def test_portable_kernels_are_not_forced_on_anybody(process_group, monkeypatch):
    from vllm_zen.quantization import weights

    monkeypatch.setattr(weights.ops, "isa", lambda: "ref")
    monkeypatch.setenv(envs.ISA.name, "auto")
    for kernel, asked in (
        (prepared.ZenInt4LinearKernel.can_implement, configuration()),
        (prepared.ZenInt8LinearKernel.is_supported, None),
    ):
        ok, reason = kernel(asked)
        assert not ok and "need AVX-512 with VNNI" in reason

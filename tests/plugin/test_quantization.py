"""zen_int8 and zen_int4 in vLLM: names, refusals, and real layers loaded from the meta device."""

import pickle
from typing import Any

import pytest
import torch

from vllm_zen import ops, ops_linear, reference
from vllm_zen.errors import ModelError, UnsupportedError
from vllm_zen.quantization import weights
from vllm_zen.quantization.settings import Scheme, Settings

DEPTH, COLUMNS = 160, 96


@pytest.fixture(autouse=True)
def native():
    status = ops.load()
    assert status.ok, status.reason


@pytest.fixture
def configs():
    from vllm_zen.quantization import config

    config.register()
    config.register()
    return {c.name: c for c in (config.ZenInt8Config, config.ZenInt4Config)}


def test_names_are_registered_and_configurations_travel(configs):
    from vllm.model_executor.layers.quantization import get_quantization_config

    for name, config in configs.items():
        assert get_quantization_config(name) is config and config.get_name() == name
        travelled = pickle.loads(pickle.dumps(config(Settings(group_size=64))))  # noqa: S301
        assert travelled.settings == Settings(group_size=64)


def test_another_plugins_name_is_not_taken(configs, monkeypatch):
    from vllm.model_executor.layers import quantization

    from vllm_zen.quantization import config

    monkeypatch.setitem(quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG, "zen_int8", configs["zen_int4"])
    with pytest.raises(UnsupportedError, match=r"zen_int8 is already .*ZenInt4Config\. Uninstall"):
        config.register()


def test_a_quantized_checkpoint_is_refused(configs):
    for name, config in configs.items():
        assert config.override_quantization_method({"quant_method": "awq"}, None) is None
        with pytest.raises(UnsupportedError, match=r"already quantized \(awq\). Leave --quantization out"):
            config.override_quantization_method({"quant_method": "awq"}, name)


def test_portable_kernels_run_only_when_asked_for(monkeypatch):
    before = ops.isa()
    ops.force_isa("ref")
    monkeypatch.setenv("VLLM_ZEN_ISA", "ref")
    weights.check_table()
    monkeypatch.setenv("VLLM_ZEN_ISA", "auto")
    with pytest.raises(UnsupportedError, match="VLLM_ZEN_ISA=ref to run them on portable kernels"):
        weights.check_table()
    ops.force_isa(before)


def test_wrong_settings_are_refused_before_weights_are_read(engine_config):
    """By the platform, which on another CPU is asked here and by nobody else."""
    from vllm_zen.platform import ZenCpuPlatform

    given = {"vllm_zen": {"quantization": {"group_size": 100}}}
    with pytest.raises(Exception, match="group_size=100 must be one of 32, 64, 128"):
        ZenCpuPlatform.check_and_update_config(engine_config("tied", additional_config=given))


def linear(config: Any, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """A real layer, loaded as vLLM loads a checkpoint."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.linear import ReplicatedLinear

    with set_current_vllm_config(VllmConfig()):
        layer = ReplicatedLinear(
            weight.shape[1],
            weight.shape[0],
            bias=bias is not None,
            params_dtype=weight.dtype,
            quant_config=config,
            prefix="model.layers.3.mlp.up_proj",
        )
        assert layer.weight.is_meta
        layer.weight.weight_loader(layer.weight, weight)
        if bias is not None:
            layer.bias.weight_loader(layer.bias, bias)
        layer.quant_method.process_weights_after_loading(layer)  # vLLM does, again, after loading
    return layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("zen_int8", Settings()),
        ("zen_int8", Settings(rotate=False)),
        ("zen_int4", Settings(group_size=32)),
        ("zen_int4", Settings(zero_points=True)),
    ],
)
def test_a_layer_is_quantized_as_it_loads(configs, process_group, method, settings, dtype):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(COLUMNS, DEPTH, generator=generator).to(dtype)
    bias = torch.randn(COLUMNS, generator=generator).to(dtype)
    layer = linear(configs[method](settings), weight, bias)
    assert layer.weight.numel() == 0
    scheme = settings.scheme("int8" if method == "zen_int8" else "int4")
    operands = weights.quantize(weight, scheme, "")
    assert torch.equal(layer.zen_weight, operands["weight"])
    x = torch.randn(3, DEPTH, generator=generator).to(dtype)
    expected = weights.run(scheme, operands, x, bias, COLUMNS)
    got, _ = layer(x)
    assert torch.equal(got, expected)
    exact = x.double() @ weight.double().t() + bias.double()
    # A code of a normal variable whose largest value of 160 is 3 is off by 3 / 127 / sqrt(12), or 20 times
    # that for int4, and activations and weights are both coded.
    limit = 0.012 if method == "zen_int8" else 0.14
    assert (got.double() - exact).square().mean().sqrt() < limit * exact.square().mean().sqrt()


def test_a_weight_with_faults_is_refused_by_its_name(configs, process_group):
    weight = torch.randn(COLUMNS, DEPTH).bfloat16()
    weight[5, 7] = float("nan")
    with pytest.raises(ModelError, match=r"model\.layers\.3\.mlp\.up_proj: the weight holds NaN"):
        linear(configs["zen_int4"](Settings()), weight)


def test_a_group_that_does_not_divide_a_rank_is_refused(configs):
    from vllm_zen.quantization.methods import ZenLinearMethod

    method = ZenLinearMethod(Scheme("int4", 128), "model.layers.0.mlp.down_proj", weights.Progress())
    with pytest.raises(UnsupportedError, match="another tensor-parallel size or group_size 32, or keep"):
        method.create_weights(
            torch.nn.Module(), 352, [64], 704, 64, torch.bfloat16, weight_loader=lambda *_: None
        )


def test_slabs_make_no_difference(monkeypatch):
    weight = torch.randn(300, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    for scheme in (
        Scheme("int8"),
        Scheme("int8", rotated=True),
        Scheme("int4", 64),
        Scheme("int4", 32, True),
    ):
        whole = weights.quantize(weight, scheme, "")
        with monkeypatch.context() as patch:
            patch.setattr(weights, "SLAB", 128 * 70)
            in_slabs = weights.quantize(weight, scheme, "")
        assert whole.keys() == in_slabs.keys()
        assert all(torch.equal(whole[name], in_slabs[name]) for name in whole)


@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("embedding", ["bf16", "head"])
def test_a_tied_head_reads_the_table(configs, process_group, embedding, rotate):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    config = configs["zen_int4"](Settings(embedding=embedding, rotate=rotate))
    rows = torch.randn(100, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    with set_current_vllm_config(VllmConfig()):
        made = {"params_dtype": torch.bfloat16, "quant_config": config}
        table = VocabParallelEmbedding(100, 64, prefix="model.embed_tokens", **made)
        head = ParallelLMHead(100, 64, prefix="lm_head", **made).tie_weights(table)
        table.weight.weight_loader(table.weight, rows)
        for layer in (table, head, table, head):
            layer.quant_method.process_weights_after_loading(layer)
    codes, scale = ops.quantize_rows_s8(rows, rotate=rotate)
    expected = ops_linear.Int8Weight.pack(codes, scale, rotated=rotate).linear(rows[:3])
    assert torch.equal(head.quant_method.apply(head, rows[:3])[:, :100], expected)
    assert table.weight.numel() == (0 if embedding == "head" else 128 * 64)
    ids = torch.tensor([7, 99, 0])
    quantized = codes.float() * scale[:, None]
    quantized = (reference.rotate(quantized) if rotate else quantized).bfloat16()
    assert torch.equal(table(ids), (quantized if embedding == "head" else rows)[ids])
    assert "head int8" in config.describe()

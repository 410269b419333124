"""Which backend runs a linear layer, and that each gives F.linear's answer, on the real zentorch."""

import pytest
import torch
from bounds import assert_linear_within_bound
from torch.nn import Module, Parameter

from vllm_zen import zentorch
from vllm_zen.errors import UnsupportedError
from vllm_zen.linear import dispatch as linear

# (N, K): tile multiples, odd sizes, a projection of K 33, a vocabulary of 1003, a score head of one row,
# a sum long enough to be split into blocks.
SHAPES = [
    (256, 256),
    (704, 256),
    (104, 104),
    (250, 104),
    (251, 250),
    (64, 33),
    (1003, 104),
    (1, 256),
    (1, 33),
    (96, 8192),
]
ROWS = [0, 1, 2, 3, 7, 8, 17, 64]


# ZenDNN remembers addresses: an unpacked weight where a packed one was freed is read as if it were packed. A
# process packs all of its weights or none, but the tests below do both, so none of theirs is freed.
_alive: list[torch.Tensor] = []


def make_layer(n: int, k: int, dtype: torch.dtype, bias: bool = False) -> Module:
    generator = torch.Generator().manual_seed(n * 31 + k)
    layer = Module()
    layer.weight = Parameter(torch.randn(n, k, generator=generator).to(dtype), requires_grad=False)
    layer.bias = Parameter(torch.randn(n, generator=generator).to(dtype), False) if bias else None
    return layer


def dispatch(layer: Module, remove_weight: bool) -> None:
    linear.dispatch(layer, remove_weight)
    _alive.extend(layer.buffers())


def need_zentorch(dtype: torch.dtype) -> None:
    supported, reason = zentorch.supports_linear(dtype)
    if not supported:
        pytest.skip(reason)


@pytest.fixture(params=["zentorch", "zentorch unpacked", "vllm", "torch"])
def backend(request, monkeypatch):
    name, _, unpacked = request.param.partition(" ")
    monkeypatch.setenv("VLLM_ZEN_LINEAR", name)
    monkeypatch.setenv("VLLM_ZENTORCH_WEIGHT_PREPACK", "0" if unpacked else "1")
    return name


@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_every_backend_gives_the_linear_of_torch(backend, dtype, n, k, bias):
    if backend == "zentorch":
        need_zentorch(dtype)
    layer = make_layer(n, k, dtype, bias)
    weight = layer.weight.detach().clone()
    dispatch(layer, remove_weight=True)
    generator = torch.Generator().manual_seed(5)
    # With AMX, vLLM picks an operator for small weights that divides by the rows, and dies of none.
    dies_of_none = backend == "vllm" and torch.cpu._is_amx_tile_supported()
    for rows in ROWS[1:] if dies_of_none else ROWS:
        x = torch.randn(rows, k, generator=generator).to(dtype)
        assert_linear_within_bound(layer.cpu_linear(x, layer.weight, layer.bias), x, weight, layer.bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    "form",
    [
        pytest.param(lambda x: x.reshape(2, 3, -1), id="3-D"),
        pytest.param(lambda x: x.t().contiguous().t(), id="column-major"),
        pytest.param(lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]], id="rows further apart"),
        pytest.param(lambda x: x[::2], id="every other row"),
    ],
)
def test_activations_of_every_form(backend, dtype, form):
    if backend == "zentorch":
        need_zentorch(dtype)
    layer = make_layer(40, 64, dtype, bias=True)
    weight = layer.weight.detach().clone()
    dispatch(layer, remove_weight=True)
    x = form(torch.randn(6, 64, generator=torch.Generator().manual_seed(6)).to(dtype))
    if backend == "vllm" and x.dim() == 2 and x.stride(-1) != 1:
        pytest.skip("vLLM's oneDNN operator takes contiguous rows only, and vLLM hands it nothing else")
    assert_linear_within_bound(layer.cpu_linear(x, layer.weight, layer.bias), x, weight, layer.bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_dispatch_runs_zentorch_linear_unary(dtype):
    """The seed's test: auto takes the real zentorch_linear_unary, and its output is F.linear's."""
    need_zentorch(dtype)
    layer = make_layer(256, 128, dtype)
    weight = layer.weight.detach().clone()
    dispatch(layer, remove_weight=False)
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(7)).to(dtype)
    with torch.profiler.profile() as profile:
        out = layer.cpu_linear(x, layer.weight, None)
    assert any("zentorch_linear_unary" in event.name for event in profile.events())
    assert_linear_within_bound(out, x, weight, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_remove_weight_empties_the_weight(dtype):
    """The seed's test."""
    need_zentorch(dtype)
    layer = make_layer(64, 64, dtype)
    dispatch(layer, remove_weight=True)
    assert layer.weight.numel() == 0
    assert layer.weight.dtype == dtype


def test_a_kept_weight_stays_as_it_was():
    layer = make_layer(64, 64, torch.float32)
    before = layer.weight.detach().clone()
    dispatch(layer, remove_weight=False)
    assert torch.equal(layer.weight, before)


def test_the_packed_weight_is_no_part_of_the_checkpoint():
    need_zentorch(torch.float32)
    layer = make_layer(64, 64, torch.float32)
    dispatch(layer, remove_weight=False)
    assert set(layer.state_dict()) == {"weight"}


def test_another_matmul_algorithm_is_not_given_packed_weights(monkeypatch):
    need_zentorch(torch.float32)
    monkeypatch.setenv("ZENDNNL_MATMUL_ALGO", "2")
    layer = make_layer(64, 64, torch.float32)
    dispatch(layer, remove_weight=False)
    assert layer.zen_weight.data_ptr() == layer.weight.data_ptr()


def test_an_unpacked_weight_at_a_freed_address_is_not_mistaken_for_the_first(monkeypatch):
    """ZenDNN finds its copy of a weight by address: of 50 layers made and dropped, about 11 were wrong."""
    need_zentorch(torch.float32)
    monkeypatch.setenv("VLLM_ZENTORCH_WEIGHT_PREPACK", "0")
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(10))
    for seed in range(50):
        layer = make_layer(40, 64, torch.float32)
        layer.weight.data = torch.randn(40, 64, generator=torch.Generator().manual_seed(seed))
        weight = layer.weight.detach().clone()
        linear.dispatch(layer, remove_weight=True)
        assert_linear_within_bound(layer.cpu_linear(x, layer.weight, None), x, weight, None)
        del layer


def test_forcing_what_cannot_run_is_an_error(monkeypatch):
    monkeypatch.setenv("VLLM_ZEN_LINEAR", "zentorch")
    layer = make_layer(64, 64, torch.float16)
    with pytest.raises(UnsupportedError) as refused:
        dispatch(layer, remove_weight=True)
    message = str(refused.value)
    assert (
        "VLLM_ZEN_LINEAR=zentorch" in message and "(64, 64)" in message and "VLLM_ZEN_LINEAR=auto" in message
    )


def test_auto_falls_back_to_vllm_where_zentorch_cannot_run(monkeypatch):
    monkeypatch.setenv("VLLM_ZEN_LINEAR", "auto")
    assert linear.choose(torch.empty(8, 8, dtype=torch.float16)).name == "vllm"


@pytest.mark.parametrize(
    "weight",
    [torch.empty(64, 64, device="meta"), torch.randn(4, 1, 3), torch.randn(2, 64, 64)],
    ids=["meta", "convolution", "experts"],
)
def test_other_weights_are_left_to_vllm(weight):
    layer = Module()
    layer.weight = Parameter(weight, requires_grad=False)
    dispatch(layer, remove_weight=True)
    assert layer.weight.shape == weight.shape and not hasattr(layer, "zen_weight")


def make_head(config, cls_name: str, dtype: torch.dtype = torch.float32):
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers import vocab_parallel_embedding

    with set_current_vllm_config(config):
        layer = getattr(vocab_parallel_embedding, cls_name)(2048, 256, params_dtype=dtype)
        layer.weight.data = torch.randn(2048, 256, generator=torch.Generator().manual_seed(8)).to(dtype)
        weight = layer.weight.detach().clone()
        dispatch(layer, remove_weight=False)
    return layer, weight


def assert_head_is_right(layer, weight):
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(9)).to(weight.dtype)
    assert_linear_within_bound(layer.quant_method.apply(layer, x), x, weight, None)
    _alive.extend(layer.buffers())  # an embedding table is packed only now


def test_an_untied_head_gives_up_its_original(engine_config):
    need_zentorch(torch.float32)
    layer, weight = make_head(engine_config("untied", dtype="float32"), "ParallelLMHead")
    assert layer.weight.numel() == 0
    assert_head_is_right(layer, weight)


@pytest.mark.parametrize("arguments", [{"enable_lora": True}, {"hf_overrides": {"head_dtype": "float32"}}])
def test_an_untied_head_keeps_a_weight_that_others_read(engine_config, arguments):
    layer, weight = make_head(engine_config("untied", dtype="bfloat16", **arguments), "ParallelLMHead")
    assert torch.equal(layer.weight.float(), weight.float())


def test_a_tied_head_keeps_the_table_and_packs_a_copy(engine_config):
    need_zentorch(torch.float32)
    layer, weight = make_head(engine_config("tied", dtype="float32"), "ParallelLMHead")
    assert torch.equal(layer.weight, weight) and layer.zen_weight.data_ptr() != layer.weight.data_ptr()
    assert_head_is_right(layer, weight)


def test_a_tied_head_holds_no_copy_when_told_so(engine_config):
    options = {"vllm_zen": {"pack_tied_head": False}}
    config = engine_config("tied", dtype="float32", additional_config=options)
    layer, weight = make_head(config, "ParallelLMHead")
    assert not hasattr(layer, "zen_weight") and layer.cpu_linear is torch.nn.functional.linear
    assert_head_is_right(layer, weight)


def test_an_embedding_table_is_packed_only_once_it_is_used_as_a_head(engine_config):
    need_zentorch(torch.float32)
    layer, weight = make_head(engine_config("tied", dtype="float32"), "VocabParallelEmbedding")
    assert not hasattr(layer, "zen_weight")
    assert_head_is_right(layer, weight)
    assert hasattr(layer, "zen_weight") and torch.equal(layer.weight, weight)
    assert_head_is_right(layer, weight)

"""int4 layers with bf16 activations: within a derived bound of the exact result, on every table."""

import pytest
import torch
from bounds import linear_w4a16_bound
from layers import Layer, random_layer, random_rows
from threads import on_threads

from vllm_zen import ops_linear, reference

SCHEMES = ["w4 g32", "w4 g64", "w4 g128", "w4 g32 offset", "w4 g128 offset"]


def run(layer: Layer, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    packed = ops_linear.Int4Weight.pack(layer.codes, layer.scale, layer.offset, layer.group)
    return packed.linear(x, bias, act_bits=16)


def check(layer: Layer, x: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    got, operands = run(layer, x, bias), (layer.codes, layer.scale, layer.offset, layer.group, bias)
    exact = reference.linear_w4a16(x.double(), *operands)
    assert got.shape == exact.shape and got.dtype == x.dtype
    excess = (got.double() - exact).abs() - linear_w4a16_bound(x, *operands)
    assert not len(excess) or excess.max() <= 0, f"x {tuple(x.shape)}: over the bound by {excess.max():.3g}"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("depth", [1, 3, 32, 100, 128, 129, 390, 800])
def test_every_depth(isa, threads, scheme, depth):
    for columns in (17, 130):
        bias = torch.randn(columns, generator=torch.Generator().manual_seed(1))
        for rows in (1, 7):
            check(random_layer(scheme, columns, depth), random_rows(rows, depth), bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [1, 15, 16, 17, 64, 65, 1003])
@pytest.mark.parametrize("scheme", ["w4 g32", "w4 g128 offset"])
def test_every_width_and_row_count(isa, scheme, columns, dtype):
    layer = random_layer(scheme, columns, 160)
    for rows in (0, 1, 2, 5, 6, 7, 13, 19, 31):
        check(layer, random_rows(rows, 160, dtype))


def test_more_rows_than_share_a_pass(isa):
    check(random_layer("w4 g128", 70, 400), random_rows(521, 400))


@pytest.mark.parametrize("code", range(16))
def test_every_code_is_its_value(isa, code):
    """Exactly: powers of two, so that no sum rounds, each input alone."""
    layer = random_layer("w4 g32", 3, 32)
    layer.codes.fill_(code)
    layer.codes[1] = torch.arange(32) % 16
    layer.scale.fill_(0.25)
    x = torch.eye(32).bfloat16()
    assert torch.equal(run(layer, x), (0.25 * (layer.codes.float() - 8)).t().bfloat16())


def test_one_outlier_and_scales_of_zero(isa):
    layer, x = random_layer("w4 g32 offset", 33, 256), random_rows(4, 256)
    layer.scale[5], layer.offset[5] = 0, 0
    x[torch.arange(4), torch.arange(4) * 60] = 1e30
    bias = torch.randn(33, generator=torch.Generator().manual_seed(3))
    check(layer, x, bias)
    assert (run(layer, x, bias)[:, 5] == bias[5].bfloat16()).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fault", [float("nan"), float("inf"), -float("inf")])
def test_a_fault_stays_in_its_row(isa, fault, dtype):
    layer, x = random_layer("w4 g128 offset", 40, 256), random_rows(8, 256, dtype)
    clean = run(layer, x)
    x[3, 200] = fault
    got, others = run(layer, x), torch.arange(8) != 3
    assert not got[3].isfinite().any() and torch.equal(got[others], clean[others])


def test_three_dimensions_and_strides(isa):
    layer, storage = random_layer("w4 g64", 40, 96), torch.full((6, 192), float("nan")).bfloat16()
    x = storage[:, :96]
    x.copy_(random_rows(6, 96))
    check(layer, x)
    assert torch.equal(run(layer, x.reshape(2, 3, 96)), run(layer, x).view(2, 3, -1))
    assert torch.equal(run(layer, x[0]), run(layer, x)[0])


def test_thread_counts_agree(isa):
    layer = random_layer("w4 g128 offset", 1100, 1024)
    results = on_threads(lambda: [run(layer, random_rows(rows, 1024)) for rows in (2, 40)])
    assert all(map(torch.equal, *results))

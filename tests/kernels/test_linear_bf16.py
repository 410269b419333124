"""int4 layers with bf16 activations: within a derived bound of the exact result, on every table."""

from dataclasses import dataclass

import pytest
import torch
from bounds import linear_w4a16_bound
from threads import on_threads

from vllm_zen import ops_linear, reference

SCHEMES = ["g32", "g64", "g128", "g32 offset", "g128 offset"]


@dataclass
class Layer:
    """A packed weight and what it was packed from."""

    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None
    group: int

    @classmethod
    def random(cls, scheme: str, columns: int, depth: int) -> "Layer":
        generator = torch.Generator().manual_seed(columns * 1009 + depth)
        group = int(scheme.split()[0][1:])
        codes = torch.randint(0, 16, (columns, depth), generator=generator).to(torch.uint8)
        shape = (columns, -(-depth // group))
        scale = torch.rand(shape, generator=generator) * 0.01
        if "offset" not in scheme:
            return cls(codes, scale.bfloat16(), None, group)
        return cls(codes, scale, torch.randn(shape, generator=generator) * 0.01, group)

    def run(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        packed = ops_linear.Int4Weight.pack(self.codes, self.scale, self.offset, self.group)
        return packed.linear(x, bias, act_bits=16)

    def check(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        got, operands = self.run(x, bias), (self.codes, self.scale, self.offset, self.group, bias)
        exact = reference.linear_w4a16(x.double(), *operands)
        assert got.shape == exact.shape and got.dtype == x.dtype
        excess = (got.double() - exact).abs() - linear_w4a16_bound(x, *operands)
        assert not len(excess) or excess.max() <= 0, (
            f"x {tuple(x.shape)}: over the bound by {excess.max():.3g}"
        )


def random_rows(rows: int, depth: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, depth, generator=torch.Generator().manual_seed(rows * 1009 + depth)).to(dtype)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("depth", [1, 3, 32, 100, 128, 129, 390, 800])
def test_every_depth(isa, threads, scheme, depth):
    for columns in (17, 130):
        bias = torch.randn(columns, generator=torch.Generator().manual_seed(1))
        for rows in (1, 7):
            Layer.random(scheme, columns, depth).check(random_rows(rows, depth), bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [1, 15, 16, 17, 64, 65, 1003])
@pytest.mark.parametrize("scheme", ["g32", "g128 offset"])
def test_every_width_and_row_count(isa, scheme, columns, dtype):
    layer = Layer.random(scheme, columns, 160)
    for rows in (0, 1, 2, 5, 6, 7, 13, 19, 31):
        layer.check(random_rows(rows, 160, dtype))


def test_more_rows_than_share_a_pass(isa):
    Layer.random("g128", 70, 400).check(random_rows(521, 400))


@pytest.mark.parametrize("code", range(16))
def test_every_code_is_its_value(isa, code):
    """Exactly: powers of two, so that no sum rounds, each input alone."""
    layer = Layer(torch.full((3, 32), code, dtype=torch.uint8), torch.full((3, 1), 0.25), None, 32)
    layer.codes[1] = torch.arange(32) % 16
    x = torch.eye(32).bfloat16()
    assert torch.equal(layer.run(x), (0.25 * (layer.codes.float() - 8)).t().bfloat16())


def test_one_outlier_and_scales_of_zero(isa):
    layer, x = Layer.random("g32 offset", 33, 256), random_rows(4, 256)
    layer.scale[5], layer.offset[5] = 0, 0
    x[torch.arange(4), torch.arange(4) * 60] = 1e30
    bias = torch.randn(33, generator=torch.Generator().manual_seed(3))
    layer.check(x, bias)
    assert (layer.run(x, bias)[:, 5] == bias[5].bfloat16()).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fault", [float("nan"), float("inf"), -float("inf")])
def test_a_fault_stays_in_its_row(isa, fault, dtype):
    layer, x = Layer.random("g128 offset", 40, 256), random_rows(8, 256, dtype)
    clean = layer.run(x)
    x[3, 200] = fault
    got, others = layer.run(x), torch.arange(8) != 3
    assert not got[3].isfinite().any() and torch.equal(got[others], clean[others])


def test_three_dimensions_and_strides(isa):
    layer, storage = Layer.random("g64", 40, 96), torch.full((6, 192), float("nan")).bfloat16()
    x = storage[:, :96]
    x.copy_(random_rows(6, 96))
    layer.check(x)
    assert torch.equal(layer.run(x.reshape(2, 3, 96)), layer.run(x).view(2, 3, -1))
    assert torch.equal(layer.run(x[0]), layer.run(x)[0])


def test_thread_counts_agree(isa):
    layer = Layer.random("g128 offset", 1100, 1024)
    results = on_threads(lambda: [layer.run(random_rows(rows, 1024)) for rows in (2, 40)])
    assert all(map(torch.equal, *results))

"""Quantized linear layers equal their references exactly, on every table and for every thread count.

Integer sums are exact, and what follows is rounded step by step as in the reference, so equality is asked of
the float results too.
"""

import pytest
import torch
from layers import Layer, pack, random_layer, random_rows
from threads import on_threads

from vllm_zen import ops, ops_linear, reference

# Around a tile of 6 rows, two and three tiles, and the 252 rows that share a pass.
ROWS = [0, 1, 2, 5, 6, 7, 13, 19, 31]
COLUMNS = [1, 15, 16, 17, 64, 65, 1003]
DEPTHS = [1, 3, 32, 100, 128, 129, 390, 800]
SCHEMES = ["w8", "w8 rotated", "w4 g32", "w4 g64", "w4 g128", "w4 g32 offset", "w4 g128 offset"]


def assert_equal(layer: Layer, x: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    got, expected = layer.packed.linear(x, bias), layer.expected(x, bias)
    assert got.shape == expected.shape and got.dtype == x.dtype
    different = ((got != expected) & ~(got.isnan() & expected.isnan())).nonzero()
    assert not len(different), (
        f"x {tuple(x.shape)} weight {tuple(layer.codes.shape)}: {len(different)} values differ, the first at "
        f"{different[0].tolist()}: {got[tuple(different[0])]}, expected {expected[tuple(different[0])]}"
    )


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_unpacking_gives_back_what_was_packed(scheme, depth):
    for columns in COLUMNS:
        layer = random_layer(scheme, columns, depth)
        originals = (layer.codes, layer.scale, layer.offset)
        for packed, original in zip(layer.packed.unpack(), originals, strict=False):
            assert original is None or torch.equal(packed, original)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_every_depth(isa, threads, scheme, depth):
    for columns in (17, 130):
        layer = random_layer(scheme, columns, depth)
        bias = torch.randn(columns, generator=torch.Generator().manual_seed(1))
        for rows in (1, 7):
            assert_equal(layer, random_rows(rows, depth), bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("scheme", ["w8", "w8 rotated", "w4 g32", "w4 g128 offset"])
def test_every_width_and_row_count(isa, scheme, columns, dtype):
    layer = random_layer(scheme, columns, 160)
    for rows in ROWS:
        assert_equal(layer, random_rows(rows, 160, dtype))


def test_a_bias_in_bf16(isa):
    layer, x = random_layer("w8", 70, 64), random_rows(3, 64)
    bias = torch.randn(70, generator=torch.Generator().manual_seed(7)).bfloat16()
    assert torch.equal(layer.packed.linear(x, bias), layer.packed.linear(x, bias.float()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("depth", [35, 300])
def test_rows_of_a_rotated_weight_are_turned_back(isa, depth, dtype):
    weight = torch.randn(70, depth, generator=torch.Generator().manual_seed(5))
    codes, scale = ops.quantize_rows_s8(weight, rotate=True)
    packed = ops_linear.Int8Weight.pack(codes, scale, rotated=True)
    rows = packed.look_up(torch.arange(70), dtype)
    assert torch.equal(rows, reference.rotate(codes.float() * scale[:, None]).to(dtype))
    # Codes are off by half at most, turning keeps norms, then comes the rounding to the output's dtype.
    off = (rows.float() - weight).norm(dim=1)
    rounding = (torch.finfo(dtype).eps + 1e-6) * weight.norm(dim=1)
    assert (off <= 0.5 * scale * depth**0.5 + rounding).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_looked_up(isa, dtype):
    layer = random_layer("w8", 200, 35)
    assert isinstance(layer.packed, ops_linear.Int8Weight)
    ids = torch.tensor([[0, 199, 64], [63, 65, 0]])
    expected = (layer.codes.float() * layer.scale[:, None]).to(dtype)[ids]
    assert torch.equal(layer.packed.look_up(ids, dtype), expected)
    assert layer.packed.look_up(ids[:0], dtype).shape == (0, 3, 35)
    with pytest.raises(RuntimeError, match="ids must be below 256, got 256"):
        layer.packed.look_up(torch.tensor([256]), dtype)


@pytest.mark.parametrize("scheme", ["w8", "w4 g128"])
def test_more_rows_than_share_a_pass(isa, scheme):
    assert_equal(random_layer(scheme, 70, 400), random_rows(521, 400))


@pytest.mark.parametrize("activation", [-1.0, 1.0, 0.0])
@pytest.mark.parametrize("code", [-128, 127, 0, 15])
def test_extreme_codes(isa, code, activation):
    """All products at the end of their range: the unsigned offset of one side must not saturate."""
    x = torch.full((3, 512), activation).bfloat16()
    codes = torch.full((20, 512), code, dtype=torch.int16)
    for scheme in SCHEMES:
        if scheme.startswith("w8") or 0 <= code < 16:
            dtype = torch.int8 if scheme.startswith("w8") else torch.uint8
            assert_equal(pack(scheme, codes.to(dtype), torch.Generator().manual_seed(2)), x)


@pytest.mark.parametrize("scheme", ["w8", "w4 g32"])
def test_one_outlier_a_row_and_scales_of_zero(isa, scheme):
    layer = random_layer(scheme, 33, 256)
    layer.scale[5] = 0
    if layer.group:
        layer.packed = ops_linear.Int4Weight.pack(layer.codes, layer.scale, None, layer.group)
    else:
        layer.packed = ops_linear.Int8Weight.pack(layer.codes, layer.scale)
    x = random_rows(4, 256)
    x[torch.arange(4), torch.arange(4) * 60] = 1e30
    bias = torch.randn(33, generator=torch.Generator().manual_seed(3))
    assert_equal(layer, x, bias)
    assert (layer.packed.linear(x, bias)[:, 5] == bias[5].bfloat16()).all()
    assert torch.equal(layer.packed.linear(torch.zeros_like(x), bias), bias.bfloat16().expand(4, -1))


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("scheme", ["w8", "w8 rotated", "w4 g128"])
def test_a_fault_stays_in_its_row(isa, scheme, fault):
    layer, x = random_layer(scheme, 40, 256), random_rows(8, 256)
    clean = layer.packed.linear(x)
    x[3, 200] = fault
    got = layer.packed.linear(x)
    others = torch.arange(8) != 3
    assert got[3].isnan().all() and torch.equal(got[others], clean[others])


@pytest.mark.parametrize("scheme", ["w8", "w4 g64"])
def test_three_dimensions_and_strides(isa, scheme):
    layer, depth = random_layer(scheme, 40, 96), 96
    storage = torch.full((6, 2 * depth), float("nan")).bfloat16()
    x = storage[:, :depth]
    x.copy_(random_rows(6, depth))
    expected = layer.expected(x, None)
    assert torch.equal(layer.packed.linear(x), expected)
    assert torch.equal(layer.packed.linear(x.reshape(2, 3, depth)), expected.view(2, 3, -1))
    assert torch.equal(layer.packed.linear(x.contiguous().t().contiguous().t()), expected)
    assert torch.equal(layer.packed.linear(x[0]), expected[0])
    assert layer.packed.linear(x.reshape(2, 3, depth)[:, :0]).shape == (2, 0, 40)


@pytest.mark.parametrize("scheme", ["w8", "w4 g128"])
def test_thread_counts_agree(isa, scheme):
    """Large enough that two threads really share it, with few rows and with many."""
    layer = random_layer(scheme, 1100, 1024)
    results = on_threads(lambda: [layer.packed.linear(random_rows(rows, 1024)) for rows in (2, 40)])
    assert all(map(torch.equal, *results))


def test_tables_agree():
    """Both tables round alike, so an engine gives the same tokens on either."""
    assert ops.load().ok
    before, results = ops.isa(), []
    for name in ("ref", before):
        ops.force_isa(name)
        results.append([random_layer(s, 100, 300).packed.linear(random_rows(9, 300)) for s in SCHEMES])
    ops.force_isa(before)
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 128, dtype=torch.float16)}, "x must be bfloat16 or float32, got Half"),
        ({"x": torch.zeros(2, 64)}, "x must have the weight's K, 97 to 128, got 64"),
        ({"columns": 65}, "columns must fill the weight's 1 blocks of 64, got 65"),
        ({"bias": torch.zeros(39)}, "bias must have 40 values, got 39"),
        ({"bias": torch.zeros(40).half()}, "bias must be Float, got Half"),
        ({"weight": torch.zeros(1, 16, 64, 4)}, "weight must be Byte, got Float"),
        ({"scale": torch.zeros(1, 3, 64)}, "must make groups of 32, 64 or 128, got 3 groups of 128"),
        ({"offset": torch.zeros(1, 2, 64)}, "offset must be [1, 4, 64], got [1, 2, 64]"),
        ({"act_bits": 4}, "act_bits must be 8 or 16, got 4"),
    ],
)
def test_refuses(change, message):
    assert ops.load().ok
    packed = random_layer("w4 g32 offset", 40, 128).packed
    arguments = {"x": torch.zeros(2, 128), "weight": packed.weight, "scale": packed.scale}
    arguments |= {"offset": packed.offset, "bias": None, "columns": 40}
    with pytest.raises(RuntimeError) as refused:
        ops_linear.linear_w4(**(arguments | change))
    assert message in str(refused.value)


def test_pack_refuses():
    codes = torch.zeros(4, 64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="group=48 must be one of"):
        ops_linear.Int4Weight.pack(codes, torch.ones(4, 2), None, 48)
    with pytest.raises(ValueError, match=r"scale must be \[4, 2\], got \(4, 1\)"):
        ops_linear.Int4Weight.pack(codes, torch.ones(4, 1), None, 32)
    with pytest.raises(ValueError, match="pack takes int8"):
        ops_linear.Int8Weight.pack(codes, torch.ones(4))


@pytest.mark.parametrize("scheme", ["w8", "w8 rotated", "w4 g32 offset"])
def test_opcheck_and_compile(isa, scheme):
    layer, x = random_layer(scheme, 40, 96), random_rows(3, 96)
    packed = layer.packed
    if isinstance(packed, ops_linear.Int8Weight):
        arguments = (x, packed.weight, packed.scale, None, 40, packed.rotated)
        torch.library.opcheck(torch.ops.vllm_zen.linear_w8a8.default, arguments)
    else:
        arguments = (x, packed.weight, packed.scale, packed.offset, None, 40)
        torch.library.opcheck(torch.ops.vllm_zen.linear_w4.default, arguments)
        torch.library.opcheck(torch.ops.vllm_zen.linear_w4.default, (*arguments, 16))
    compiled = torch.compile(lambda x: packed.linear(x) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), packed.linear(x) + 1)

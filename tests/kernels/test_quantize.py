"""quantize_rows_s8 equals its reference exactly, on every table and for every thread count."""

import math

import pytest
import torch
from threads import on_threads

from vllm_zen import ops, reference

ROWS = [0, 1, 2, 3, 7, 17, 64]
COLUMNS = [0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 250, 251, 1003, 4096]
TINY = torch.finfo(torch.float32).tiny


def assert_equals_reference(x: torch.Tensor, *, rotate: bool = False) -> None:
    q, scale = ops.quantize_rows_s8(x, rotate=rotate)
    expected_q, expected_scale = reference.quantize_rows_s8(reference.rotate(x) if rotate else x)
    assert q.dtype == torch.int8 and scale.dtype == torch.float32
    assert q.is_contiguous() and q.shape == x.shape
    different = (q != expected_q).nonzero()
    assert not len(different), (
        f"{tuple(x.shape)}: {len(different)} codes differ, the first at {different[0].tolist()}: "
        f"{q[tuple(different[0])]}, expected {expected_q[tuple(different[0])]}"
    )
    torch.testing.assert_close(scale, expected_scale, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("rows", ROWS)
def test_equals_reference(isa, threads, rows, columns):
    generator = torch.Generator().manual_seed(rows * 10007 + columns)
    spread = torch.rand(rows, 1, generator=generator) * 80 - 40  # row magnitudes from 2^-40 to 2^40
    x = torch.randn(rows, columns, generator=generator) * 2**spread
    for values in (x, x.bfloat16()):
        assert_equals_reference(values)
        assert_equals_reference(values, rotate=True)


@pytest.mark.parametrize(
    ("columns", "blocks"), [(16, [16]), (300, [256, 32]), (255, [128, 64, 32, 16]), (7, [])]
)
def test_rotation_is_by_hadamard_matrices(columns, blocks):
    """The reference against a matrix made otherwise: its sign at (i, j) is the parity of i & j."""
    matrix, begin = torch.eye(columns, dtype=torch.float64), 0
    for size in blocks:
        signs = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)])
        matrix[begin : begin + size, begin : begin + size] = signs * size**-0.5
        begin += size
    x = torch.randn(5, columns, generator=torch.Generator().manual_seed(6))
    rotated = reference.rotate(x)
    # A rounding of the factor, one of the product and eight of sums of up to 256 values.
    bound = 10 * torch.finfo(torch.float32).eps * x.double().abs() @ matrix.abs()
    assert ((rotated.double() - x.double() @ matrix).abs() <= bound).all()
    back = reference.rotate(rotated)
    assert (
        (back - x).norm(dim=1) <= 20 * torch.finfo(torch.float32).eps * math.sqrt(columns) * x.norm(dim=1)
    ).all()


def test_rotation_takes_the_scale_from_outliers(isa):
    """One value a hundred times the others: without rotation it leaves them hardly a code."""
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(7))
    x[:, 17] = 100.0
    q, scale = ops.quantize_rows_s8(x)
    plain = (q.float() * scale[:, None] - x).norm()
    q, scale = ops.quantize_rows_s8(x, rotate=True)
    rotated = (reference.rotate(q.float() * scale[:, None]) - x).norm()
    assert rotated < plain / 4


@pytest.mark.parametrize(
    "row",
    [
        pytest.param([0.0, -0.0, 0.0], id="zeros"),
        pytest.param([1.0, -1.0, 0.5, -0.5], id="ties round to even"),
        pytest.param([127.0, 126.5, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5], id="half codes"),
        pytest.param([1e30] + [1e-3] * 7, id="one outlier"),
        pytest.param([3.38e38, -3.38e38, 1.0], id="largest finite"),
        pytest.param([TINY, -TINY], id="scale would be subnormal"),
        pytest.param([TINY * 126, TINY], id="just below the smallest maximum"),
        pytest.param([TINY * 128, TINY], id="just above the smallest maximum"),
        pytest.param([1e-40, 0.0], id="subnormal input"),
        pytest.param([float("nan"), 1.0], id="NaN"),
        pytest.param([float("inf"), 1.0], id="infinity"),
        pytest.param([1.0, -float("inf")], id="negative infinity"),
    ],
)
def test_extremes(isa, row):
    assert_equals_reference(torch.tensor([row, row[::-1]]).bfloat16())


def test_every_bf16_value_as_a_code(isa):
    """All 2^16 bit patterns, each beside a fixed maximum: no value falls into a wrong code."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = patterns[patterns.isfinite() & (patterns.abs() <= 127)]
    assert_equals_reference(torch.stack([finite, torch.full_like(finite, 127.0)], dim=1))


def test_a_fault_stays_in_its_row(isa):
    x = torch.randn(5, 33, generator=torch.Generator().manual_seed(1)).bfloat16()
    clean_q, clean_scale = ops.quantize_rows_s8(x)
    x[2, 7] = float("nan")
    q, scale = ops.quantize_rows_s8(x)
    assert scale[2].isnan() and (q[2] == 0).all()
    others = [0, 1, 3, 4]
    assert torch.equal(q[others], clean_q[others]) and torch.equal(scale[others], clean_scale[others])


@pytest.mark.parametrize("stride", [34, 40, 97])
def test_rows_further_apart_than_k(isa, stride):
    """The gap is poisoned with NaN, which would show in a scale."""
    storage = torch.full((7, stride), float("nan")).bfloat16()
    storage[:, :33] = torch.randn(7, 33, generator=torch.Generator().manual_seed(2)).bfloat16()
    x = storage[:, :33]
    assert not x.is_contiguous()
    assert_equals_reference(x)
    assert not ops.quantize_rows_s8(x)[1].isnan().any()


def test_thread_counts_agree(isa):
    """More rows than one thread takes at a time, so that two threads really share them."""
    x = torch.randn(1000, 4096, generator=torch.Generator().manual_seed(3)).bfloat16()
    results = on_threads(lambda: ops.quantize_rows_s8(x))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(3, dtype=torch.bfloat16), "x must be [M, K], got 1 dimensions"),
        (torch.zeros(2, 3, 4, dtype=torch.bfloat16), "x must be [M, K], got 3 dimensions"),
        (torch.zeros(2, 3).half(), "x must be bfloat16 or float32, got Half"),
        (
            torch.zeros(4, 3, dtype=torch.bfloat16).t(),
            "the last dimension of x must be contiguous, got stride 3",
        ),
    ],
)
def test_refuses(x, message):
    assert ops.load().ok
    with pytest.raises(RuntimeError) as refused:
        ops.quantize_rows_s8(x)
    assert message in str(refused.value)


def test_opcheck(isa):
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    torch.library.opcheck(torch.ops.vllm_zen.quantize_rows_s8.default, (x,))
    torch.library.opcheck(torch.ops.vllm_zen.quantize_rows_s8.default, (x.float(), True))

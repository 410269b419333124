"""search_groups_s4: codes follow from scales, and the error is below that of plain quantization."""

import pytest
import torch
from threads import on_threads

from vllm_zen import ops, ops_linear, reference


def absmax(weight: torch.Tensor, group: int) -> torch.Tensor:
    """Plain quantization: the largest weight of a group at code 7."""
    groups = torch.nn.functional.pad(weight, (0, -weight.shape[1] % group)).view(len(weight), -1, group)
    scale = (groups.abs().amax(-1, keepdim=True) / 7).clamp(min=1e-30)
    return ((groups / scale).round().clamp(-8, 7) * scale).flatten(1)[:, : weight.shape[1]]


@pytest.mark.parametrize("with_offset", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_and_error(isa, group, with_offset, dtype):
    generator = torch.Generator().manual_seed(group)
    weight = torch.randn(33, 300, generator=generator).to(dtype)
    codes, scale, offset = ops_linear.search_groups_s4(weight, group, with_offset=with_offset)
    assert codes.max() <= 15 and (offset is None) == (not with_offset)
    restored = reference.dequantize_s4(codes, scale, offset, group)
    # A code is the nearest: an end, or at most half a step away, a little more where the reciprocal decides.
    step = scale.float().abs().repeat_interleave(group, dim=1)[:, :300]
    inner = (codes > 0) & (codes < 15)
    assert ((restored - weight.float()).abs() <= step * (0.5 + 2**-16))[inner].all()
    error = (restored - weight.float()).square().mean()
    plain = (absmax(weight.float(), group) - weight.float()).square().mean()
    assert error < (0.85 if group > 32 or with_offset else 0.9) * plain


def test_offsets_help_one_sided_groups(isa):
    weight = torch.rand(8, 128, generator=torch.Generator().manual_seed(3)) + 0.2
    errors = []
    for with_offset in (False, True):
        quantized = ops_linear.search_groups_s4(weight, 64, with_offset=with_offset)
        errors.append((reference.dequantize_s4(*quantized, 64) - weight).square().mean())
    assert errors[1] < 0.5 * errors[0]


@pytest.mark.parametrize("with_offset", [False, True])
@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e-12, 1e12])
def test_constant_groups_are_nearly_exact(isa, value, with_offset):
    weight = torch.full((2, 64), value)
    quantized = ops_linear.search_groups_s4(weight, 32, with_offset=with_offset)
    torch.testing.assert_close(reference.dequantize_s4(*quantized, 32), weight, rtol=2**-8, atol=0)


def test_thread_counts_and_tables_agree():
    assert ops.load().ok
    weight = torch.randn(300, 256, generator=torch.Generator().manual_seed(5)).bfloat16()
    results = on_threads(lambda: ops_linear.search_groups_s4(weight, 128)[:2])
    assert all(map(torch.equal, *results))


def test_emphasis_favours_large_weights(isa):
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(6))
    large = weight.abs() > 2
    errors = []
    for emphasis in (0.0, 4.0):
        quantized = ops_linear.search_groups_s4(weight, 128, emphasis=emphasis)
        errors.append((reference.dequantize_s4(*quantized, 128) - weight)[large].square().mean())
    assert errors[1] < errors[0]


def test_refuses():
    assert ops.load().ok
    with pytest.raises(RuntimeError, match="group must be 32, 64 or 128, got 16"):
        ops_linear.search_groups_s4(torch.zeros(2, 32), 16)
    with pytest.raises(RuntimeError, match="weight must be Float, got Half"):
        ops_linear.search_groups_s4(torch.zeros(2, 32).half(), 32)

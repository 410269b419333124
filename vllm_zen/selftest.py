"""Each native op against its reference, on this CPU, in a moment, for doctor. The ugly cases are in tests."""

from collections.abc import Iterator

import torch

from vllm_zen import ops, ops_linear, reference


def run() -> Iterator[tuple[str, bool]]:
    """What was compared, and whether it holds. The native library must be loaded."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 100, generator=generator).bfloat16()
    got, expected = ops.quantize_rows_s8(x), reference.quantize_rows_s8(x)
    yield "quantize_rows_s8 equals its reference", all(map(torch.equal, got, expected))

    key, value = torch.randn(2, 70, 2, 64, generator=generator).bfloat16()
    query = torch.randn(3, 8, 64, generator=generator).bfloat16()
    cache, expected_cache = (torch.zeros(3, 2, 32, 128).bfloat16() for _ in range(2))
    slots = torch.arange(70)
    ops.reshape_and_cache(key, value, cache, slots)
    reference.reshape_and_cache(key, value, expected_cache, slots)
    yield "reshape_and_cache equals its reference", torch.equal(cache, expected_cache)

    lengths = torch.tensor([70], dtype=torch.int32)
    tasks = ops.plan_attention(torch.tensor([0, 3], dtype=torch.int32), lengths, 8, 2)
    output = torch.empty_like(query)
    blocks = torch.arange(3, dtype=torch.int32).view(1, 3)
    ops.paged_attention(query, cache, blocks, lengths, tasks, output, 0.125)
    scores = reference.scores(query.float(), key.float(), torch.arange(67, 70), 0.125)
    exact = torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), value.float().repeat_interleave(4, 1))
    # Weights and outputs are rounded to bf16, half of 2^-7 each; weights sum to 1.
    close = (output.float() - exact).abs() <= 2.0**-7 * (value.float().abs().max() + exact.abs())
    yield "paged_attention is within bf16 of its reference", bool(close.all())

    rows = torch.randn(7, 200, generator=generator).bfloat16()
    codes = torch.randint(-127, 128, (70, 200), generator=generator).to(torch.int8)
    scale = torch.rand(70, 2, generator=generator)
    int8 = ops_linear.Int8Weight.pack(codes, scale[:, 0])
    same = torch.equal(int8.linear(rows), reference.linear_w8a8(rows, codes, scale[:, 0]))
    yield "linear_w8a8 equals its reference", same
    nibbles = (codes & 15).to(torch.uint8)
    int4 = ops_linear.Int4Weight.pack(nibbles, scale, None, 128)
    same = torch.equal(int4.linear(rows), reference.linear_w4a8(rows, nibbles, scale, None, 128))
    yield "linear_w4 with int8 activations equals its reference", same
    exact = reference.linear_w4a16(rows.float(), nibbles, scale, None, 128)
    magnitude = rows.float().abs() @ reference.dequantize_s4(nibbles, scale, None, 128).abs().t()
    # A float32 sum of 200 products, rounded to bf16.
    close = (
        int4.linear(rows, act_bits=16).float() - exact
    ).abs() <= 2.0**-15 * magnitude + 2.0**-8 * exact.abs()
    yield "linear_w4 with bf16 activations is within bf16 of its reference", bool(close.all())

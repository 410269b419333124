"""Our attention beside vLLM's own kernel: the same meaning of every option, and no further from exact."""

import itertools

import pytest
import torch

from vllm_zen import ops, reference
from vllm_zen.bench import attention

SHAPES = {
    "decode": attention.Attention(1, 1, 1024, 4, 2, 64),
    "long decode": attention.Attention(1, 1, 4096, 8, 2, 128),
    "prefill": attention.Attention(1, 128, 128, 4, 2, 128),
    "chunk": attention.Attention(1, 100, 500, 4, 4, 64),
    "long chunk": attention.Attention(1, 100, 1640, 4, 4, 64),
}


@pytest.mark.parametrize("mean", [0.0, 1.0], ids=["values around 0", "values around 1"])
@pytest.mark.parametrize(
    ("shape", "spread"),
    [*itertools.product(["decode", "long decode", "prefill", "chunk"], [1, 4]), ("long chunk", 4)],
)
def test_no_further_from_exact_than_stock(isa, shape, spread, mean):
    """By at most 10 %, in the norm. `spread` is the scores' standard deviation.

    Many rows with many keys have their weights rounded to bf16, as the instruction wants them. Where all
    weights are nearly alike and values cancel, that is as large as the rounding of the output itself (1.2 to
    1.3 of stock's error); such rows hold next to nothing, and are left to the bound in test_attention.py.
    """
    point = SHAPES[shape]
    assert ops.load().ok
    ours, stock = attention._Ours(point, 1), attention._Stock(point, 1)
    generator = torch.Generator().manual_seed(1)
    rows = (point.context, point.kv_heads, point.head_size)
    keys = torch.randn(rows, generator=generator).bfloat16()
    values = (torch.randn(rows, generator=generator) + mean).bfloat16()
    query = (spread * torch.randn(point.tokens, point.heads, point.head_size, generator=generator)).bfloat16()
    place = torch.arange(point.context)
    for side in (ours, stock):
        side.query = query
        slots = side.block_table[0].long()[place // attention.BLOCK_SIZE] * attention.BLOCK_SIZE
        side.write(keys, values, slots + place % attention.BLOCK_SIZE)
    positions = torch.arange(point.context - point.tokens, point.context)
    weights = reference.weights(reference.scores(query.double(), keys.double(), positions, ours.scale))
    of_heads = values.double().repeat_interleave(point.heads // point.kv_heads, dim=1)
    exact = torch.einsum("hqk,khd->qhd", weights, of_heads)
    mine, theirs = ((side.run(0).double() - exact).norm() for side in (ours, stock))
    assert mine <= 1.1 * theirs, f"{mine / theirs:.3f} of stock's error"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"window": 33}, id="window"),
        pytest.param({"soft_cap": 3.0}, id="soft cap"),
        pytest.param({"alibi_slopes": torch.tensor([0.5, 0.1, 0.01, 0.0])}, id="ALiBi"),
        pytest.param({"sinks": torch.tensor([0.0, 2.0, -2.0, 5.0])}, id="sinks"),
    ],
)
@pytest.mark.parametrize("shape", ["decode", "chunk"])
def test_options_mean_the_same(isa, shape, options):
    """As far apart as two roundings of weights and outputs: a different meaning would be far off."""
    point = SHAPES[shape]
    assert ops.load().ok
    ours, stock = attention._Ours(point, 1), attention._Stock(point, 1)
    stock.query = ours.query
    window = options.get("window", 0)
    tasks = ops.plan_attention(
        ours.query_start_loc, ours.seq_lens, point.heads, point.kv_heads, window=window
    )
    arguments = (ours.query, ours.data[0], ours.block_table, ours.seq_lens, tasks, ours.output, ours.scale)
    ops.paged_attention(*arguments, **options)
    stock._ops.cpu_attention_with_kv_cache(
        query=stock.query,
        key_cache=stock._split(0)[0],
        value_cache=stock._split(0)[1],
        output=stock.output,
        query_start_loc=stock.query_start_loc,
        seq_lens=stock.seq_lens,
        scale=stock.scale,
        causal=True,
        alibi_slopes=options.get("alibi_slopes"),
        sliding_window=window or -1,
        block_table=stock.block_table,
        softcap=options.get("soft_cap", 0.0),
        scheduler_metadata=stock._schedule,
        s_aux=options.get("sinks"),
    )
    difference = (ours.output.float() - stock.output.float()).abs().max()
    assert difference <= 2.0**-5 * stock.output.float().abs().max(), difference

"""The paged cache and attention over it: every table, every thread count, against float64."""

import dataclasses
import math
from typing import Any

import bounds
import pytest
import torch
from threads import on_threads

from vllm_zen import ops, reference

HEAD_SIZES = [16, 64, 80, 96, 112, 128, 160, 192, 256]


@dataclasses.dataclass
class Batch:
    """Sequences whose keys and values lie in a shuffled, NaN-poisoned cache."""

    query: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.query.shape[-1])

    def attend(self, *, causal: bool | torch.Tensor = True, window: int = 0, **options: Any) -> torch.Tensor:
        heads, kv_heads = self.query.shape[1], self.kv_cache.shape[1]
        tasks = ops.plan_attention(
            self.query_start_loc, self.seq_lens, heads, kv_heads, causal=causal, window=window
        )
        output = torch.full_like(self.query, float("nan"))
        ops.paged_attention(
            self.query,
            self.kv_cache,
            self.block_table,
            self.seq_lens,
            tasks,
            output,
            self.scale,
            window=window,
            **options,
        )
        return output

    def assert_within_bound(self, output: torch.Tensor, *, sinks: torch.Tensor | None = None, **options: Any):
        assert not output.isnan().any(), "NaN reached the output"
        for i, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            first, last = self.query_start_loc[i : i + 2].tolist()
            bounds.assert_attention_within_bound(
                output[first:last], self.query[first:last], keys, values, self.scale, sinks=sinks, **options
            )


def batch(
    lengths: list[tuple[int, int]],
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 64,
    block_size: int = 32,
    seed: int = 0,
) -> Batch:
    """A batch of (query tokens, sequence length) pairs with random content."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    needed = [-(-length // block_size) for _, length in lengths]
    order = torch.randperm(sum(needed) + 3, generator=generator).int()
    kv_cache = torch.full((len(order), kv_heads, block_size, 2 * head_size), float("nan")).bfloat16()
    # Entries past a sequence's blocks are never to be looked at.
    block_table = torch.full((len(lengths), max([*needed, 1]) + 1), -7, dtype=torch.int32)
    keys, values, used = [], [], 0
    for i, (_, length) in enumerate(lengths):
        block_table[i, : needed[i]] = order[used : used + needed[i]]
        used += needed[i]
        keys.append(random(length, kv_heads, head_size))
        values.append(random(length, kv_heads, head_size))
        places = torch.arange(length)
        slots = block_table[i].long()[places // block_size] * block_size + places % block_size
        ops.reshape_and_cache(keys[i], values[i], kv_cache, slots)
    counts = torch.tensor([0] + [tokens for tokens, _ in lengths])
    return Batch(
        query=random(int(counts.sum()), heads, head_size),
        kv_cache=kv_cache,
        block_table=block_table,
        query_start_loc=counts.cumsum(0).int(),
        seq_lens=torch.tensor([length for _, length in lengths], dtype=torch.int32),
        keys=keys,
        values=values,
    )


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("block_size", [32, 96, 128])
def test_the_cache_equals_its_reference(isa, threads, head_size, block_size):
    """Bit for bit; slots out of order, some not to be written, rows further apart than they are wide."""
    generator = torch.Generator().manual_seed(head_size)
    key, value = torch.randn(2, 41, 3 * head_size + 8, generator=generator).bfloat16()
    key, value = (x[:, : 3 * head_size].view(41, 3, head_size) for x in (key, value))
    slots = torch.randperm(5 * block_size, generator=generator)[:41]
    slots[[3, 17]] = -1
    got, expected = (torch.full((5, 3, block_size, 2 * head_size), float("nan")).bfloat16() for _ in range(2))
    ops.reshape_and_cache(key, value, got, slots)
    reference.reshape_and_cache(key, value, expected, slots)
    assert torch.equal(got.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 127, 128, 129, 511, 512, 513, 1500, 4090])
@pytest.mark.parametrize("block_size", [32, 128])
def test_decode(isa, threads, length, block_size):
    """One query token a sequence, beside a sequence of another length."""
    example = batch([(1, length), (1, 77)], block_size=block_size, seed=length)
    example.assert_within_bound(example.attend())


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize(
    "heads", [(1, 1), (4, 2), (8, 2), (7, 1), (8, 1), (32, 2)], ids=lambda h: f"{h[0]}by{h[1]}"
)
def test_head_sizes_and_groups(isa, head_size, heads):
    """Decode, a short query of speculative decoding, a prompt and a later part of one in the same call."""
    example = batch([(1, 130), (5, 70), (40, 40), (33, 170)], *heads, head_size=head_size, seed=heads[0])
    example.assert_within_bound(example.attend())


@pytest.mark.parametrize(
    "tokens", [(1, 1), (2, 2), (31, 31), (129, 129), (300, 300), (64, 577), (200, 201), (7, 1030)]
)
def test_prefill(isa, threads, tokens):
    example = batch([tokens, (1, 9)], seed=tokens[0])
    example.assert_within_bound(example.attend())


@pytest.mark.parametrize("window", [1, 2, 5, 31, 32, 33, 100, 128, 1000])
@pytest.mark.parametrize("tokens", [(1, 700), (90, 700), (260, 260)])
def test_window(isa, window, tokens):
    """Keys that every query has left behind are poisoned: their blocks may belong to others by then."""
    example = batch([tokens], seed=window)
    count, length = tokens
    for place in range(max(length - count + 1 - window, 0)):
        block = int(example.block_table[0, place // 32])
        reference.cached_keys(example.kv_cache)[block, :, 0, place % 32] = float("nan")
        reference.cached_values(example.kv_cache)[block, :, place % 32 // 2, place % 2] = float("nan")
    example.assert_within_bound(example.attend(window=window), window=window)


def test_a_window_the_plan_does_not_know(isa):
    """Layers of one group may have different windows; the plan then covers all keys."""
    example = batch([(1, 3000), (50, 400)])
    tasks = ops.plan_attention(example.query_start_loc, example.seq_lens, 4, 2)
    output = torch.empty_like(example.query)
    ops.paged_attention(
        example.query,
        example.kv_cache,
        example.block_table,
        example.seq_lens,
        tasks,
        output,
        example.scale,
        window=40,
    )
    example.assert_within_bound(output, window=40)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"soft_cap": 30.0}, id="soft cap"),
        pytest.param({"soft_cap": 0.5}, id="soft cap that caps"),
        pytest.param({"alibi_slopes": torch.tensor([0.5, 0.25, 0.0, 2.0])}, id="ALiBi"),
        pytest.param({"sinks": torch.tensor([0.0, 3.0, -3.0, 100.0])}, id="sinks"),
        pytest.param({"causal": False}, id="not causal"),
        pytest.param(
            {"soft_cap": 5.0, "alibi_slopes": torch.full((4,), 0.1), "sinks": torch.ones(4), "window": 50},
            id="all",
        ),
    ],
)
def test_features(isa, threads, options):
    example = batch([(1, 1300), (60, 200), (3, 65)])
    example.assert_within_bound(example.attend(**options), **options)


def test_causal_by_sequence(isa):
    example = batch([(20, 40), (20, 40)])
    output = example.attend(causal=torch.tensor([True, False]))
    for i, causal in enumerate((True, False)):
        rows = slice(20 * i, 20 * (i + 1))
        bounds.assert_attention_within_bound(
            output[rows],
            example.query[rows],
            example.keys[i],
            example.values[i],
            example.scale,
            causal=causal,
        )


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda k, v: k[9].mul_(1e4), id="one key 10,000 times larger"),
        pytest.param(lambda k, v: k.copy_(k[:1].expand_as(k)), id="all keys equal"),
        pytest.param(lambda k, v: k.zero_(), id="keys of zeros"),
        pytest.param(lambda k, v: v[3].mul_(1e30), id="a huge value"),
    ],
)
def test_extremes(isa, change):
    example = batch([(1, 600), (40, 150)])
    for i in range(2):
        change(example.keys[i], example.values[i])
        places = torch.arange(len(example.keys[i]))
        slots = example.block_table[i].long()[places // 32] * 32 + places % 32
        ops.reshape_and_cache(example.keys[i], example.values[i], example.kv_cache, slots)
    example.assert_within_bound(example.attend())


def test_a_fault_stays_in_its_sequence(isa):
    example = batch([(1, 50), (1, 60)])
    clean = example.attend()
    example.query[0, 0, 3] = float("nan")
    output = example.attend()
    assert output[0, 0].isnan().all()
    assert torch.equal(output[0, 1:], clean[0, 1:]) and torch.equal(output[1], clean[1])


def test_blocks_shared_between_sequences(isa):
    """What prefix caching does."""
    example = batch([(1, 100), (1, 90)])
    example.block_table[1] = example.block_table[0]
    example.keys[1], example.values[1] = example.keys[0][:90], example.values[0][:90]
    example.assert_within_bound(example.attend())


@pytest.mark.parametrize("lengths", [[(1, 5000)], [(1, 9000), (1, 30), (64, 2500)], [(700, 1900)]])
def test_thread_counts_agree_bit_for_bit(isa, lengths):
    example = batch(lengths, block_size=128)
    spans = ops.plan_attention(example.query_start_loc, example.seq_lens, 4, 2)[:, 8]
    assert (spans > 1).any(), "the example is to have keys in several spans"
    results = on_threads(example.attend, (1, 2, 7))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    example.assert_within_bound(results[0])


def test_an_empty_batch(isa):
    example = batch([])
    assert example.attend().shape == (0, 4, 64)


def test_the_plan_covers_every_pair_once():
    """Each query token meets each of its keys in exactly one task."""
    lengths = [(1, 4000), (300, 700), (2, 2), (0, 40), (97, 5000)]
    starts = torch.tensor([0] + [tokens for tokens, _ in lengths]).cumsum(0).int()
    tasks = ops.plan_attention(starts, torch.tensor([n for _, n in lengths], dtype=torch.int32), 8, 2)
    met = [torch.zeros(tokens, length, dtype=torch.int32) for tokens, length in lengths]
    for sequence, first, tokens, position, _, begin, end, *_ in tasks.tolist():
        row = first - int(starts[sequence])
        assert position == lengths[sequence][1] - lengths[sequence][0] + row
        met[sequence][row : row + tokens, begin:end] += 1
    for (tokens, length), pairs in zip(lengths, met, strict=True):
        position = torch.arange(length - tokens, length)[:, None]
        assert (pairs[torch.arange(length) <= position] == 1).all() and (pairs <= 1).all()


def refusals():
    example = batch([(1, 50), (3, 60)])
    wrong = {
        "a block that does not exist": (
            {"block_table": example.block_table.fill_diagonal_(99)},
            "block_table[",
        ),
        "more tokens than blocks": (
            {"seq_lens": torch.tensor([50, 600]).int()},
            "seq_lens[1] is 600, its 3 blocks",
        ),
        "query of float32": ({"query": example.query.float()}, "query must be BFloat16, got Float"),
        "another head size": (
            {"query": example.query[..., :32]},
            "query must have the cache's head size, 64, got 32",
        ),
        "heads apart": (
            {"query": example.query.repeat(1, 2, 1)[:, ::2]},
            "the heads of a token must be contiguous",
        ),
        "output too short": ({"output": torch.empty(3, 4, 64).bfloat16()}, "output must hold 4 tokens"),
        "foreign tasks": (
            {"tasks": torch.zeros(1, 3, dtype=torch.int32)},
            "tasks must come from plan_attention",
        ),
        "slopes of another model": (
            {"alibi_slopes": torch.ones(3)},
            "alibi_slopes must have 4 values, got 3",
        ),
    }
    return [pytest.param(changes, message, id=name) for name, (changes, message) in wrong.items()]


@pytest.mark.parametrize(("changes", "message"), refusals() if ops.load().ok else [])
def test_refuses(changes, message):
    example = batch([(1, 50), (3, 60)])
    arguments = {
        "query": example.query,
        "kv_cache": example.kv_cache,
        "block_table": example.block_table,
        "seq_lens": example.seq_lens,
        "tasks": ops.plan_attention(example.query_start_loc, example.seq_lens, 4, 2),
        "output": torch.empty_like(example.query),
        "scale": 0.1,
    }
    with pytest.raises(RuntimeError) as error:
        ops.paged_attention(**{**arguments, **changes})
    assert message in str(error.value)


def test_refuses_a_slot_the_cache_does_not_have():
    rows = torch.zeros(1, 2, 64).bfloat16()
    with pytest.raises(RuntimeError, match=r"slot_mapping\[0\] is 64, the cache has 64 slots"):
        ops.reshape_and_cache(rows, rows, torch.zeros(2, 2, 32, 128).bfloat16(), torch.tensor([64]))


def test_refuses_lengths_that_contradict_each_other():
    with pytest.raises(RuntimeError, match=r"seq_lens\[0\] is 3, less than its 5 query tokens"):
        ops.plan_attention(torch.tensor([0, 5]).int(), torch.tensor([3]).int(), 4, 2)

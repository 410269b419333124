"""Each native op in plain torch: the oracle of the tests and of doctor's self-test."""

import functools
from collections.abc import Callable, Iterator, Sequence

import torch

_SMALLEST_MAX = 127.0 * torch.finfo(torch.float32).tiny


def quantize_rows_s8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes bf16 or float32 [M, K] to (int8 [M, K], float32 [M]), one symmetric scale a row.

    q = round_half_even(x * (127 / max|x|)) and scale = max|x| / 127, in float32, each operation rounded
    once. Rows with max|x| below 127 times the smallest normal float32 count as zero (scale 0); rows with a
    NaN or an infinity give q = 0 and scale NaN.
    """
    values = x.float()
    largest = values.abs().amax(dim=1) if x.shape[1] else values.new_zeros(x.shape[0])
    finite = torch.isfinite(largest)
    usable = finite & (largest >= _SMALLEST_MAX)
    divisor = torch.where(usable, largest, torch.ones_like(largest))
    # Not `127.0 / divisor`: torch computes that as reciprocal times 127, which rounds twice.
    inverse = torch.div(torch.full_like(divisor, 127.0), divisor)
    codes = torch.round(values * inverse.unsqueeze(1))
    q = torch.where(usable.unsqueeze(1), codes, torch.zeros_like(codes)).to(torch.int8)
    scale = torch.where(usable, largest / 127.0, torch.zeros_like(largest))
    return q, torch.where(finite, scale, torch.full_like(scale, float("nan")))


CHUNK_W8 = 256


def rotate(x: torch.Tensor) -> torch.Tensor:
    """x [M, K] in float32, times an orthonormal Hadamard matrix block by block.

    Blocks are of 256 columns; what is left is split into blocks of 128, 64, 32 and 16, and the last few
    columns stay. A block is multiplied by 1 / sqrt(size); then columns i and i + d become their sum and their
    difference, for d = 1, 2, 4 and so on. Rotated twice, x is x again, but for rounding.
    """
    result = x.float().clone()
    begin, size = 0, CHUNK_W8
    while size >= 16:
        blocks = (x.shape[1] - begin) // size
        part = result[:, begin : begin + blocks * size].reshape(-1, size) * size**-0.5
        distance = 1
        while distance < size:
            pairs = part.view(-1, size // (2 * distance), 2, distance)
            low, high = pairs[:, :, 0], pairs[:, :, 1]
            part = torch.stack([low + high, low - high], dim=2).view(-1, size)
            distance *= 2
        result[:, begin : begin + blocks * size] = part.reshape(len(x), blocks * size)
        begin += blocks * size
        size //= 2
    return result


def _chunks(x: torch.Tensor, chunk: int) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Columns of x [M, K], their codes in float64 and the scale [M, 1] of each row of codes."""
    for begin in range(0, x.shape[1], chunk):
        part = slice(begin, begin + chunk)
        codes, scale = quantize_rows_s8(x[:, part])
        yield part, codes.double(), scale[:, None]


def linear_w8a8(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    rotated: bool = False,
) -> torch.Tensor:
    """x [M, K] times (codes int8 [N, K] * scale [N]) transposed, plus bias [N].

    Every 256 values of a row of x are quantized with a scale of their own. Sums over them are exact; times
    that scale they are added in float32, one after the other, then times `scale`, plus bias, each step
    rounded once, and at last to x's dtype. rotated: rotate(x) is quantized, for codes of a weight that
    was rotated.
    """
    total = torch.zeros(x.shape[0], codes.shape[0])
    for part, q, q_scale in _chunks(rotate(x) if rotated else x, CHUNK_W8):
        total = total + (q @ codes[:, part].double().t()).float() * q_scale
    return _finish(total * scale.float(), bias, x.dtype)


def linear_w4a8(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same for codes uint8 [N, K], scale [N, groups] and offset [N, groups] or None: a weight is
    scale * (code - 8) + offset.

    x is quantized group by group. Sums of a group are exact; times the weights' scale, plus the sum of x's
    codes times the offset, times the activations' scale they are added in float32.
    """
    total = torch.zeros(x.shape[0], codes.shape[0])
    for index, (part, q, q_scale) in enumerate(_chunks(x, group)):
        sums = (q @ (codes[:, part].double() - 8.0).t()).float() * scale[:, index].float()
        if offset is not None:
            sums = sums + q.sum(1, keepdim=True).float() * offset[:, index].float()
        total = total + sums * q_scale
    return _finish(total, bias, x.dtype)


def linear_w4a16(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same with x in bf16, not quantized; in float64 until it is rounded to x's dtype."""
    total = x.bfloat16().double() @ dequantize_s4(codes, scale, offset, group).double().t()
    return _finish(total, bias, x.dtype)


def dequantize_s4(
    codes: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None, group: int
) -> torch.Tensor:
    """What codes uint8 [N, K] stand for, scale * (code - 8) + offset, in float32; both are [N, groups]."""

    def wide(values: torch.Tensor) -> torch.Tensor:
        return values.float().repeat_interleave(group, dim=1)[:, : codes.shape[1]]

    weight = wide(scale) * (codes.float() - 8)
    return weight if offset is None else weight + wide(offset)


def _finish(total: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return (total if bias is None else total + bias).to(dtype)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
}


def experts(
    x: torch.Tensor,
    w13: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    w2: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """ops_moe.moe() of x [M, K], token by token; w13 and w2 are the layers of every expert, as functions."""
    total = torch.zeros(x.shape)
    for token, row in enumerate(x.unsqueeze(1)):
        for weight, expert in zip(topk_weights[token], topk_ids[token].tolist(), strict=True):
            if expert >= 0:
                gate, up = w13[expert](row).float().chunk(2, dim=-1)
                hidden = (ACTIVATIONS[activation](gate) * up).to(x.dtype)
                total[token] += weight * w2[expert](hidden)[0].float()
    return total.to(x.dtype)


KV_TILE = 32


def cached_keys(kv_cache: torch.Tensor) -> torch.Tensor:
    """The keys of a paged cache [blocks, kv_heads, block_size, 2 * head_size], token by token.

    A view [blocks, kv_heads, tiles, 32, head_size / 2, 2]: in memory a tile of 32 tokens holds, for each pair
    of neighbours along the head, that pair of every token.
    """
    blocks, kv_heads, block_size, width = kv_cache.shape
    half = kv_cache.view(blocks, kv_heads, 2, block_size * width // 2)[:, :, 0]
    return half.view(blocks, kv_heads, block_size // KV_TILE, width // 4, KV_TILE, 2).transpose(3, 4)


def cached_values(kv_cache: torch.Tensor) -> torch.Tensor:
    """The values of a paged cache [blocks, kv_heads, block_size, 2 * head_size], token by token.

    A view [blocks, kv_heads, block_size / 2, 2, head_size]: in memory two neighbours lie interleaved.
    """
    blocks, kv_heads, block_size, width = kv_cache.shape
    half = kv_cache.view(blocks, kv_heads, 2, block_size * width // 2)[:, :, 1]
    return half.view(blocks, kv_heads, block_size // 2, width // 2, 2).transpose(3, 4)


def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """ops.reshape_and_cache(), token by token."""
    block_size = kv_cache.shape[2]
    keys, values = cached_keys(kv_cache), cached_values(kv_cache)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            block, place = divmod(slot, block_size)
            keys[block, :, place // KV_TILE, place % KV_TILE] = key[token].view(key.shape[1], -1, 2)
            values[block, :, place // 2, place % 2] = value[token]


def scores(
    query: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    *,
    causal: bool = True,
    soft_cap: float = 0.0,
    window: int = 0,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores [heads, tokens, keys] of query [tokens, heads, head_size] at positions [tokens], in its dtype.

    keys are [keys, kv_heads, head_size]. -infinity where a token may not look.
    """
    group = query.shape[1] // keys.shape[1]
    result = torch.einsum("qhd,khd->hqk", query, keys.repeat_interleave(group, dim=1)) * scale
    if soft_cap:
        result = soft_cap * torch.tanh(result / soft_cap)
    distance = torch.arange(len(keys)) - positions[:, None]
    if alibi_slopes is not None:
        result = result + alibi_slopes[:, None, None].to(result.dtype) * distance
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if causal:
        hidden |= distance > 0
    if window:
        hidden |= distance <= -window
    return result.masked_fill(hidden, -torch.inf)


def weights(scores: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """The softmax of scores [heads, tokens, keys]; a sink [heads] takes its share and leaves."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    sink = sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]

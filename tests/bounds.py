"""Error bounds of float kernels, derived from norms and eps: no global tolerance, no cosine."""

from typing import Any

import torch

from vllm_zen import reference

# The distance from 1 to the next value. Rounding to nearest is off by at most half of it, relatively.
EPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7}


def linear_bound(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Bound on |computed - exact| for x [M, K] times weight [N, K] transposed plus bias [N]: float64 [M, N].

    A float32 sum of K products in any order is off by at most K * eps32 * sum |x||w| (Higham, Accuracy and
    Stability of Numerical Algorithms, section 3.1, to first order). The result is rounded to x's dtype, and
    some libraries round the product once before they add a bias.
    """
    product = x.double() @ weight.double().t()
    magnitude = x.double().abs() @ weight.double().abs().t()
    rounded = product.abs()
    if bias is not None:
        magnitude = magnitude + bias.double().abs()
        rounded = rounded + (product + bias.double()).abs()
    accumulation = (x.shape[-1] + 2) * EPS[torch.float32] * magnitude
    roundoff = EPS[x.dtype] / 2
    return accumulation + roundoff * (1 + roundoff) * (rounded + 2 * accumulation)


def linear_w4a16_bound(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Bound on |computed - exact| of reference.linear_w4a16(): float64 [M, N].

    As linear_bound(), with |scale (code - 8)| + |offset| for |weight|, whose parts are summed apart, and
    three more roundings a group for scaling and adding them.
    """
    parts = reference.dequantize_s4(codes, scale, None, group).double().abs()
    if offset is not None:
        parts += reference.dequantize_s4(torch.full_like(codes, 8), scale, offset, group).double().abs()
    magnitude = x.bfloat16().double().abs() @ parts.t()
    if bias is not None:
        magnitude = magnitude + bias.double().abs()
    accumulation = (x.shape[-1] + 3 * scale.shape[1] + 2) * EPS[torch.float32] * magnitude
    exact = reference.linear_w4a16(x.double(), codes, scale, offset, group, bias)
    return accumulation + EPS[x.dtype] / 2 * (exact.abs() + accumulation)


def linear_exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., K] times weight [N, K] transposed plus bias [N], in float64."""
    return torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())


def assert_linear_within_bound(
    got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Fails with the worst element's place, value, expectation and bound."""
    exact = linear_exact(x, weight, bias)
    assert got.shape == exact.shape, f"shape {tuple(got.shape)}, expected {tuple(exact.shape)}"
    assert got.dtype == x.dtype, f"dtype {got.dtype}, expected {x.dtype}"
    if got.numel() == 0:
        return
    flat_x = x.reshape(-1, x.shape[-1])
    excess = (got.double() - exact).abs().reshape(-1, weight.shape[0]) - linear_bound(flat_x, weight, bias)
    worst = int(torch.nan_to_num(excess, nan=torch.inf).argmax())
    assert bool((excess <= 0).all()), (
        f"x {tuple(x.shape)} weight {tuple(weight.shape)} {x.dtype}: element {worst} is "
        f"{got.reshape(-1)[worst]}, expected {exact.reshape(-1)[worst]}, "
        f"over the bound by {excess.reshape(-1)[worst]}"
    )


def attention_bound(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, probabilities: torch.Tensor
) -> torch.Tensor:
    """Bound on |computed - exact| of bf16 attention before its last rounding: float64 [tokens, heads, size].

    query is [tokens, heads, size], keys and values [keys, kv_heads, size], probabilities the exact softmax
    [heads, tokens, keys]. To first order, of the result's magnitude, sum of p |v|:
    - a score is a float32 sum of `size` products, scaled (and capped, which enlarges no error): off by at
      most s = (size + 4) * eps32 * scale * sum |q||k|, which changes a weight by s and their sum by s;
    - scores are multiplied by log2(e) and subtracted from their maximum: 2 * eps32 of the largest |score|
      each, again in the weight and in the sum;
    - the power of two is good to 2^-20, and weights are rounded to bf16, half of eps, in the product only;
    - sums over the keys, in float32: keys * eps32 for the product, and the same for the weights.
    """
    group = query.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
    magnitude = scale * torch.einsum("qhd,khd->hqk", query.double().abs(), keys.abs())
    largest = magnitude.amax(dim=-1).t()[..., None] if len(keys) else torch.zeros(1)
    eps = EPS[torch.float32]
    weight = (query.shape[-1] + 4 + 4) * eps * largest * 2 + 2.0**-19 + EPS[torch.bfloat16] / 2
    weight = weight + (2 * len(keys) + 8) * eps
    result: torch.Tensor = weight * torch.einsum("hqk,khd->qhd", probabilities, values.abs())
    return result


def assert_attention_within_bound(
    got: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    *,
    sinks: torch.Tensor | None = None,
    **options: Any,
) -> None:
    """Fails with the worst element's place. The query's tokens are the last of the keys'."""
    group = query.shape[1] // keys.shape[1]
    positions = torch.arange(len(keys) - len(query), len(keys))
    scores = reference.scores(query.double(), keys.double(), positions, scale, **options)
    probabilities = reference.weights(scores, sinks)
    exact = torch.einsum("hqk,khd->qhd", probabilities, values.double().repeat_interleave(group, dim=1))
    bound = attention_bound(query, keys, values, scale, probabilities)
    bound = bound + EPS[torch.bfloat16] / 2 * (exact.abs() + bound) + torch.finfo(torch.float32).tiny
    excess = torch.nan_to_num((got.double() - exact).abs() - bound, nan=torch.inf)
    assert bool((excess <= 0).all()), (
        f"query {tuple(query.shape)} keys {len(keys)} {options}: {int((excess > 0).sum())} elements are over "
        f"the bound, element {int(excess.argmax())} by {excess.max():.3g}: "
        f"{got.flatten()[excess.argmax()]}, expected {exact.flatten()[excess.argmax()]}"
    )

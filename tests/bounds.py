"""Error bounds of float kernels, derived from norms and eps: no global tolerance, no cosine."""

import torch

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

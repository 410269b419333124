"""Each native op in plain torch: the oracle of the tests and of doctor's self-test."""

import torch

_SMALLEST_MAX = 127.0 * torch.finfo(torch.float32).tiny


def quantize_rows_s8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes bf16 [M, K] to (int8 [M, K], float32 [M]), one symmetric scale a row.

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

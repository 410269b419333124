"""Quantized linear layers with random weights, and rows for them."""

from dataclasses import dataclass

import torch

from vllm_zen import ops_linear, reference


@dataclass
class Layer:
    """A weight of one scheme, packed, and its reference."""

    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None
    group: int  # 0: int8
    packed: ops_linear.Int8Weight | ops_linear.Int4Weight

    def expected(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.group:
            return reference.linear_w4a8(x, self.codes, self.scale, self.offset, self.group, bias)
        return reference.linear_w8a8(x, self.codes, self.scale, bias, rotated=self.packed.rotated)


def pack(scheme: str, codes: torch.Tensor, generator: torch.Generator) -> Layer:
    columns, depth = codes.shape
    if scheme.startswith("w8"):
        scale = torch.rand(columns, generator=generator) * 0.01
        packed = ops_linear.Int8Weight.pack(codes, scale, rotated="rotated" in scheme)
        return Layer(codes, scale, None, 0, packed)
    group = int(scheme.split()[1][1:])
    shape = (columns, -(-depth // group))
    scale = torch.rand(shape, generator=generator) * 0.01
    offset = None
    if "offset" in scheme:
        offset = torch.randn(shape, generator=generator) * 0.01
    else:
        scale = scale.bfloat16()
    return Layer(codes, scale, offset, group, ops_linear.Int4Weight.pack(codes, scale, offset, group))


def random_layer(scheme: str, columns: int, depth: int, seed: int = 0) -> Layer:
    generator = torch.Generator().manual_seed(seed)
    low, high, dtype = (-128, 128, torch.int8) if scheme.startswith("w8") else (0, 16, torch.uint8)
    codes = torch.randint(low, high, (columns, depth), generator=generator).to(dtype)
    return pack(scheme, codes, generator)


def random_rows(rows: int, depth: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, depth, generator=torch.Generator().manual_seed(rows * 1009 + depth)).to(dtype)

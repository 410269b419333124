"""Quantized linear layers, ours against every stock path for the same weights: the grid and the sides."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from vllm_zen import ops, ops_linear, zentorch
from vllm_zen.bench.kernels import OurSide, Point, Side
from vllm_zen.errors import BenchmarkError

SHAPES = (  # outputs, inputs
    (2048, 2048),
    (16384, 2048),
    (2048, 8192),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (128256, 2048),
)
ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 1024)
GROUP = 128
# Operations a byte of weights at which computing takes as long as reading: 870 GOPS over 30 GB/s.
RIDGE = 29

Run = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Weights:
    """The same weight, or those of E experts, as both schemes and in bf16."""

    codes: torch.Tensor  # int8 [N, K] or [E, N, K]: of int8 in full, of int4 -8 to 7
    scale: torch.Tensor  # int8: float32 [N] or [E, N]; int4: bf16 [N, groups] or [E, N, groups]

    @classmethod
    def random(cls, bits: int, *shape: int, seed: int = 0, size: float = 1.0) -> "Weights":
        """Of a shape [N, K] or [E, N, K]; `size` is about the largest value."""
        generator = torch.Generator().manual_seed(seed)
        limit = 2 ** (bits - 1)
        codes = torch.randint(-limit, limit, shape, generator=generator, dtype=torch.int8)
        of_scale = shape[:-1] if bits == 8 else (*shape[:-1], shape[-1] // GROUP)
        scale = (torch.rand(of_scale, generator=generator) + 0.5) * (size / limit)
        return cls(codes, scale if bits == 8 else scale.bfloat16())

    @property
    def bf16(self) -> torch.Tensor:
        """[N, K] or [E, N, K]."""
        if self.scale.dim() < self.codes.dim():
            return (self.codes * self.scale[..., None]).bfloat16()
        return (self.codes * self.scale.repeat_interleave(GROUP, dim=-1)).bfloat16()

    @property
    def nibbles(self) -> torch.Tensor:
        """The codes of int4 as they are packed: uint8, 0 to 15."""
        return (self.codes + 8).to(torch.uint8)


@functools.lru_cache(maxsize=1)
def _weights(bits: int, columns: int, k: int) -> Weights:
    return Weights.random(bits, columns, k)


def limit_of(rows: float, bits: int, computing: str = "int8") -> str:
    """What binds so many rows over weights of so many bits: bandwidth, or the computing limit."""
    return "bandwidth" if rows * 2 * 8 / bits < RIDGE else computing


def _zentorch() -> Any:
    """zentorch's ops. Raises BenchmarkError where they cannot run."""
    ok, reason = zentorch.supports_linear(torch.bfloat16)
    if not ok:
        raise BenchmarkError(reason)
    return zentorch.ops()


def _zentorch_int8(weights: Weights) -> Run:
    packed = _zentorch().zentorch_weight_prepack_for_dynamic_qlinear(weights.codes.clone())
    run = _zentorch().zentorch_dynamic_qlinear
    return lambda x: run(x, packed, weights.scale, None, is_weight_prepacked=True)


def _zentorch_bf16(weights: Weights) -> Run:
    packed = _zentorch().zentorch_weight_prepack_for_linear(weights.bf16)
    run = _zentorch().zentorch_linear_unary
    return lambda x: run(x, packed, None, is_weight_prepacked=True)


def _zentorch_w4a8(weights: Weights) -> Run:
    packed = _zentorch().zentorch_woq_repack_weight(weights.codes).view(torch.int8)
    scale = weights.scale.t().contiguous()
    run = _zentorch().zentorch_dynamic_qlinear
    return lambda x: run(x, packed, scale, None)


def _zentorch_w4a16(weights: Weights) -> Run:
    packed = _zentorch().zentorch_woq_repack_weight(weights.codes).t()
    scale = weights.scale.t().contiguous()
    run = _zentorch().zentorch_woq_linear
    return lambda x: run(x, packed, scale, None, None)


def _torch_int4(weights: Weights) -> Run:
    codes = weights.nibbles.to(torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scale = weights.scale.t()
    scales_and_zeros = torch.stack([scale, torch.zeros_like(scale)], dim=-1).contiguous()
    run = torch.ops.aten._weight_int4pack_mm_for_cpu
    return lambda x: run(x, packed, GROUP, scales_and_zeros)


def _onednn_int8(weights: Weights) -> Run:
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    scale = weights.scale
    handler = _custom_ops.create_onednn_scaled_mm(weights.codes.t(), scale, torch.bfloat16, True, False, 32)

    def run(x: torch.Tensor) -> torch.Tensor:
        codes, row_scale, _ = _custom_ops.onednn_scaled_int8_quant(x, None, None, True)
        output = torch.empty(len(x), handler.n, dtype=x.dtype)
        _custom_ops.onednn_scaled_mm(handler, codes, output, row_scale, None, None, None)
        return output

    return run


# By our scheme and name; bits of the weights that the path reads.
STOCK: dict[tuple[str, str], tuple[Callable[[Weights], Run], int]] = {
    ("w8a8", "zentorch int8"): (_zentorch_int8, 8),
    ("w8a8", "onednn int8"): (_onednn_int8, 8),
    ("w8a8", "zentorch bf16"): (_zentorch_bf16, 16),
    ("w4a8", "zentorch w4a8"): (_zentorch_w4a8, 4),
    ("w4a8", "zentorch w4a16"): (_zentorch_w4a16, 4),
    ("w4a8", "torch int4"): (_torch_int4, 4),
    ("w4a8", "zentorch bf16"): (_zentorch_bf16, 16),
    ("w4a16", "zentorch w4a16"): (_zentorch_w4a16, 4),
}


@dataclass(frozen=True)
class Linear(Point):
    """`rows` of activations through one layer, against one path of stock."""

    scheme: str
    columns: int
    k: int
    rows: int
    against: str

    @property
    def name(self) -> str:
        scheme = self.scheme if self.bits == 8 else f"{self.scheme} g{GROUP}"
        return f"{scheme} {self.columns}x{self.k} M={self.rows} against {self.against}"

    @property
    def bits(self) -> int:
        """Of our weights."""
        return 8 if self.scheme == "w8a8" else 4

    @property
    def limit(self) -> str:
        return limit_of(self.rows, self.bits, "compute" if self.scheme == "w4a16" else "int8")

    @property
    def cache_bytes(self) -> int:
        """Of our weights and scales; stock's rates are of the same bytes, so that rates compare as times."""
        scales = 4 * self.columns if self.bits == 8 else 2 * self.columns * self.k // GROUP
        return self.columns * self.k * self.bits // 8 + scales

    def memory_bytes(self, copies: int) -> int:
        """Of both sides together."""
        stock = self.columns * self.k * STOCK[self.scheme, self.against][1] // 8
        return copies * (self.cache_bytes + stock)

    @property
    def work(self) -> float:
        """Bytes read, or operations."""
        return self.cache_bytes if self.limit == "bandwidth" else 2.0 * self.rows * self.columns * self.k

    def sides(self, copies: int) -> tuple[OurSide, Side]:
        """Ours and stock's, over `copies` of the same weights."""
        weights = _weights(self.bits, self.columns, self.k)
        x = torch.randn(self.rows, self.k, generator=torch.Generator().manual_seed(1)).bfloat16()
        stock, _ = STOCK[self.scheme, self.against]
        return _Ours(x, weights, self.scheme, copies), _Stock(x, [stock(weights) for _ in range(copies)])


class _Ours:
    """Our op over copies of a packed weight that lie one after the other."""

    def __init__(self, x: torch.Tensor, weights: Weights, scheme: str, copies: int) -> None:
        self._x = x
        packed: ops_linear.Int8Weight | ops_linear.Int4Weight
        if scheme == "w8a8":
            codes, scale = ops.quantize_rows_s8(weights.bf16, rotate=True)  # as zen_int8 does
            packed = ops_linear.Int8Weight.pack(codes, scale, rotated=True)
        else:
            packed = ops_linear.Int4Weight.pack(weights.nibbles, weights.scale, None, GROUP)
        self.data = packed.weight.expand(copies, *packed.weight.shape).contiguous()
        layers = [
            dataclasses.replace(packed, weight=weight, scale=packed.scale.clone()) for weight in self.data
        ]
        options: dict[str, Any] = {"act_bits": 16} if scheme == "w4a16" else {}
        self._runs: list[Run] = [functools.partial(layer.linear, **options) for layer in layers]

    def run(self, copy: int) -> torch.Tensor:
        return self._runs[copy](self._x)


class _Stock:
    """A path of stock over copies of a weight, which it keeps as it likes."""

    def __init__(self, x: torch.Tensor, layers: list[Run]) -> None:
        self._x, self._layers = x, layers

    def run(self, copy: int) -> torch.Tensor:
        return self._layers[copy](self._x)


def grid() -> Iterator[Linear]:
    """Every point, layer by layer."""
    for columns, k in SHAPES:
        for scheme, against in STOCK:
            for rows in ROWS:
                yield Linear(scheme, columns, k, rows, against)

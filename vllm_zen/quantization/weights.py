"""A weight quantized and packed, slab by slab, so that what is in between stays small."""

import ctypes
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from vllm_zen import envs, ops, ops_linear
from vllm_zen.activation import logger
from vllm_zen.errors import ModelError, UnsupportedError
from vllm_zen.ops_linear import COLUMNS, Int4Weight, Int8Weight
from vllm_zen.quantization.settings import Scheme

# Weights of a slab. In between, packing takes some 10 bytes each; with more it is slower, out of L2.
SLAB = 2**21
# What the error of a weight counts more by where the weight is large; see search_groups_s4().
EMPHASIS = 1.0
SECONDS_BETWEEN_REPORTS = 5.0
# The operands of a layer are buffers of these names, so a traced graph takes them as inputs.
OPERAND = "zen_"
OPERANDS = ("weight", "scale", "offset")


class Progress:
    """Says what a load has quantized so far, from the second report on every five seconds."""

    def __init__(self) -> None:
        self.layers = 0
        self.values = 0
        self._reported = time.monotonic()

    def add(self, values: int) -> None:
        """Counts a layer."""
        return_memory()
        self.layers += 1
        self.values += values
        if time.monotonic() - self._reported > SECONDS_BETWEEN_REPORTS:
            self._reported = time.monotonic()
            logger.info("quantized %d layers, %.2f billion weights", self.layers, self.values / 1e9)


def return_memory() -> None:
    """After a layer: what packing it took in between would stay with the process, a GiB a billion weights."""
    ctypes.CDLL(None).malloc_trim(0)


def quantize(weight: torch.Tensor, scheme: Scheme, name: str) -> dict[str, torch.Tensor]:
    """Quantizes and packs a weight [N, K] in bf16 or float32: the operands of run(), by name.

    Raises ModelError, naming the layer, for a weight with NaN or infinity.
    """
    if not all(bool(slab.isfinite().all()) for slab in _slabs(weight)):
        raise ModelError(
            f"{name}: the weight holds NaN or infinity, which no scale can quantize. Check the checkpoint, "
            'or keep the layer as it is: {"vllm_zen": {"quantization": {"layers": {"' + name + '": "bf16"}}}}'
        )
    slabs = ((_blocks(slab), _pack(slab, scheme)) for slab in _slabs(weight))
    return _joined(slabs, _blocks(weight))


def run(
    scheme: Scheme,
    operands: dict[str, Any],
    x: torch.Tensor,
    bias: torch.Tensor | None,
    columns: int,
) -> torch.Tensor:
    """x [..., K] times the weight transposed, plus bias [N]: [..., N] of x's dtype.

    operands are what quantize() gave; those that the scheme has not may be None.
    """
    if scheme.bits == "int8":
        return ops_linear.linear_w8a8(
            x, operands["weight"], operands["scale"], bias, columns, rotated=scheme.rotated
        )
    return ops_linear.linear_w4(
        x,
        operands["weight"],
        operands["scale"],
        operands.get("offset"),
        bias,
        columns,
        act_bits=scheme.act_bits,
    )


def attach(layer: Any, operands: dict[str, Any], of: str = "") -> None:
    """Gives a layer its operands as buffers; `of` tells its weights apart where it has several."""
    for name, operand in {**dict.fromkeys(OPERANDS), **operands}.items():
        layer.register_buffer(OPERAND + of + name, operand, persistent=False)


def operands_of(layer: Any, of: str = "") -> dict[str, Any]:
    """The operands that attach() gave a layer; None for those it has not."""
    return {name: getattr(layer, OPERAND + of + name, None) for name in OPERANDS}


def stacked(parts: Iterable[dict[str, torch.Tensor]], count: int) -> dict[str, torch.Tensor]:
    """The operands of `count` weights of one shape as one tensor each, with no second copy of them all."""
    return _joined(((1, {name: operand[None] for name, operand in part.items()}) for part in parts), count)


def _joined(parts: Iterable[tuple[int, dict[str, torch.Tensor]]], count: int) -> dict[str, torch.Tensor]:
    """Operands of `count` units, as blocks of columns, from parts that say how many units they are."""
    operands: dict[str, torch.Tensor] = {}
    done = 0
    for units, part in parts:
        for name, operand in part.items():
            of_a_unit = len(operand) // units
            if name not in operands:
                operands[name] = operand.new_empty((count * of_a_unit, *operand.shape[1:]))
            operands[name][done * of_a_unit :][: len(operand)] = operand
        done += units
    return operands


def pack_int8(codes: torch.Tensor, scale: torch.Tensor, *, rotated: bool = False) -> dict[str, torch.Tensor]:
    """The operands of a weight of codes int8 [N, K] and scale [N]."""
    return _by_name(Int8Weight.pack(codes, scale, rotated=rotated))


def pack_int4(
    codes: torch.Tensor, scale: torch.Tensor, zero_points: torch.Tensor | None, group: int
) -> dict[str, torch.Tensor]:
    """The operands of a weight scale * (codes - zero_points): codes uint8 [N, K], the others [N, groups].

    None for zero points of 8.
    """
    offset = None if zero_points is None else (8 - zero_points.to(scale.dtype)) * scale
    return _by_name(Int4Weight.pack(codes, scale, offset, group))


def _by_name(packed: Int8Weight | Int4Weight) -> dict[str, torch.Tensor]:
    operands = {name: getattr(packed, name, None) for name in OPERANDS}
    return {name: operand for name, operand in operands.items() if operand is not None}


def check_table() -> None:
    """Refuses to run on portable kernels that the user did not ask for. Raises UnsupportedError."""
    status = ops.load()
    if not status.ok:
        raise UnsupportedError(f"quantized layers need the native kernels: {status.reason}. {status.remedy}.")
    if ops.isa() == "ref" and envs.isa() != "ref":
        raise UnsupportedError(
            "zen_int8 and zen_int4 need AVX-512 with VNNI, which this CPU does not report. Serve in bf16, or "
            f"set {envs.ISA.name}=ref to run them on portable kernels, slowly."
        )


def _blocks(weight: torch.Tensor) -> int:
    return -(-len(weight) // COLUMNS)


def _slabs(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    rows = max(COLUMNS, SLAB // max(1, weight.shape[1]) // COLUMNS * COLUMNS)
    for begin in range(0, len(weight), rows):
        yield weight[begin : begin + rows]


def _pack(weight: torch.Tensor, scheme: Scheme) -> dict[str, torch.Tensor]:
    if scheme.bits == "int8":
        return pack_int8(*ops.quantize_rows_s8(weight, rotate=scheme.rotated), rotated=scheme.rotated)
    codes, scale, offset = ops_linear.search_groups_s4(
        weight.contiguous(), scheme.group, with_offset=scheme.zero_points, emphasis=EMPHASIS
    )
    return _by_name(Int4Weight.pack(codes, scale, offset, scheme.group))

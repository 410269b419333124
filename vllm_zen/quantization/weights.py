"""A weight quantized and packed, slab by slab, so that what is in between stays small."""

import ctypes
import time
from collections.abc import Iterator
from typing import Any

import torch

from vllm_zen import envs, ops, ops_linear, zentorch
from vllm_zen.activation import logger
from vllm_zen.errors import ModelError, UnsupportedError
from vllm_zen.ops_linear import COLUMNS, Int4Weight, Int8Weight
from vllm_zen.quantization.settings import Scheme

# Weights of a slab: 16 Mi values are 32 MiB in bf16.
SLAB = 2**24
# What the error of a weight counts more by where the weight is large; see search_groups_s4().
EMPHASIS = 1.0
SECONDS_BETWEEN_REPORTS = 5.0


class Progress:
    """Says what a load has quantized so far, from the second report on every five seconds."""

    def __init__(self) -> None:
        self.layers = 0
        self.values = 0
        self._reported = time.monotonic()

    def add(self, values: int) -> None:
        """Counts a layer."""
        # What quantizing took in between would stay with the process: a GiB of a model of a billion.
        ctypes.CDLL(None).malloc_trim(0)
        self.layers += 1
        self.values += values
        if time.monotonic() - self._reported > SECONDS_BETWEEN_REPORTS:
            self._reported = time.monotonic()
            logger.info("quantized %d layers, %.2f billion weights", self.layers, self.values / 1e9)


def quantize(weight: torch.Tensor, scheme: Scheme, name: str) -> dict[str, torch.Tensor]:
    """Quantizes and packs a weight [N, K] in bf16 or float32: the operands of run(), by name.

    Raises ModelError, naming the layer, for a weight with NaN or infinity.
    """
    if not all(bool(slab.isfinite().all()) for slab in _slabs(weight)):
        raise ModelError(
            f"{name}: the weight holds NaN or infinity, which no scale can quantize. Check the checkpoint, "
            'or keep the layer as it is: {"vllm_zen": {"quantization": {"layers": {"' + name + '": "bf16"}}}}'
        )
    if scheme.act_bits == 16:
        return _w4a16(weight, scheme)
    operands: dict[str, torch.Tensor] = {}
    done = 0  # blocks of columns
    for slab in _slabs(weight):
        blocks = _blocks(slab)
        for key, part in _pack(slab, scheme).items():
            of_a_block = len(part) // blocks
            if key not in operands:
                operands[key] = part.new_empty((_blocks(weight) * of_a_block, *part.shape[1:]))
            operands[key][done * of_a_block :][: len(part)] = part
        done += blocks
    return operands


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
    if scheme.act_bits == 8:
        return ops_linear.linear_w4a8(
            x, operands["weight"], operands["scale"], operands.get("offset"), bias, columns
        )
    flat = x.reshape(-1, x.shape[-1])
    output = zentorch.ops().zentorch_woq_linear(flat, operands["weight"].t(), operands["scale"], None, bias)
    result: torch.Tensor = output.view(*x.shape[:-1], columns)
    return result


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
        int8 = Int8Weight.pack(*ops.quantize_rows_s8(weight, rotate=scheme.rotated), rotated=scheme.rotated)
        return {"weight": int8.weight, "scale": int8.scale}
    codes, scale, offset = ops_linear.search_groups_s4(
        weight.contiguous(), scheme.group, with_offset=scheme.zero_points, emphasis=EMPHASIS
    )
    int4 = Int4Weight.pack(codes, scale, offset, scheme.group)
    operands = {"weight": int4.weight, "scale": int4.scale}
    return operands if int4.offset is None else {**operands, "offset": int4.offset}


def _w4a16(weight: torch.Tensor, scheme: Scheme) -> dict[str, torch.Tensor]:
    """zentorch's layout: int32 [N, K / 8], scale [groups, N]."""
    ok, reason = zentorch.supports_linear(torch.bfloat16)
    if not ok or weight.dtype != torch.bfloat16:
        raise UnsupportedError(
            f"act_bits=16 runs on zentorch, in bfloat16: {reason or f'the model is in {weight.dtype}'}. "
            "Use act_bits=8."
        )
    if weight.shape[1] % scheme.group:
        raise UnsupportedError(
            f"act_bits=16 takes inputs that are a multiple of the group of {scheme.group}, not "
            f"{weight.shape[1]}. Use act_bits=8 or another group_size."
        )
    codes, scale, _ = ops_linear.search_groups_s4(weight.contiguous(), scheme.group, emphasis=EMPHASIS)
    packed = zentorch.ops().zentorch_woq_repack_weight((codes.to(torch.int8) - 8).contiguous())
    return {"weight": packed, "scale": scale.t().contiguous()}

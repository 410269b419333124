"""Quantized linear layers: packed weights, and typed wrappers of the native ops over them.

Layouts are drawn in csrc/README.md; `unpack()` of a packed weight gives back what was packed.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

COLUMNS = 64
GROUPS = (32, 64, 128)


def _blocks(rows: torch.Tensor) -> torch.Tensor:
    """[N, C] as [blocks, 64, C], the last block filled with zeros."""
    columns = rows.shape[0]
    return pad(rows, (0, 0, 0, -columns % COLUMNS)).view(-1, COLUMNS, rows.shape[1])


def _words_by_column(rows: torch.Tensor) -> torch.Tensor:
    """Bytes [blocks, 64, 4 * W] as [blocks, W, 64, 4]: a word of every column, then the next."""
    words = rows.contiguous().view(torch.int32).transpose(1, 2).contiguous()
    return words.unsqueeze(-1).view(rows.dtype)


def _rows_by_column(words: torch.Tensor) -> torch.Tensor:
    """The inverse of _words_by_column(): [blocks, W, 64, 4] as [blocks * 64, 4 * W]."""
    blocks, count, columns, size = words.shape
    return words.transpose(1, 2).reshape(blocks * columns, count * size)


@dataclass(frozen=True)
class Int8Weight:
    """An int8 weight [N, K] with a scale a row, packed for linear_w8a8()."""

    weight: torch.Tensor  # uint8 [blocks, K / 4, 64, 4], codes plus 128
    scale: torch.Tensor  # float32 [blocks * 64]
    shape: tuple[int, int]
    rotated: bool = False  # and so are activations, before they are quantized

    @classmethod
    def pack(cls, codes: torch.Tensor, scale: torch.Tensor, *, rotated: bool = False) -> "Int8Weight":
        """Packs codes int8 [N, K] with scale [N]; rotated: of a weight that was.

        Raises ValueError for other shapes.
        """
        columns, k = codes.shape
        if codes.dtype != torch.int8 or scale.shape != (columns,):
            raise ValueError(
                f"pack takes int8 [N, K] and scale [N], got {codes.dtype} {tuple(codes.shape)} and "
                f"{tuple(scale.shape)}"
            )
        rows = _blocks(pad(codes, (0, -k % 4))).view(torch.uint8) ^ 128
        return cls(_words_by_column(rows), pad(scale.float(), (0, -columns % COLUMNS)), (columns, k), rotated)

    def unpack(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What was packed: codes int8 [N, K], scale float32 [N]."""
        columns, k = self.shape
        codes = (_rows_by_column(self.weight) ^ 128).view(torch.int8)
        return codes[:columns, :k], self.scale[:columns]

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] times the weight transposed, plus bias [N]."""
        return linear_w8a8(x, self.weight, self.scale, bias, self.shape[0], rotated=self.rotated)

    def look_up(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows int64 [...] of the weight in bf16 or float32: [..., K]."""
        return embedding_w8(ids, self.weight, self.scale, self.shape[1], dtype, rotated=self.rotated)


@dataclass(frozen=True)
class Int4Weight:
    """An int4 weight [N, K] with scales, and maybe offsets, of groups along K, packed."""

    weight: torch.Tensor  # uint8 [blocks, K / 8, 64, 4]
    scale: torch.Tensor  # bfloat16 or float32 [blocks, groups, 64]
    offset: torch.Tensor | None  # like scale; None: 0
    shape: tuple[int, int]

    @classmethod
    def pack(
        cls, codes: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None, group: int
    ) -> "Int4Weight":
        """Packs codes uint8 [N, K] of 0 to 15 with scale and offset [N, groups].

        A weight is scale * (code - 8) + offset. Both are kept in bfloat16 where scale is, else in float32.
        The last group may be short.
        Raises ValueError for another group than 32, 64 or 128, and for shapes that contradict it.
        """
        columns, k = codes.shape
        if group not in GROUPS:
            raise ValueError(f"group={group} must be one of {GROUPS}")
        groups = -(-k // group)
        for name, tensor in (("scale", scale), ("offset", offset)):
            if tensor is not None and tensor.shape != (columns, groups):
                raise ValueError(f"{name} must be [{columns}, {groups}], got {tuple(tensor.shape)}")
        rows = _blocks(pad(codes, (0, -k % group)))
        quads = rows.view(*rows.shape[:2], -1, 2, 4)
        octets = (quads[..., 0, :] | quads[..., 1, :] << 4).flatten(-2)

        def by_group(values: torch.Tensor) -> torch.Tensor:
            return _blocks(values).transpose(1, 2).contiguous()

        scale = scale if scale.dtype == torch.bfloat16 else scale.float()
        packed_offset = None if offset is None else by_group(offset.to(scale.dtype))
        return cls(_words_by_column(octets), by_group(scale), packed_offset, (columns, k))

    def unpack(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """What was packed: codes uint8 [N, K], scale and offset [N, groups]."""
        columns, k = self.shape
        octets = _rows_by_column(self.weight)
        octets = octets.view(len(octets), -1, 1, 4)
        codes = torch.cat([octets & 15, octets >> 4], dim=-2).flatten(1)

        def by_column(values: torch.Tensor) -> torch.Tensor:
            return values.transpose(1, 2).flatten(0, 1)[:columns]

        offset = None if self.offset is None else by_column(self.offset)
        return codes[:columns, :k], by_column(self.scale), offset

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None, *, act_bits: int = 8) -> torch.Tensor:
        """x [..., K] times the weight transposed, plus bias [N]."""
        columns = self.shape[0]
        return linear_w4(x, self.weight, self.scale, self.offset, bias, columns, act_bits=act_bits)


def linear_w8a8(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    columns: int,
    *,
    rotated: bool = False,
) -> torch.Tensor:
    """A linear layer of int8 weights; x is quantized to int8, a scale for every 256 values of a row.

    x        bf16 or float32 [..., K]
    weight, scale  as Int8Weight holds them
    bias     float32 or bf16 [columns], or None
    rotated  the weight was rotated before it was quantized, and x is too (reference.rotate)
    returns  [..., columns] of x's dtype

    A row with a NaN or an infinity gives NaN, and no other row is touched. Equal for any number of threads.
    Raises RuntimeError naming the argument and the value for another dtype, shape or stride.
    """
    output: torch.Tensor = torch.ops.vllm_zen.linear_w8a8(x, weight, scale, bias, columns, rotated)
    return output


def linear_w4(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    bias: torch.Tensor | None,
    columns: int,
    *,
    act_bits: int = 8,
) -> torch.Tensor:
    """A linear layer of int4 weights in groups. Else as linear_w8a8().

    weight, scale, offset  as Int4Weight holds them
    act_bits               8: x is quantized to int8, a scale a group; 16: it is multiplied in bf16
    """
    output: torch.Tensor = torch.ops.vllm_zen.linear_w4(x, weight, scale, offset, bias, columns, act_bits)
    return output


def embedding_w8(
    ids: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    k: int,
    dtype: torch.dtype,
    *,
    rotated: bool = False,
) -> torch.Tensor:
    """Rows of a packed int8 weight (Int8Weight) times their scales: [..., k] of dtype, bf16 or float32.

    Rows of a rotated weight are turned back. ids int64 [...].
    Raises RuntimeError for an id that the weight does not have.
    """
    output: torch.Tensor = torch.ops.vllm_zen.embedding_w8(
        ids, weight, scale, k, dtype == torch.bfloat16, rotated
    )
    return output


def search_groups_s4(
    weight: torch.Tensor, group: int, *, with_offset: bool = False, emphasis: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Quantizes bf16 or float32 [N, K] to int4 with the scales that make the error small.

    Returns codes uint8 [N, K], scale bf16 [N, groups] and, if wanted, offset bf16 [N, groups]: a weight is
    about scale * (code - 8) + offset. The error of a weight counts
    1 + emphasis * weight^2 / mean(weight^2 of its group). Scales may be negative: codes reach further down.
    Raises RuntimeError for another dtype, or a group other than 32, 64 and 128.
    """
    codes, scale, offset = torch.ops.vllm_zen.search_groups_s4(weight, group, with_offset, emphasis)
    return codes, scale, offset if with_offset else None


def register_fakes() -> None:
    """For torch.compile; once, after the library is loaded."""

    @torch.library.register_fake("vllm_zen::linear_w8a8")  # type: ignore[misc]
    def _(
        x: torch.Tensor, weight: Any, scale: Any, bias: Any, columns: int, rotated: bool = False
    ) -> torch.Tensor:
        return x.new_empty((*x.shape[:-1], columns))

    @torch.library.register_fake("vllm_zen::linear_w4")  # type: ignore[misc]
    def _(
        x: torch.Tensor, weight: Any, scale: Any, offset: Any, bias: Any, columns: int, act_bits: int = 8
    ) -> torch.Tensor:
        return x.new_empty((*x.shape[:-1], columns))

    @torch.library.register_fake("vllm_zen::embedding_w8")  # type: ignore[misc]
    def _(
        ids: torch.Tensor, weight: Any, scale: Any, k: int, bf16: bool, rotated: bool = False
    ) -> torch.Tensor:
        return ids.new_empty((*ids.shape, k), dtype=torch.bfloat16 if bf16 else torch.float32)

    @torch.library.register_fake("vllm_zen::search_groups_s4")  # type: ignore[misc]
    def _(
        weight: torch.Tensor, group: int, with_offset: bool, emphasis: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        groups = -(-weight.shape[1] // group)
        return (
            weight.new_empty(weight.shape, dtype=torch.uint8),
            weight.new_empty((weight.shape[0], groups), dtype=torch.bfloat16),
            weight.new_empty((weight.shape[0] if with_offset else 0, groups), dtype=torch.bfloat16),
        )

"""Attention, ours against vLLM's: the grid, and both sides over the same keys and values."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from vllm_zen import ops
from vllm_zen.bench.kernels import OurSide, Point, Side

HEADS = ((16, 8, 128), (32, 8, 64), (32, 8, 128), (28, 4, 128), (8, 8, 64))
BATCHES = (1, 4, 8, 32, 64)
CONTEXTS = (128, 1024, 4096, 16384)
PREFILLS = ((512, 512), (2048, 2048), (8192, 8192), (512, 4608))
BLOCK_SIZE = 128


@dataclass(frozen=True)
class Attention(Point):
    """A batch of equal sequences of `context` tokens, of which the last `tokens` are the query."""

    batch: int
    tokens: int
    context: int
    heads: int
    kv_heads: int
    head_size: int

    @property
    def name(self) -> str:
        kind = "decode" if self.tokens == 1 else "prefill" if self.tokens == self.context else "chunk"
        work = f"{self.batch} x {self.context}" if self.tokens == 1 else f"{self.tokens}"
        if kind == "chunk":
            work += f" at {self.context - self.tokens}"
        return f"{kind} {work}, {self.heads}/{self.kv_heads} x {self.head_size}"

    @property
    def limit(self) -> str:
        return "bandwidth" if self.tokens == 1 else "compute"

    @property
    def cache_bytes(self) -> int:
        """Of keys and values that are read once."""
        return self.batch * self.context * self.kv_heads * self.head_size * 2 * 2

    @property
    def work(self) -> float:
        """Bytes read, or floating-point operations on pairs that are not masked."""
        if self.limit == "bandwidth":
            return self.cache_bytes
        pairs = self.tokens * (self.context - self.tokens) + self.tokens * (self.tokens + 1) / 2
        return self.batch * pairs * self.heads * self.head_size * 4

    def sides(self, copies: int) -> tuple[OurSide, Side]:
        """Ours and stock's, over as many caches with the same keys and values."""
        return _Ours(self, copies), _Stock(self, copies)


def grid() -> Iterator[Attention]:
    """Every point, decode first."""
    for heads, batch, context in itertools.product(HEADS, BATCHES, CONTEXTS):
        yield Attention(batch, 1, context, *heads)
    for heads, (tokens, context) in itertools.product(HEADS, PREFILLS):
        yield Attention(1, tokens, context, *heads)


class _Paged:
    """What both sides share: blocks in a shuffled order, the same random content in every cache."""

    def __init__(self, point: Attention, copies: int) -> None:
        self.point = point
        generator = torch.Generator().manual_seed(0)
        blocks = -(-point.context // BLOCK_SIZE)
        self.block_table = (
            torch.randperm(point.batch * blocks, generator=generator).int().view(point.batch, -1)
        )
        shape = (point.batch * blocks, point.kv_heads, BLOCK_SIZE, 2 * point.head_size)
        self.seq_lens = torch.full((point.batch,), point.context, dtype=torch.int32)
        self.query_start_loc = torch.arange(point.batch + 1, dtype=torch.int32) * point.tokens
        rows = (point.batch * point.tokens, point.heads, point.head_size)
        self.query = torch.randn(rows, generator=generator).bfloat16()
        self.output = torch.empty_like(self.query)
        # Zeros, because stock lets what is left in unused slots reach the output.
        self.data = torch.zeros((copies, *shape), dtype=torch.bfloat16)
        self._fill(generator)
        self.data[1:] = self.data[0]

    def _fill(self, generator: torch.Generator) -> None:
        point = self.point
        key, value = torch.randn(
            2, point.context, point.kv_heads, point.head_size, generator=generator
        ).bfloat16()
        place = torch.arange(point.context)
        for row in self.block_table.long():
            self.write(key, value, row[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE)

    def write(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Into the first cache."""
        raise NotImplementedError

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.point.head_size)


class _Ours(_Paged):
    def write(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        ops.reshape_and_cache(key, value, self.data[0], slots)

    @cached_property
    def _tasks(self) -> torch.Tensor:
        return ops.plan_attention(self.query_start_loc, self.seq_lens, self.point.heads, self.point.kv_heads)

    def run(self, copy: int) -> torch.Tensor:
        ops.paged_attention(
            self.query,
            self.data[copy],
            self.block_table,
            self.seq_lens,
            self._tasks,
            self.output,
            self.scale,
        )
        return self.output


class _Stock(_Paged):
    @cached_property
    def _ops(self) -> Any:
        from vllm import _custom_ops
        from vllm.platforms import current_platform

        current_platform.import_kernels()
        return _custom_ops

    @cached_property
    def _isa(self) -> str:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        isa = str(_get_attn_isa(torch.bfloat16, BLOCK_SIZE, self.point.head_size))
        if isa == "amx":
            # Linux kills a process that uses tiles without having asked; in an engine a GEMM asks first.
            torch.cpu._init_amx()
        return isa

    def _split(self, copy: int) -> tuple[torch.Tensor, torch.Tensor]:
        cache = self.data[copy]
        keys, values = cache.view(*cache.shape[:2], 2 * BLOCK_SIZE, -1).chunk(2, dim=2)
        return keys, values

    def write(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        self._ops.cpu_attn_reshape_and_cache(key, value, *self._split(0), slots, self._isa)

    @cached_property
    def _schedule(self) -> Any:
        point = self.point
        return self._ops.cpu_attn_get_scheduler_metadata(
            num_reqs=point.batch,
            num_heads=point.heads,
            num_kv_heads=point.kv_heads,
            head_dim=point.head_size,
            seq_lens=self.seq_lens,
            dtype=torch.bfloat16,
            query_start_loc=self.query_start_loc,
            causal=True,
            sliding_window_size=-1,
            isa=self._isa,
            enable_kv_split=True,
        )

    def run(self, copy: int) -> torch.Tensor:
        self._ops.cpu_attention_with_kv_cache(
            self.query,
            *self._split(copy),
            self.output,
            self.query_start_loc,
            self.seq_lens,
            self.scale,
            True,
            None,
            -1,
            self.block_table,
            0.0,
            self._schedule,
            None,
        )
        return self.output

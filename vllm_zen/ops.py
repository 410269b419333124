"""Typed wrappers and fakes of torch.ops.vllm_zen, and the loading of the library behind them."""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_zen import ops_linear, ops_moe

LIBRARY = Path(__file__).parent / "libvllm_zen.so"


@dataclass(frozen=True)
class NativeStatus:
    """Whether the native library is usable; the reason when it is not."""

    ok: bool
    reason: str = ""

    @property
    def remedy(self) -> str:
        """What to do about a library that is not usable."""
        return "" if self.ok else "reinstall vllm-zen with the torch it was built for: scripts/install"


@functools.cache
def load(library: Path = LIBRARY) -> NativeStatus:
    """Loads the native library once and registers the fakes. Never raises: a failure is a status."""
    if not library.exists():
        return NativeStatus(False, f"{library.name} is missing from {library.parent}")
    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
        torch.ops.vllm_zen.isa  # noqa: B018  raises AttributeError where the library registered nothing
    except (OSError, RuntimeError, AttributeError) as error:
        cause = error.__cause__ or error  # torch wraps the loader's message in one without it
        return NativeStatus(False, str(cause).strip().partition("\n")[0])
    _register_fakes()
    ops_linear.register_fakes()
    ops_moe.register_fakes()
    return NativeStatus(True)


def isa() -> str:
    """The name of the table of kernels this process uses: ref or zen4.

    Raises RuntimeError when VLLM_ZEN_ISA names a table this CPU or build lacks.
    """
    return str(torch.ops.vllm_zen.isa())


def force_isa(name: str) -> None:
    """Switches this process to another table, for tests and benchmarks. Raises like isa()."""
    torch.ops.vllm_zen.force_isa(name)


def quantize_rows_s8(x: torch.Tensor, *, rotate: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 quantization of bf16 or float32 [M, K], one scale a row: (int8 [M, K], float32 [M]).

    rotate: of reference.rotate(x), for a linear_w8a8() that rotates too. The row stride of x is free,
    its last dimension contiguous. Rows of zeros get scale 0; a row with a NaN or an infinity gets zeros and
    scale NaN. See reference.quantize_rows_s8 for the arithmetic.
    Raises RuntimeError for another dtype, rank or inner stride.
    """
    q, scale = torch.ops.vllm_zen.quantize_rows_s8(x, rotate)
    return q, scale


def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Writes keys and values into the paged cache, in the layout paged_attention() reads.

    key, value    bf16 [>= tokens, kv_heads, head_size], the last two dimensions contiguous
    kv_cache      bf16 [blocks, kv_heads, block_size, 2 * head_size], blocks contiguous; written
    slot_mapping  int64 [tokens]: block * block_size + place in the block; negative slots are not written

    Raises RuntimeError naming the argument and the value for another dtype, shape, stride or a slot that
    the cache does not have.
    """
    torch.ops.vllm_zen.reshape_and_cache(key, value, kv_cache, slot_mapping)


def plan_attention(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    heads: int,
    kv_heads: int,
    *,
    causal: bool | torch.Tensor = True,
    window: int = 0,
) -> torch.Tensor:
    """The tasks of a step's attention, for paged_attention(): int32 [tasks, 10], the longest first.

    query_start_loc  int32 [sequences + 1]: where each sequence's query tokens begin
    seq_lens         int32 [>= sequences]: tokens of each sequence, the query's included
    causal           for all sequences, or bool [sequences]
    window           tokens the layers' queries see at most, themselves included; 0: all

    The tasks depend on these lengths and head counts alone, never on the number of threads.
    Raises RuntimeError for lengths that contradict each other.
    """
    of_each = causal if isinstance(causal, torch.Tensor) else None
    tasks: torch.Tensor = torch.ops.vllm_zen.plan_attention(
        query_start_loc, seq_lens, causal is True, of_each, heads, kv_heads, window
    )
    return tasks


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    tasks: torch.Tensor,
    output: torch.Tensor,
    scale: float,
    *,
    soft_cap: float = 0.0,
    window: int = 0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attention of query tokens to the cached keys and values of their sequences, written to output.

    query, output  bf16 [tokens, heads, head_size], the last two dimensions contiguous
    kv_cache       as reshape_and_cache() wrote it; the query's own tokens are in it
    block_table    int32 [sequences, blocks]: the blocks of each sequence in order
    seq_lens       int32 [sequences]
    tasks          what plan_attention() made of the same lengths and heads
    soft_cap       scores become soft_cap * tanh(score / soft_cap); 0: they stay
    window         tokens a query sees, itself included; 0: all
    alibi_slopes   float32 [heads]: adds slope * (key position - query position) to a score
    sinks          float32 [heads]: one more score a head, whose value is zero

    Raises RuntimeError naming the argument and the value for another dtype, shape or stride, for a sequence
    longer than its blocks, and for a block that the cache does not have.
    """
    torch.ops.vllm_zen.paged_attention(
        query, kv_cache, block_table, seq_lens, tasks, output, scale, soft_cap, window, alibi_slopes, sinks
    )


def _register_fakes() -> None:
    @torch.library.register_fake("vllm_zen::quantize_rows_s8")  # type: ignore[misc]
    def _(x: torch.Tensor, rotate: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[:1], dtype=torch.float32)

    @torch.library.register_fake("vllm_zen::reshape_and_cache")  # type: ignore[misc]
    def _(
        key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None: ...

    @torch.library.register_fake("vllm_zen::paged_attention")  # type: ignore[misc]
    def _(*args: object) -> None: ...

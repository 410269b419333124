"""Typed wrappers and fakes of torch.ops.vllm_zen, and the loading of the library behind them."""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch

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
    return NativeStatus(True)


def isa() -> str:
    """The name of the table of kernels this process uses: ref or zen4.

    Raises RuntimeError when VLLM_ZEN_ISA names a table this CPU or build lacks.
    """
    return str(torch.ops.vllm_zen.isa())


def force_isa(name: str) -> None:
    """Switches this process to another table, for tests and benchmarks. Raises like isa()."""
    torch.ops.vllm_zen.force_isa(name)


def quantize_rows_s8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 quantization of bf16 [M, K], one scale a row: (int8 [M, K], float32 [M]).

    The row stride of x is free, its last dimension contiguous. Rows of zeros get scale 0; a row with a NaN
    or an infinity gets zeros and scale NaN. See reference.quantize_rows_s8 for the arithmetic.
    Raises RuntimeError for another dtype, rank or inner stride.
    """
    q, scale = torch.ops.vllm_zen.quantize_rows_s8(x)
    return q, scale


def _register_fakes() -> None:
    @torch.library.register_fake("vllm_zen::quantize_rows_s8")  # type: ignore[misc]
    def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[:1], dtype=torch.float32)

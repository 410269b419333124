"""Every environment variable of vllm-zen: name, default, rule, meaning. The one reader of them.

Values are read when asked for, so a process sees what its environment says now. Standard library only.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_zen.errors import EnvironmentVariableError


@dataclass(frozen=True)
class Variable:
    """One variable. `allowed` is the complete list of values, or empty where any text is a value."""

    name: str
    default: str
    allowed: tuple[str, ...]
    meaning: str

    def read(self, environ: Mapping[str, str] | None = None) -> str:
        """The value, or the default when unset or empty. Raises EnvironmentVariableError off the list."""
        value = (os.environ if environ is None else environ).get(self.name, "").strip() or self.default
        if self.allowed and value not in self.allowed:
            raise EnvironmentVariableError(
                f"{self.name}={value!r} is not a value it takes. Allowed: {', '.join(self.allowed)}. "
                f"Unset it for the default, {self.default!r}."
            )
        return value


ISA = Variable(
    "VLLM_ZEN_ISA",
    "auto",
    ("auto", "ref", "zen4"),
    "The table of native kernels. auto takes the best this CPU runs; forcing one the CPU lacks is an error. "
    "ref also activates the platform on a CPU that does not qualify, with the portable kernels.",
)
LINEAR = Variable(
    "VLLM_ZEN_LINEAR",
    "auto",
    ("auto", "zentorch", "vllm", "torch"),
    "Who runs unquantized linear layers. auto takes the first of zentorch, vLLM's own path (oneDNN) and "
    "torch that supports the layer; a name forces one.",
)
ATTENTION = Variable(
    "VLLM_ZEN_ATTENTION",
    "auto",
    ("auto", "native", "vllm"),
    "Who runs attention. auto takes our kernels on a CPU they are made for, for every layer they support; "
    "native also takes the portable ones; vllm leaves all of it to vLLM.",
)
CACHE_DIR = Variable(
    "VLLM_ZEN_CACHE_DIR",
    "~/.cache/vllm-zen",
    (),
    "Where the demo model and other prepared files are kept.",
)
STRICT = Variable(
    "VLLM_ZEN_STRICT",
    "0",
    ("0", "1"),
    "1 turns the warning about a broken component (zentorch, the native library) into an error.",
)
WEIGHT_PREPACK = Variable(
    "VLLM_ZENTORCH_WEIGHT_PREPACK",
    "1",
    ("0", "1"),
    "1 packs linear weights into zentorch's blocked layout at load and frees the originals.",
)

VARIABLES = (ISA, LINEAR, ATTENTION, CACHE_DIR, STRICT, WEIGHT_PREPACK)


def isa() -> str:
    """auto, or the table the user forces."""
    return ISA.read()


def linear() -> str:
    """auto, or the backend the user forces."""
    return LINEAR.read()


def attention() -> str:
    """auto, or who the user wants to run attention."""
    return ATTENTION.read()


def cache_dir() -> Path:
    """The cache folder, with ~ resolved. It may not exist yet.

    Raises EnvironmentVariableError where ~ stands for no folder, as for a user id without an account.
    """
    value = CACHE_DIR.read()
    try:
        return Path(value).expanduser()
    except RuntimeError as error:
        raise EnvironmentVariableError(
            f"{CACHE_DIR.name}={value!r}: {error}. Set it to an absolute path, or set HOME."
        ) from None


def strict() -> bool:
    """Whether a broken component is an error."""
    return STRICT.read() == "1"


def weight_prepack() -> bool:
    """Whether the user wants linear weights packed at load."""
    return WEIGHT_PREPACK.read() == "1"


def check_all(environ: Mapping[str, str] | None = None) -> None:
    """Reads every variable, so that a wrong value is refused before any weight is read."""
    for variable in VARIABLES:
        variable.read(environ)

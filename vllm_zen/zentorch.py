"""The only importer of zentorch: is it there, is it whole, what can it do?

`inspect()` reads metadata and loads nothing; `load()` imports the package and never raises.
"""

import ast
import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

logger = logging.getLogger("vllm.zen")

PACKAGE = "zentorch"
UNKNOWN = "unknown"  # the version of a package that no distribution claims

# The ops without which zentorch is not whole: those the linear path calls.
REQUIRED_OPS = ("zentorch_linear_unary", "zentorch_weight_prepack_for_linear")

# zentorch packs weights for ZenDNN's blocked AOCL kernel; with another algorithm a packed weight is read
# in the wrong order. Unset means this one.
PREPACK_ALGORITHM = "1"


@dataclass(frozen=True)
class Status:
    """What is known of zentorch. `reason` and `remedy` are for people; both empty when all is well."""

    state: Literal["absent", "broken", "present", "loaded"]
    version: str = ""
    built_for: str = ""  # the torch version it was compiled against
    torch: str = ""  # the torch version installed
    reason: str = ""
    remedy: str = ""

    @property
    def usable(self) -> bool:
        """Whether its ops may be called."""
        return self.state == "loaded"

    def describe(self) -> str:
        """A few words for the start-up line: `zentorch 2.13.0.1`, or why not."""
        if self.usable:
            return f"{PACKAGE} {self.version}"
        return f"no {PACKAGE} ({'not installed' if self.state == 'absent' else self.reason})"


def _installed_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _torch_it_was_built_for(package_folder: Path) -> str:
    """Reads __torchversion__ from _build_info.py as text: importing it would run the package first."""
    try:
        tree = ast.parse((package_folder / "_build_info.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ""
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and any(isinstance(t, ast.Name) and t.id == "__torchversion__" for t in node.targets)
            and isinstance(node.value, ast.Constant)
        ):
            return str(node.value.value)
    return ""


def inspect() -> Status:
    """Presence, versions and the ABI match, from files alone: present, absent, or broken with a reason."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return Status("absent", remedy="pip install 'vllm-zen[zen]'")
    version = _installed_version(PACKAGE) or _installed_version("zentorch-weekly") or UNKNOWN
    torch_version = _installed_version("torch")
    built_for = _torch_it_was_built_for(Path(spec.origin).parent)
    status = Status("present", version, built_for, torch_version)
    if built_for and torch_version and _minor(built_for) != _minor(torch_version):
        return replace(
            status,
            state="broken",
            reason=f"built for torch {built_for}, but torch {torch_version} is installed",
            remedy=f"install {PACKAGE} for torch {_minor(torch_version)}, or pip uninstall {PACKAGE}",
        )
    return status


@functools.cache
def load() -> Status:
    """Imports zentorch once. A failure of any kind is a Status, said by the caller, never an exception."""
    status = inspect()
    if status.state != "present":
        return status
    release = PACKAGE if status.version == UNKNOWN else f"{PACKAGE}=={status.version}"
    remedy = f"pip install --force-reinstall --no-deps {release}, or pip uninstall {PACKAGE}"
    try:
        importlib.import_module(PACKAGE)
        missing = [op for op in REQUIRED_OPS if not hasattr(ops(), op)]
    except (Exception, SystemExit) as error:  # a broken native library raises whatever its loader likes
        first_line = str(error).strip().partition("\n")[0]
        return replace(status, state="broken", reason=f"{type(error).__name__}: {first_line}", remedy=remedy)
    if missing:
        return replace(status, state="broken", reason=f"it lacks the op {', '.join(missing)}", remedy=remedy)
    return replace(status, state="loaded")


def ops() -> Any:
    """The namespace torch.ops.zentorch. Empty until load() has succeeded."""
    import torch

    return torch.ops.zentorch


def supports_linear(dtype: Any) -> tuple[bool, str]:
    """Whether zentorch_linear_unary takes weights of this dtype here, and why not otherwise."""
    import torch

    status = load()
    if not status.usable:
        return False, status.describe()
    # float32, packed, against oneDNN on 2 Zen 3 cores (2048x2048 to 8192x2048): 1.0 to 2.0 times as fast at
    # M = 1 and 8, 0.8 to 0.9 times at M = 256. Decoding decides, and stock chooses the same on Zen.
    if dtype == torch.float32:
        return True, ""
    if dtype == torch.bfloat16:
        if torch.cpu.get_capabilities().get("avx512_bf16", False):
            return True, ""
        return False, "zentorch's bfloat16 kernels need AVX512-BF16, which this CPU does not report"
    return False, f"zentorch has no linear kernel for {dtype} here"


def prepack_agrees() -> tuple[bool, str]:
    """Whether ZenDNN's algorithm, as the environment sets it, reads packed weights; the reason if not."""
    algorithm = os.environ.get("ZENDNNL_MATMUL_ALGO", "").strip() or PREPACK_ALGORITHM
    if algorithm == PREPACK_ALGORITHM:
        return True, ""
    return False, (
        f"ZENDNNL_MATMUL_ALGO={algorithm} does not read packed weights; "
        f"unset it or set it to {PREPACK_ALGORITHM} to pack"
    )

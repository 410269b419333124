"""The kernel's text files below a root: what is missing or odd becomes a sentence, never an error.

Standard library only. host.py, cgroups.py and topology.py read through it, so that a test tree or a bug
report's copy of /proc and /sys describes its machine and not this one.
"""

import errno
import os
import re
from collections.abc import Iterable
from pathlib import Path

# Above any kernel's limit on CPUs (8192 on x86). A list beyond it is garbage, which must not fill the memory.
MAX_CPUS = 65536

# Of one file. Only mountinfo grows: a container host may have thousands of lines, a few hundred bytes each.
_MAX_BYTES = 16 * 2**20


class UnreadableError(Exception):
    """A file that gives no answer, with its path and why. `missing` is True where there is no such file.

    For the modules that read through KernelFiles; each catches it and notes what is unknown.
    """

    def __init__(self, path: str, why: str, missing: bool = False) -> None:
        super().__init__(f"{printable(path)}: {why}")
        self.path = path
        self.missing = missing


def parse_cpu_list(text: str) -> list[int]:
    """`0-3,8 10` to [0, 1, 2, 3, 8, 10]: ids and ranges, split by commas or spaces. Raises ValueError."""
    ids: set[int] = set()
    for part in re.split(r"[,\s]+", text.strip()):
        low, dash, high = part.partition("-")
        first = parse_integer(low)
        last = parse_integer(high) if dash else first
        if last < first:
            raise ValueError(f"{part!r} is not a range: it ends before it starts")
        if not 0 <= first <= last < MAX_CPUS:
            raise ValueError(f"{part!r}: CPU ids go from 0 to {MAX_CPUS - 1}")
        ids.update(range(first, last + 1))
    return sorted(ids)


def format_cpu_list(ids: Iterable[int]) -> str:
    """[0, 1, 2, 8] to `0-2,8`."""
    parts: list[list[int]] = []
    for cpu in sorted(set(ids)):
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in parts)


def parse_integer(text: str) -> int:
    """A decimal number as the kernel writes it: ASCII digits, no blanks, 64 bits. Raises ValueError."""
    # int() also takes 1_000, other scripts' digits and texts of any length.
    if re.fullmatch(r"-?[0-9]{1,20}", text) is None:
        raise ValueError(f"{shown(text)} is not a number")
    return int(text)


def shown(text: str) -> str:
    """Any text as a short literal that every terminal and log can take."""
    return ascii(text if len(text) <= 40 else f"{text[:40]}...")


class KernelFiles:
    """Reads below `root`. Paths are given and named as the described machine has them, without the root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._prefix = str(root).rstrip("/")
        self._unknown: dict[str, None] = {}

    @property
    def unknown(self) -> tuple[str, ...]:
        """What note() was told, each once."""
        return tuple(self._unknown)

    def note(self, what: str, why: object) -> None:
        """Remembers that something is unknown, and why (an UnreadableError or a sentence with the path)."""
        self._unknown.setdefault(f"{what}: {why}")

    def text(self, path: str) -> str:
        """The file's text without the last line's end. Raises UnreadableError."""
        try:
            with Path(self._prefix + path).open("rb") as file:
                return os.fsdecode(file.read(_MAX_BYTES)).rstrip("\n")
        except OSError as error:
            raise _unreadable(path, error) from None

    def integer(self, path: str) -> int:
        """The file's one number. Raises UnreadableError."""
        try:
            return parse_integer(self.text(path).strip())
        except ValueError as error:
            raise UnreadableError(path, str(error)) from None

    def cpu_list(self, path: str) -> list[int]:
        """The file's CPU list; an empty file is an empty list. Raises UnreadableError."""
        text = self.text(path)
        try:
            return parse_cpu_list(text) if text.strip() else []
        except ValueError:
            raise UnreadableError(path, f"{shown(text)} is not a CPU list") from None

    def fields(self, path: str, separator: str = " ") -> dict[str, str]:
        """The file's lines as first word to the rest. Raises UnreadableError."""
        pairs = (line.partition(separator) for line in self.text(path).split("\n"))
        return {key.strip(): value.strip() for key, _, value in pairs}

    def is_folder(self, path: str) -> bool:
        """Whether there is such a folder; False for names that no folder can have (too long, a null byte)."""
        return os.path.isdir(self._prefix + path)  # noqa: PTH112 - Path.is_dir() raises on some of them

    def names(self, path: str) -> list[str]:
        """The names in a folder, sorted. Raises UnreadableError."""
        try:
            return sorted(os.listdir(self._prefix + path))  # noqa: PTH208 - names are all that is asked
        except OSError as error:
            raise _unreadable(path, error) from None


def printable(path: str) -> str:
    """A path that every terminal and log can take; the path itself unless it has odd bytes."""
    return path if path.isascii() and path.isprintable() else ascii(path)[1:-1]


def _unreadable(path: str, error: OSError) -> UnreadableError:
    missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
    return UnreadableError(path, error.strerror or str(error), missing)

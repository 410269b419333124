"""Libraries worth preloading, where this system has them. Standard library only.

vLLM asks for an allocator and for Intel's OpenMP runtime. The second is left to the user: it leaves a file in
/dev/shm for every process that vLLM ends (docs/concepts/plan.md).
"""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

# Best first. The minimal tcmalloc has no profiler and no dependency.
ALLOCATORS = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
# What says that the user has one already.
ALLOCATOR_WORDS = ("tcmalloc", "jemalloc", "mimalloc")

FOLDERS = (
    Path(sys.prefix) / "lib",
    Path("/usr/lib/x86_64-linux-gnu"),
    Path("/usr/lib/aarch64-linux-gnu"),
    Path("/usr/lib64"),
    Path("/usr/local/lib"),
    Path("/usr/lib"),
)


def find(environ: Mapping[str, str], folders: Iterable[Path] = FOLDERS) -> tuple[str, ...]:
    """The whole new value of LD_PRELOAD, as a list: what the user preloads, and what is missing and found."""
    given = [path for path in environ.get("LD_PRELOAD", "").replace(" ", ":").split(":") if path]
    if any(word in Path(path).name for path in given for word in ALLOCATOR_WORDS):
        return tuple(given)
    places = tuple(folders)
    found = (folder / name for name in ALLOCATORS for folder in places if (folder / name).is_file())
    return tuple(given + [str(path) for path in list(found)[:1]])

"""Installations for child processes: fake packages and distributions, and real ones with parts left out.

What is tested runs in a child whose PYTHONPATH starts with the fakes, so that nothing is patched: the modules
find the fakes the way they would find a user's broken packages.
"""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import vllm_zen

PACKAGE = Path(vllm_zen.__file__).parent
CPUINFO = Path(__file__).parent / "data" / "cpuinfo"

# The feature bits of a Genoa, under torch's names.
GENOA = ("avx2", "avx512_f", "avx512_bw", "avx512_vl", "avx512_dq", "avx512_vnni", "avx512_bf16")


def distribution(
    folder: Path, name: str, version: str, entry_points: Mapping[str, Mapping[str, str]] | None = None
) -> Path:
    """Writes what importlib.metadata reads of an installed distribution. Returns the folder."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, entries in (entry_points or {}).items():
        lines += [f"[{group}]", *(f"{entry} = {value}" for entry, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


def package(folder: Path, name: str, code: str, **modules: str) -> Path:
    """Writes a package of one __init__.py and further modules. Returns the folder."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(code)
    for module, text in modules.items():
        (folder / name / f"{module}.py").write_text(text)
    return folder


def torch(
    folder: Path, features: Iterable[str] = GENOA, version: str = "2.13.0+cpu", ops: str = "object()"
) -> Path:
    """A torch that imports at once and has what activation and zentorch ask of it."""
    capabilities = dict.fromkeys(features, True)
    code = (
        "from types import SimpleNamespace\n"
        f"cpu = SimpleNamespace(get_capabilities=lambda: {capabilities!r})\n"
        f"ops = SimpleNamespace(zentorch={ops})\n"
        "float16, bfloat16, float32 = 'float16', 'bfloat16', 'float32'\n"
    )
    return distribution(package(folder, "torch", code), "torch", version)


def zentorch(folder: Path, code: str = "", built_for: str | None = None, version: str = "9.9.9.9") -> Path:
    """A zentorch whose __init__ runs the code; built for the installed torch unless another is named."""
    built_for = importlib.metadata.version("torch") if built_for is None else built_for
    build_info = f'__version__ = "{version}"\n__torchversion__ = "{built_for}"\n'
    return distribution(package(folder, "zentorch", code, _build_info=build_info), "zentorch", version)


def installation(folder: Path, without: Iterable[str] = ()) -> Path:
    """A folder of links to everything installed, less the packages and distributions named."""
    folder.mkdir()
    left_out = tuple(without)
    site_folders = [Path(path) for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    for site in site_folders:
        for entry in site.iterdir():
            name = entry.name.partition("-")[0] if entry.name.endswith(".dist-info") else entry.name
            link = folder / entry.name
            if name not in left_out and not link.exists() and not entry.name.startswith("__pycache__"):
                link.symlink_to(entry)
    return folder


def copy_with_library(folder: Path, content: bytes | None) -> Path:
    """A copy of the installed vllm_zen with another native library, or none. Returns the folder."""
    copy = folder / "vllm_zen"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    if content is not None:
        (copy / "libvllm_zen.so").write_bytes(content)
    return folder


def python(
    code: str,
    *paths: Path,
    site: bool = True,
    arguments: Iterable[str] = (),
    timeout: float = 120,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Runs code in a child that sees `paths` first and, with site=False, nothing else that is installed.

    The child's environment is this one's without what steers vLLM, plus the given variables.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("VLLM_", "ZENDNN", "PYTHON", "OMP_", "KMP_", "GOMP_", "TORCHINDUCTOR_"))
        and name not in ("LD_PRELOAD", "LOCAL_WORLD_SIZE", "NUMEXPR_MAX_THREADS")
    }
    search = {"PYTHONPATH": os.pathsep.join(map(str, paths))} if paths else {}
    fixed = {"PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return subprocess.run(
        [sys.executable, *([] if site else ["-S"]), "-c", code, *arguments],
        env=inherited | fixed | search | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def last_json(result: subprocess.CompletedProcess[str]) -> Any:
    """What a child printed as JSON on its last line. The test fails with its words when it ended badly."""
    assert result.returncode == 0, f"exit {result.returncode}\n{result.stdout}\n{result.stderr}"
    return json.loads(result.stdout.splitlines()[-1])


def ask(code: str, *paths: Path, **options: Any) -> Any:
    """Runs code as python() does, for what it prints as JSON on its last line."""
    return last_json(python(code, *paths, **options))

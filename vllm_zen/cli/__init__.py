"""The `vllm-zen` command: assembly and printing only. The logic is in the modules the commands name."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from vllm_zen import __version__, envs
from vllm_zen.cli import bench, quality, serving
from vllm_zen.errors import ZenError

SIGPIPE_STATUS = 128 + 13  # what a shell reports for a command the signal ended


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="vllm-zen",
        description="Tools of vllm-zen, the AMD Zen backend for vLLM.",
        epilog="environment variables:\n" + _variables_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"vllm-zen {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="say what is active, what fell back, why, and what to do")
    doctor.add_argument("model", nargs="?", help="a local model folder, to count what its output head costs")
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")
    doctor.add_argument("--live", metavar="URL", help="ask a running server instead of this machine")
    doctor.add_argument("--expected", type=float, metavar="TOK/S", help="with --live: what the plan expects")
    doctor.set_defaults(run=_doctor)

    serving.add_commands(commands)
    bench.add_commands(commands)
    quality.add_commands(commands)

    demo = commands.add_parser("demo-model", help="prepare the demo model if needed and print its path")
    demo.set_defaults(run=_demo_model)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Errors meant for people print without a traceback and exit 2."""
    own, servers = _split(list(sys.argv[1:] if argv is None else argv))
    arguments = build_parser().parse_args(own)
    arguments.server_arguments = servers
    try:
        run: Callable[[argparse.Namespace], int] = arguments.run
        return run(arguments)
    except ZenError as error:
        print(f"vllm-zen: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has enough; what is left to flush goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SIGPIPE_STATUS


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """What is for us, and what stands after -- for the servers that a benchmark starts."""
    if argv[:1] == ["bench"] and "--" in argv:
        at = argv.index("--")
        return argv[:at], argv[at + 1 :]
    return argv, []


def _variables_help() -> str:
    return "\n".join(
        f"  {variable.name} (default {variable.default})\n      {variable.meaning}"
        for variable in envs.VARIABLES
    )


def _doctor(arguments: argparse.Namespace) -> int:
    from vllm_zen import doctor, live

    if arguments.live:
        found = live.examine(arguments.live, arguments.expected)
    else:
        found = doctor.examine(model=arguments.model)
    rows = []
    for row in found:
        rows.append(row)
        if not arguments.json:
            print(row.to_text(), flush=True)
    if arguments.json:
        print(doctor.to_json(rows), flush=True)
    return doctor.exit_code(rows)


def _demo_model(_: argparse.Namespace) -> int:
    from vllm_zen import demo

    print(demo.prepare(envs.cache_dir()))
    return 0

"""`vllm-zen bench`."""

import argparse
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def add_commands(commands: Any) -> None:
    """Adds `bench` with its families to the parser's subcommands."""
    bench = commands.add_parser("bench", help="ours against stock vLLM on this machine")
    families = bench.add_subparsers(dest="family", required=True, metavar="FAMILY")
    serve = families.add_parser(
        "serve",
        help="a served model: TTFT, TPOT, ITL, throughput, memory",
        description="Starts both servers, runs vLLM's benchmark client against them in turn, and compares "
        "the runs pair by pair. What follows -- goes to both servers.",
    )
    what = serve.add_mutually_exclusive_group(required=True)
    what.add_argument("model", nargs="?", help="a local folder, or a hub id in the local cache")
    what.add_argument("--shape", metavar="NAME", help="a known shape with random weights, as llama-1b")
    serve.add_argument("--baseline", default="stock", help="stock (same threads) or stock-default")
    serve.add_argument("--concurrency", default="1,8", metavar="N,N", help="default 1,8")
    serve.add_argument("--input-len", type=int, default=256, metavar="TOKENS", help="default 256")
    serve.add_argument("--output-len", type=int, default=64, metavar="TOKENS", help="default 64")
    serve.add_argument("--pairs", type=int, default=5, metavar="N", help="runs of each side, default 5")
    serve.add_argument("--num-prompts", type=int, metavar="N", help="of one run; default 2 a client")
    serve.add_argument("--out", type=Path, metavar="DIR", help="default bench-results/DATE-TIME")
    serve.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for our side only")
    serve.add_argument("--json", action="store_true", help="print results.json instead of the table")
    serve.set_defaults(run=_bench_serve)


def _bench_serve(arguments: argparse.Namespace) -> int:
    from vllm_zen import checkpoint
    from vllm_zen.bench import report, serve, shapes
    from vllm_zen.errors import BenchmarkError

    try:
        concurrency = tuple(int(text) for text in arguments.concurrency.split(","))
        environment = dict(item.split("=", 1) for item in arguments.env)
    except ValueError:
        raise BenchmarkError("--concurrency takes numbers like 1,8,32, and --env NAME=VALUE") from None
    with tempfile.TemporaryDirectory(prefix="vllm-zen-shape-") as folder:
        if arguments.shape:
            model = shapes.build(arguments.shape, Path(folder) / arguments.shape)
        else:
            model = checkpoint.find(arguments.model)
        request = serve.Request(
            model=model,
            out=arguments.out or serve.default_folder(time.localtime()),
            baseline=arguments.baseline,
            concurrency=concurrency,
            input_len=arguments.input_len,
            output_len=arguments.output_len,
            pairs=arguments.pairs,
            prompts=arguments.num_prompts,
            dummy_weights=bool(arguments.shape),
            arguments=tuple(arguments.server_arguments),
            environment=environment,
        )
        results = serve.measure(request, lambda line: print(line, file=sys.stderr, flush=True))
        files = report.write(results, ["vllm-zen", *map(shlex.quote, sys.argv[1:])])
    print(files[1 if arguments.json else 0].read_text())
    print("written: " + " ".join(map(str, files)), file=sys.stderr)
    return 0

"""`vllm-zen bench`."""

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm_zen.cli.progress import say


def add_commands(commands: Any) -> None:
    """Adds `bench` with its families to the parser's subcommands."""
    bench = commands.add_parser("bench", help="ours against stock vLLM on this machine")
    kinds = bench.add_subparsers(dest="family", required=True, metavar="FAMILY")
    serve = kinds.add_parser(
        "serve",
        help="a served model: TTFT, TPOT, ITL, throughput, memory",
        description="Starts ours and stock vLLM's server, runs vLLM's benchmark client against them in turn, "
        "and compares the runs pair by pair. What follows -- goes to every server.",
    )
    what = serve.add_mutually_exclusive_group(required=True)
    what.add_argument("model", nargs="?", help="a local folder, or a hub id in the local cache")
    what.add_argument("--shape", metavar="NAME", help="a known shape with random weights, as llama-1b")
    baselines = "stock (same threads), stock-default or stock-nobind"
    serve.add_argument("--baseline", default="stock", metavar="NAME", help=baselines)
    serve.add_argument("--schemes", default="bf16", metavar="NAME,NAME", help="of ours, as bf16,int8,int4")
    serve.add_argument("--concurrency", default="1,8", metavar="N,N", help="default 1,8")
    serve.add_argument("--input-len", type=int, default=256, metavar="TOKENS", help="default 256")
    serve.add_argument("--output-len", type=int, default=64, metavar="TOKENS", help="default 64")
    serve.add_argument("--pairs", type=int, default=5, metavar="N", help="runs of each side, default 5")
    serve.add_argument("--num-prompts", type=int, metavar="N", help="of one run; default 2 a client")
    serve.add_argument("--out", type=Path, metavar="DIR", help="default bench-results/DATE-TIME")
    serve.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for our side only")
    serve.add_argument("--json", action="store_true", help="print results.json instead of the table")
    serve.set_defaults(run=_bench_serve)
    kernels = kinds.add_parser(
        "kernels",
        help="kernels: rates, beside the limit of the machine",
        description="Runs each piece of work with our kernels and with stock vLLM's in turn, checks that the "
        "outputs agree, and holds both against the read bandwidth or GEMM peak measured between them.",
    )
    kernels.add_argument(
        "--family", dest="kernel_family", choices=("attention", "linear", "moe"), required=True
    )
    kernels.add_argument("--only", default="", metavar="TEXT", help="points whose name contains it")
    kernels.add_argument("--pairs", type=int, default=5, metavar="N", help="runs of each side, default 5")
    kernels.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    kernels.add_argument("--plot", type=Path, metavar="FILE", help="write a plot of both against the limit")
    kernels.set_defaults(run=_bench_kernels)


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
            schemes=tuple(arguments.schemes.split(",")),
            concurrency=concurrency,
            input_len=arguments.input_len,
            output_len=arguments.output_len,
            pairs=arguments.pairs,
            prompts=arguments.num_prompts,
            dummy_weights=bool(arguments.shape),
            arguments=tuple(arguments.server_arguments),
            environment=environment,
        )
        results = serve.measure(request, say)
        files = report.write(results, ["vllm-zen", *map(shlex.quote, sys.argv[1:])])
    print(files[1 if arguments.json else 0].read_text())
    print("written: " + " ".join(map(str, files)), file=sys.stderr)
    return 0


def _bench_kernels(arguments: argparse.Namespace) -> int:
    # One thread a CPU that does not wander, as vLLM's worker has it. Before torch starts its threads.
    cpus = sorted(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(len(cpus)))
    os.environ.setdefault("GOMP_CPU_AFFINITY", " ".join(map(str, cpus)))
    from vllm_zen import host, ops
    from vllm_zen.bench import attention, kernels, linear, moe
    from vllm_zen.bench.serve import describe_machine
    from vllm_zen.errors import BenchmarkError

    native = ops.load()
    if not native.ok:
        raise BenchmarkError(f"no native kernels: {native.reason}. {native.remedy}.")
    every = list({"attention": attention, "linear": linear, "moe": moe}[arguments.kernel_family].grid())
    points = [point for point in every if arguments.only in point.name]
    if not points:
        names = "; ".join(point.name for point in every)
        raise BenchmarkError(f"--only {arguments.only!r} leaves no point. There are: {names}")
    machine_host, machine = host.read_host(), describe_machine()
    l3_bytes = (machine_host.l3_bytes or 0) * len(machine_host.l3_groups)
    rows, left_out = kernels.measure(points, l3_bytes, arguments.pairs, say)
    # OpenMP has bound this thread to one CPU by now, which is all that a question to the system would give.
    machine |= {"cpus": host.format_cpu_list(cpus), "isa": ops.isa(), "threads": str(len(cpus))}
    argv = ["vllm-zen", *map(shlex.quote, sys.argv[1:])]
    if arguments.json:
        results = {"command": argv, "machine": machine, "left_out": left_out}
        arguments.json.write_text(json.dumps({**results, "rows": [row.to_dict() for row in rows]}, indent=2))
    if arguments.plot:
        kernels.plot(rows, arguments.plot)
    print(kernels.markdown(rows, left_out, machine, argv))
    return 1 if left_out else 0

"""vllm-zen and stock vLLM in one interleaved run: build time with a warm cache, prefill, decode, memory.

    benchmarks/compare.py MODEL|SHAPE [--work BATCHxPROMPTxSTEPS ...] [--pairs 5] [--dtype bfloat16]
                          [--default-threads] [--engine JSON] [--env NAME=VALUE ...] [--json FILE]

Stock is the same vLLM with every plugin off (VLLM_PLUGINS="") and all cores computing, or, with
--default-threads, as many as it takes by itself. A shape, as qwen3-0.6b, runs with random weights.

Each side first runs once unmeasured, which fills its compile cache; then A B A B ... The ratio is taken pair
by pair, so that a machine whose speed drifts does not decide it. Nothing else should run meanwhile.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import astuple
from pathlib import Path
from typing import Any

from vllm_zen import cpu, host
from vllm_zen.bench import shapes
from vllm_zen.bench.statistics import compare

CHILD = Path(__file__).parent / "engine_child.py"
TIMEOUT_SECONDS = 900
SIDES = ("zen", "stock")
WORK = "1x512x64"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help=f"a folder or name, or one of {', '.join(shapes.SHAPES)}")
    parser.add_argument(
        "--work", action="append", type=parse_work, metavar="BATCHxPROMPTxSTEPS", help=f"default {WORK}"
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="for the zen side only"
    )
    parser.add_argument(
        "--engine", type=json.loads, default={}, help="more of vLLM's arguments, zen side only"
    )
    parser.add_argument("--default-threads", action="store_true", help="stock takes as many as it likes")
    parser.add_argument("--json", type=Path, help="write every measurement here")
    arguments = parser.parse_args()
    arguments.work = arguments.work or [parse_work(WORK)]
    return arguments


def parse_work(text: str) -> tuple[int, int, int]:
    batch, prompt_tokens, steps = (int(part) for part in text.split("x"))
    return batch, prompt_tokens, steps


def measure(arguments: argparse.Namespace, side: str, folder: Path) -> dict[str, float]:
    """Runs one engine of one side to its end and returns what it measured."""
    output = folder / "result.json"
    output.unlink(missing_ok=True)
    is_shape = arguments.model in shapes.SHAPES
    engine = {
        "model": str(folder) if is_shape else arguments.model,
        "load_format": "dummy" if is_shape else "auto",
        "dtype": arguments.dtype,
        "enforce_eager": arguments.enforce_eager,
        "max_model_len": max(prompt_tokens + steps for _, prompt_tokens, steps in arguments.work) + 64,
        "kv_cache_memory_bytes": 2**31,
        "disable_log_stats": True,
        "enable_prefix_caching": False,
    }
    if side == "zen":
        engine |= arguments.engine
    request = {"engine": engine, "works": arguments.work, "output": str(output)}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CACHE_ROOT": str(folder / side)}
    if side == "stock":
        environment["VLLM_PLUGINS"] = ""
        if not arguments.default_threads:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = host.format_cpu_list(host.allowed_cpus())
    else:
        environment.update(item.split("=", 1) for item in arguments.env)
    with (folder / f"{side}.log").open("ab") as log:
        subprocess.run(
            [sys.executable, str(CHILD), json.dumps(request)],
            env=environment,
            stdout=log,
            stderr=log,
            timeout=TIMEOUT_SECONDS,
            check=True,
        )
    result: dict[str, float] = json.loads(output.read_text())
    return result


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, float]]]:
    """The unmeasured first runs, then the pairs, with a line of progress for each."""
    if arguments.model in shapes.SHAPES:
        shapes.build(arguments.model, folder)
    results: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    began = time.monotonic()
    for pair in range(arguments.pairs + 1):
        for side in SIDES:
            result = measure(arguments, side, folder)
            if pair:
                results[side].append(result)
            done = "warm-up" if not pair else f"pair {pair}/{arguments.pairs}"
            print(f"{time.monotonic() - began:6.0f} s  {done:<10} {side}", file=sys.stderr, flush=True)
    return results


def described(key: str) -> tuple[str, str, float]:
    """What a measurement is called, its unit, and units in a second or byte."""
    fixed = {
        "import_s": ("vLLM imported", "s", 1.0),
        "build_s": ("engine built, warm cache", "s", 1.0),
        "worker_rss_bytes": ("worker's resident memory", "MiB", 2.0**-20),
    }
    return fixed.get(key) or (key, *(("s", 1.0) if key.startswith("prefill") else ("ms", 1e3)))


def table(results: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Median and range of each side, and of the ratio zen/stock pair by pair."""
    rows = []
    for key in next(iter(results.values()))[0]:
        name, unit, scale = described(key)
        zen, stock = ([result[key] * scale for result in results[side]] for side in SIDES)
        found = compare(name, unit, False, zen, stock)
        spreads = {"zen": found.ours, "stock": found.stock, "ratio": found.ratio}
        rows.append({"what": name, "unit": unit} | {of: astuple(spread) for of, spread in spreads.items()})
    return rows


def main() -> None:
    arguments = parse_arguments()
    info = cpu.read_cpuinfo()
    with tempfile.TemporaryDirectory(prefix="vllm-zen-bench-") as name:
        rows = table(run(arguments, Path(name)))
    print(f"{info.describe()}, {info.num_cpus} CPUs; {' '.join(sys.argv)}\n")
    print("| | vllm-zen | stock vLLM | ratio (min to max) |\n|---|---|---|---|")
    for row in rows:
        low, middle, high = row["ratio"]
        print(
            f"| {row['what']} | {row['zen'][1]:.4g} {row['unit']} | {row['stock'][1]:.4g} {row['unit']} "
            f"| {middle:.3f} ({low:.3f} to {high:.3f}) |"
        )
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"cpu": info.describe(), "argv": sys.argv, "rows": rows}, indent=2)
        )


if __name__ == "__main__":
    main()

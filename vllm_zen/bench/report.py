"""The results as a Markdown table, JSON and plots."""

import json
from pathlib import Path

from vllm_zen.bench.serve import STOCK, Results, describe_machine
from vllm_zen.bench.statistics import Comparison
from vllm_zen.errors import BenchmarkError
from vllm_zen.plots import load_pyplot

LABELS = {"zen": "vllm-zen", STOCK: "stock vLLM"}
COLORS = {"zen": "#c1272d", STOCK: "#5a5a5a"}
# Of ours with a scheme, in their order.
SCHEME_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#8c6d31")


def label(side: str) -> str:
    """What a side is called: `vllm-zen int8` for zen-int8."""
    return LABELS.get(side) or f"{LABELS['zen']} {side.removeprefix('zen-')}"


def _colors(results: Results) -> dict[str, str]:
    others = iter(SCHEME_COLORS)
    return {side: COLORS.get(side) or next(others) for side in results.sides}


def write(results: Results, argv: list[str]) -> list[Path]:
    """Writes report.md, results.json and the plots into the request's folder; returns the files."""
    out = results.request.out
    machine = describe_machine()
    (out / "results.json").write_text(
        json.dumps({"command": argv, "machine": machine, **results.to_dict()}, indent=2, default=str)
    )
    (out / "report.md").write_text(markdown(results, machine, argv))
    return [out / "report.md", out / "results.json", *plots(results)]


def markdown(results: Results, machine: dict[str, str], argv: list[str]) -> str:
    """One table for each concurrency and scheme."""
    request = results.request
    lines = [
        f"# {request.model.name}: vllm-zen against {request.baseline}",
        "",
        f"{machine['cpu']}, CPUs {machine['cpus']}; "
        + ", ".join(f"{name} {version}" for name, version in machine.items() if name not in ("cpu", "cpus")),
        f"`{' '.join(argv)}`: {request.input_len} tokens in, {request.output_len} out, {request.pairs} "
        f"interleaved pairs.",
        "",
    ]
    for side, line in results.startup_lines.items():
        lines += [f"{label(side)}: `{line or 'the Zen platform was not active'}`", ""]
    for concurrency in request.concurrency:
        lines += [f"## Concurrency {concurrency}", ""]
        for side in results.ours:
            lines += [*_table(label(side), results.comparisons(side, concurrency)), ""]
    peaks = ", ".join(f"{label(side)} {size / 2**20:.0f} MiB" for side, size in results.peak_memory.items())
    ready = ", ".join(f"{label(side)} {seconds:.0f} s" for side, seconds in results.ready_seconds.items())
    lines += [f"Peak memory, processes summed: {peaks}. Ready after: {ready}.", ""]
    return "\n".join(lines)


def _table(ours: str, rows: list[Comparison]) -> list[str]:
    lines = [f"| | {ours} | stock | ratio (min to max) | verdict |", "|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row.metric} | {row.ours.median:.4g} {row.unit} ({row.ours.low:.4g} to {row.ours.high:.4g}) "
            f"| {row.stock.median:.4g} {row.unit} ({row.stock.low:.4g} to {row.stock.high:.4g}) "
            f"| {row.ratio.median:.3f} ({row.ratio.low:.3f} to {row.ratio.high:.3f}) | {row.verdict} |"
        )
    return lines


def plots(results: Results) -> list[Path]:
    """throughput.png and tpot.png, or nothing where matplotlib is not installed (extra `bench`)."""
    try:
        pyplot = load_pyplot(BenchmarkError)
    except BenchmarkError:
        return []
    request = results.request
    figure, axes = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
    for side, color in _colors(results).items():
        values = [
            [run.metrics["output_throughput"] for run in results.of(side, c)] for c in request.concurrency
        ]
        middle = [sorted(of)[len(of) // 2] for of in values]
        spread = [
            [mid - min(of) for mid, of in zip(middle, values, strict=True)],
            [max(of) - mid for mid, of in zip(middle, values, strict=True)],
        ]
        axes.errorbar(
            request.concurrency,
            middle,
            yerr=spread,
            marker="o",
            capsize=4,
            color=color,
            label=label(side),
        )
    axes.set(xlabel="concurrent requests", ylabel="output tokens per second", title=request.model.name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(request.concurrency, [str(c) for c in request.concurrency])
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    throughput = request.out / "throughput.png"
    figure.savefig(throughput, dpi=120)
    pyplot.close(figure)
    return [throughput, _plot_tpot(results)]


def _plot_tpot(results: Results) -> Path:
    """The distribution of time per output token over requests, a panel for each concurrency."""
    from matplotlib import pyplot

    counts, colors = results.request.concurrency, _colors(results)
    width = 1.6 * len(colors) * len(counts) + 1
    figure, panels = pyplot.subplots(
        1, len(counts), figsize=(width, 4.2), squeeze=False, layout="constrained"
    )
    for axes, concurrency in zip(panels[0], counts, strict=True):
        values = [[tpot for run in results.of(side, concurrency) for tpot in run.tpots_ms] for side in colors]
        names = [label(side).replace(" ", "\n") for side in colors]
        boxes = axes.boxplot(values, tick_labels=names, patch_artist=True)
        for box, color in zip(boxes["boxes"], colors.values(), strict=True):
            box.set_facecolor(color)
            box.set_alpha(0.5)
        axes.set(title=f"{concurrency} concurrent", ylim=(0, None))
        axes.grid(axis="y", alpha=0.3)
    panels[0][0].set_ylabel("TPOT, ms")
    file = results.request.out / "tpot.png"
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
    return file

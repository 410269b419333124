"""`vllm-zen eval` and `vllm-zen quantize`."""

import argparse
from pathlib import Path
from typing import Any

from vllm_zen.cli.progress import say
from vllm_zen.quantization.settings import ALLOWED


def add_commands(commands: Any) -> None:
    """Adds both to the parser's subcommands."""
    evaluate = commands.add_parser(
        "eval",
        help="what quantization costs: perplexity, and agreement with bf16, on a text",
        description="Reads a text with every scheme and compares them with the first. Minutes a scheme.",
    )
    evaluate.add_argument("model", help="a local folder, or a hub id in the local cache")
    evaluate.add_argument(
        "--schemes",
        default="bf16,int8,int4",
        metavar="NAME,NAME",
        help="default bf16,int8,int4; also int4-g32, -g64",
    )
    evaluate.add_argument("--text", type=Path, metavar="FILE", help="default Newton's Opticks")
    evaluate.add_argument(
        "--tokens", type=int, default=20_480, metavar="N", help="of the text, default 20480"
    )
    evaluate.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    evaluate.add_argument("--plot", type=Path, metavar="FILE", help="write a plot")
    evaluate.set_defaults(run=_eval)
    quantize = commands.add_parser(
        "quantize",
        help="write a quantized checkpoint that stock vLLM loads too (compressed-tensors)",
        description="`--quantization zen_int8` and `zen_int4` need none: they quantize on load.",
    )
    quantize.add_argument("model", help="a local folder, or a hub id in the local cache")
    quantize.add_argument("out", type=Path, help="the folder to write, which must not exist")
    quantize.add_argument("--scheme", choices=("int8", "int4"), required=True)
    quantize.add_argument(
        "--group-size", type=int, choices=ALLOWED["group_size"], default=128, help="of int4, default 128"
    )
    quantize.add_argument("--report", action="store_true", help="print the error and size of every layer")
    quantize.set_defaults(run=_quantize)


def _eval(arguments: argparse.Namespace) -> int:
    from vllm_zen import checkpoint, evaluate
    from vllm_zen.errors import EvaluationError

    if arguments.tokens < 2:
        raise EvaluationError(f"--tokens {arguments.tokens} must be at least 2.")
    text = arguments.text or evaluate.default_text()
    if not text.is_file():
        raise EvaluationError(f"--text {text} is not a file.")
    model = str(checkpoint.find(arguments.model))
    scores = evaluate.evaluate(
        model,
        arguments.schemes.split(","),
        text,
        arguments.tokens,
        say,
    )
    if arguments.json:
        arguments.json.write_text(evaluate.to_json(scores))
    if arguments.plot:
        evaluate.plot(scores, arguments.plot)
    print(evaluate.markdown(scores, model, text))
    return 0


def _quantize(arguments: argparse.Namespace) -> int:
    from vllm_zen import checkpoint
    from vllm_zen.quantization import export

    layers = export.export(
        checkpoint.find(arguments.model),
        arguments.out,
        arguments.scheme,
        arguments.group_size,
        say,
    )
    if arguments.report:
        print(export.report(layers))
    print(arguments.out)
    return 0

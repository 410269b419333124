"""What quantization costs in quality: perplexity, and how often the likeliest token is that of bf16.

Each scheme is an engine in a process of its own, which reads the text in windows and asks vLLM for the
log-probabilities of its prompt:

python -m vllm_zen.evaluate REQUEST.json RESULT.json
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_zen.errors import EvaluationError
from vllm_zen.plots import load_pyplot
from vllm_zen.schemes import SCHEMES, unknown

# Tokens of a window: each is predicted from those before it in its window.
WINDOW = 1024
TOKENS = 20_480
# Isaac Newton's Opticks, in a package that vLLM depends on.
TEXT_PACKAGE, TEXT_FILE = "apache-tvm-ffi", "Isaac.Newton-Opticks.txt"


@dataclass(frozen=True)
class Score:
    """What one scheme makes of the text."""

    scheme: str
    perplexity: float
    ratio: float  # to the first scheme's
    agreement: float  # share of positions whose likeliest token is the first scheme's
    tokens: int


def default_text() -> Path:
    """The text that comes with the stack. Raises EvaluationError where it is not there."""
    try:
        files = metadata.files(TEXT_PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == TEXT_FILE:
            return Path(str(file.locate()))
    raise EvaluationError(
        f"{TEXT_FILE} of {TEXT_PACKAGE} is not installed; name a text of yours with --text."
    )


def evaluate(
    model: str, schemes: Sequence[str], text: Path, tokens: int, say: Callable[[str], None]
) -> list[Score]:
    """Measures every scheme on the same tokens. Raises EvaluationError for an unknown scheme or a failure."""
    if wrong := unknown(schemes):
        raise EvaluationError(wrong)
    results = []
    for number, scheme in enumerate(schemes, start=1):
        say(f"[{number}/{len(schemes)}] {scheme}: starting an engine")
        results.append(_in_a_process(model, scheme, text, tokens))
        say(f"[{number}/{len(schemes)}] {scheme}: perplexity {_perplexity(results[-1]):.3f}")
    first = results[0]
    return [
        Score(
            scheme,
            _perplexity(result),
            _perplexity(result) / _perplexity(first),
            sum(a == b for a, b in zip(result["likeliest"], first["likeliest"], strict=True))
            / len(first["likeliest"]),
            len(result["logprobs"]),
        )
        for scheme, result in zip(schemes, results, strict=True)
    ]


def _perplexity(result: dict[str, Any]) -> float:
    return math.exp(-sum(result["logprobs"]) / len(result["logprobs"]))


def _in_a_process(model: str, scheme: str, text: Path, tokens: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="vllm-zen-eval-") as folder:
        request, answer, log = (Path(folder) / name for name in ("request.json", "answer.json", "log.txt"))
        request.write_text(
            json.dumps({"model": model, "engine": SCHEMES[scheme], "text": str(text), "tokens": tokens})
        )
        with log.open("w") as output:
            subprocess.run(
                [sys.executable, "-m", "vllm_zen.evaluate", str(request), str(answer)],
                env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if not answer.exists():
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
            raise EvaluationError(f"the engine of {scheme} gave no answer. Its log ends:\n{tail}")
        result: dict[str, Any] = json.loads(answer.read_text())
        return result


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """The child: log-probabilities of the text's tokens, and the likeliest token at each place."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=request["model"],
        max_model_len=WINDOW + 1,
        max_num_batched_tokens=WINDOW + 1,
        max_num_seqs=1,
        kv_cache_memory_bytes=2**29,
        enable_prefix_caching=False,
        enforce_eager=True,
        **request["engine"],
    )
    text = Path(request["text"]).read_text(encoding="utf-8", errors="replace")
    ids = llm.get_tokenizer().encode(text)[: request["tokens"]]
    windows = [ids[at : at + WINDOW] for at in range(0, len(ids) - 1, WINDOW)]
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    logprobs, likeliest = [], []
    for window in windows:
        (output,) = llm.generate([{"prompt_token_ids": window}], sampling, use_tqdm=False)
        for token, entries in zip(window[1:], output.prompt_logprobs[1:], strict=True):
            logprobs.append(entries[token].logprob)
            likeliest.append(max(entries, key=lambda at: entries[at].logprob))
    return {"logprobs": logprobs, "likeliest": likeliest}


def markdown(scores: Sequence[Score], model: str, text: Path) -> str:
    """The table."""
    first = scores[0]
    lines = [
        f"{model}, {first.tokens} tokens of {text.name} in windows of {WINDOW}",
        "",
        f"| scheme | perplexity | against {first.scheme} | same likeliest token |",
        "|---|---|---|---|",
    ]
    lines += [f"| {s.scheme} | {s.perplexity:.3f} | {s.ratio - 1:+.2%} | {s.agreement:.1%} |" for s in scores]
    return "\n".join(lines)


def to_json(scores: Sequence[Score]) -> str:
    """The same for machines."""
    return json.dumps([asdict(score) for score in scores], indent=2)


def plot(scores: Sequence[Score], file: Path) -> None:
    """Bars of what each scheme adds to the perplexity. Raises EvaluationError without matplotlib."""
    pyplot = load_pyplot(EvaluationError)
    figure, axes = pyplot.subplots(figsize=(5, 1 + 0.4 * len(scores)), layout="constrained")
    axes.barh([s.scheme for s in scores], [100 * (s.ratio - 1) for s in scores], color="#c1272d")
    axes.invert_yaxis()
    axes.set(xlabel=f"perplexity above {scores[0].scheme}, %")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(_answer(json.loads(Path(sys.argv[1]).read_text()))))

"""Checkpoints of `vllm-zen quantize`, served by our kernels and by stock vLLM."""

import pytest

from vllm_zen import evaluate
from vllm_zen.quantization import export

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

# Some four hundred tokens of Newton's Opticks.
TEXT = evaluate.default_text().read_text(errors="replace")[20_000:21_600]
QUESTION = "The capital of France is"
STOCK = {"VLLM_PLUGINS": ""}
# Both run int8 activations, stock with a scale a token: its perplexity is no better than ours but by chance.
NEAR = 1.01
LINES = {"int8": "linear checkpoint's int8 (w8a8) x120,", "int4": "linear checkpoint's int4 g32 (w4a8) x120,"}


@pytest.fixture(scope="module")
def answers(generate_all, demo_model, tmp_path_factory, platform_environment):
    """Ours and stock's answers by scheme, and our log."""
    folder = tmp_path_factory.mktemp("prepared")
    requests = []
    for scheme in LINES:
        export.export(demo_model, folder / scheme, scheme, 32, lambda line: None)
        requests.append(
            {
                "engine": {"model": str(folder / scheme), "enforce_eager": True, "max_model_len": 2048},
                "prompts": [QUESTION, TEXT],
                "max_tokens": 4,
                "passes": 1,
                "prompt_logprobs": 0,
            }
        )
    ours, log = generate_all(folder, requests, **platform_environment)
    assert len(ours) == len(LINES), log[-3000:]
    stock, stock_log = generate_all(folder, requests, **STOCK)
    assert len(stock) == len(LINES), stock_log[-3000:]
    return dict(zip(LINES, zip(ours, stock, strict=True), strict=True)), log


@pytest.mark.parametrize("scheme", LINES)
def test_answers_are_those_of_stock(answers, scheme):
    """The same answer and no more perplexity than stock has with the same weights."""
    ours, stock = answers[0][scheme]
    assert ours["platform"] == "vllm_zen.platform.ZenCpuPlatform"
    assert stock["platform"].startswith("vllm.platforms.")
    assert ours["tokens"][0] == stock["tokens"][0]
    ratio = ours["perplexity"][1] / stock["perplexity"][1]
    assert ratio <= NEAR, f"{scheme}: {ratio:.4f} times the perplexity of stock"


@pytest.mark.parametrize("scheme", LINES)
def test_the_start_up_line_says_what_runs(answers, scheme):
    log = answers[1]
    assert LINES[scheme] in log, [line for line in log.splitlines() if "| linear" in line]


def test_the_precision_of_activations_is_said_once(answers):
    assert answers[1].count("VLLM_CPU_INT4_W4A8=0") == 1

"""A mixture of experts quantized on load: what it answers, and what the start-up line says."""

import pytest
from models import build_moe

from vllm_zen.schemes import SCHEMES

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PROMPT = "the a of to and in is it that was w1 w2 w3 w4 w50 w60 w70 w80 the a"
# The perplexity, about that of guessing among 2048 words, may differ by this factor either way: the model is
# random, so a loss in quality moves it as often down as up.
RUNS = {
    "bf16": ({}, 1.0, ""),
    "int8": (SCHEMES["int8"], 1.01, "zen_int8 (w8a8, rotated), experts int8, head int8 |"),
    "int4": (
        SCHEMES["int4-g32-zp"],
        1.1,
        "zen_int4 g32 zero points (w4a8), experts int4, head int8 |",
    ),
    "experts in bf16": (
        {
            "quantization": "zen_int8",
            "additional_config": {"vllm_zen": {"quantization": {"layers": {"*.experts": "bf16"}}}},
        },
        1.01,
        "zen_int8 (w8a8, rotated), experts bf16, head int8 |",
    ),
}


@pytest.fixture(scope="module")
def answers(generate_all, tmp_path_factory, platform_environment):
    """All engines in one process."""
    folder = tmp_path_factory.mktemp("experts")
    base = {"model": str(build_moe(folder / "model")), "enforce_eager": True}
    requests = [
        {
            "engine": {**base, **engine},
            "prompts": [PROMPT],
            "max_tokens": 4,
            "passes": 1,
            "prompt_logprobs": 0,
        }
        for engine, _, _ in RUNS.values()
    ]
    found, log = generate_all(folder, requests, **platform_environment)
    assert len(found) == len(RUNS), log[-3000:]
    return dict(zip(RUNS, found, strict=True)), log


@pytest.mark.parametrize("name", RUNS)
def test_the_model_is_the_same(answers, name):
    found, log = answers
    _, factor, line = RUNS[name]
    ratio = found[name]["perplexity"][0] / found["bf16"]["perplexity"][0]
    assert 1 / factor <= ratio <= factor
    assert line in log, [text for text in log.splitlines() if "| linear" in text]
    if name == "int8":
        assert ratio != 1.0 and found[name]["tokens"] == found["bf16"]["tokens"]

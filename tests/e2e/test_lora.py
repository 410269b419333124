"""A LoRA adapter on quantized layers: the answer of the merged weights, within the quantization error."""

import pytest
from models import build_adapter

from vllm_zen import evaluate, schemes

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

# Some 300 tokens of Newton's Opticks.
TEXT = evaluate.default_text().read_text(errors="replace")[20_000:21_200]
# An adapter that no error of a scheme could be taken for: it multiplies the perplexity by 2.7.
STRENGTH = 0.12
# The perplexity that a scheme may have, in that of the merged model in bf16, either way. A model shaken by a
# random adapter is quantized less well than the plain one.
LIMITS = {
    "bf16": 1.02,
    "int8": 1.06,
    "int4-g32-zp": 1.06,
}


@pytest.fixture(scope="module")
def perplexities(generate_all, demo_model, tmp_path_factory, platform_environment):
    """Of the plain and the merged model in bf16, and of the adapter on each scheme, in one process."""
    folder = tmp_path_factory.mktemp("lora")
    build_adapter(demo_model, folder / "adapter", folder / "merged", STRENGTH)
    base = {"enforce_eager": True, "max_model_len": 1024}
    common = {"prompts": [TEXT], "max_tokens": 1, "passes": 1, "prompt_logprobs": 0}
    requests = [
        {**common, "engine": {**base, "model": str(demo_model)}},
        {**common, "engine": {**base, "model": str(folder / "merged")}},
    ]
    with_adapter = {**base, "model": str(demo_model), "enable_lora": True, "max_lora_rank": 8}
    requests += [
        {**common, "engine": {**with_adapter, **schemes.SCHEMES[name]}, "adapter": str(folder / "adapter")}
        for name in LIMITS
    ]
    found, log = generate_all(folder, requests, **platform_environment)
    assert len(found) == len(requests), log[-3000:]
    return dict(zip(["plain", "merged", *LIMITS], (answer["perplexity"][0] for answer in found), strict=True))


def test_the_adapter_is_no_rounding_error(perplexities):
    assert perplexities["merged"] > 1.5 * perplexities["plain"]


@pytest.mark.parametrize("scheme", LIMITS)
def test_the_answer_is_that_of_the_merged_weights(perplexities, scheme):
    ratio = perplexities[scheme] / perplexities["merged"]
    assert 1 / LIMITS[scheme] <= ratio <= LIMITS[scheme], perplexities

"""Native attention under what vLLM does with its cache: chunks, reuse, preemption, speculation.

On a tiny model, against one run of the same prompts with a cache of their own and room for all.
"""

import pytest
from greedy import assert_equal_up_to_ties
from models import WORDS, build_llama

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

# Around the chunk size, the block size and the tiles of the cache (case T07).
LENGTHS = (1, 2, 31, 32, 33, 127, 128, 129, 511, 512, 513, 1030)
# The tiny model's logits are below 2, where bf16 values are 2^-7 apart: two of them round to a tie.
TIE = 2**-6
TOKENS = 16


def prompt(length: int, seed: int) -> str:
    """`length` words, each a token, that differ from seed to seed from the first on."""
    return " ".join(WORDS[(i * i + i // 7 + seed) % len(WORDS)] for i in range(length))


EDGES = [prompt(length, length) for length in LENGTHS]
SHARED = [f"{prompt(600, 5)} {prompt(9, seed)}" for seed in range(4)]
# Four blocks of 32 each, and soon five.
GROWING = [prompt(127, seed) for seed in range(20, 24)]
REPEATED = [" ".join(["to the a of in"] * 12), prompt(40, 3)]
PROMPTS = [*EDGES, *SHARED, *GROWING, *REPEATED]


# Each prompt in one piece, with its own blocks; in chunks of 512 and again from the cache (case T07); with a
# cache too small for all that has started; with drafts, which are checked as short queries.
RUNS = {
    "plain": (PROMPTS, {"max_num_batched_tokens": 2048}),
    "reuse": ([*EDGES, *SHARED], {"max_num_batched_tokens": 512, "enable_prefix_caching": True}),
    "preemption": (
        GROWING,
        {"block_size": 32, "num_gpu_blocks_override": 18, "max_model_len": 256, "disable_log_stats": False},
    ),
    "speculation": (
        REPEATED,
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}},
    ),
}


@pytest.fixture(scope="module")
def answers(generate_all, tmp_path_factory, platform_environment):
    """What each of the runs answered. All in one process, engine and worker included: one import of vLLM."""
    model = build_llama(tmp_path_factory.mktemp("model"))
    base = {"model": str(model), "enforce_eager": True, "max_model_len": 2048, "enable_prefix_caching": False}
    requests = [
        {"engine": {**base, **engine}, "prompts": prompts, "max_tokens": TOKENS, "passes": 2}
        for prompts, engine in RUNS.values()
    ]
    environment = {**platform_environment, "VLLM_ZEN_ATTENTION": "native"}
    found, log = generate_all(tmp_path_factory.mktemp("run"), requests, **environment)
    assert len(found) == len(RUNS), log[-3000:]
    assert log.count("| attention native |") == len(RUNS)
    return dict(zip(RUNS, found, strict=True))


@pytest.fixture(scope="module")
def plain(answers):
    run = answers["plain"]
    return dict(zip(PROMPTS, zip(run["tokens"], run["logprobs"], strict=True), strict=True))


def assert_as_plain(plain, prompts, tokens):
    expected = [plain[prompt] for prompt in prompts]
    assert_equal_up_to_ties(prompts, tokens, [t for t, _ in expected], [best for _, best in expected], TIE)


def test_chunks_and_prefix_reuse(answers, plain):
    run = answers["reuse"]
    prompts, _ = RUNS["reuse"]
    for tokens in run["passes"]:
        assert_as_plain(plain, prompts, tokens)
    # A reused prompt is cached up to its last full block of 128, but for the block of its last token.
    cached = run["cached"][1]
    assert cached[: len(LENGTHS)] == [(length - 1) // 128 * 128 for length in LENGTHS]
    assert min(cached[len(LENGTHS) :]) >= 512


def test_preemption(answers, plain):
    assert answers["preemption"]["preemptions"] > 0
    for tokens in answers["preemption"]["passes"]:
        assert_as_plain(plain, GROWING, tokens)


def test_speculative_decoding_gives_the_same_tokens(answers, plain):
    assert_as_plain(plain, REPEATED, answers["speculation"]["tokens"])

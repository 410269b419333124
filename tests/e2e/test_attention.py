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


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def run(generate_in, tmp_path_factory, model, platform_environment):
    def run(prompts, passes=1, **engine):
        settings = {"model": str(model), "enforce_eager": True, "max_model_len": 2048, **engine}
        environment = {**platform_environment, "VLLM_ZEN_ATTENTION": "native"}
        result = generate_in(
            tmp_path_factory.mktemp("run"), settings, prompts, TOKENS, passes=passes, **environment
        )
        assert result.returncode == 0, result.log[-3000:]
        assert "attention native" in result.log
        return result.answer

    return run


@pytest.fixture(scope="module")
def plain(run):
    """Each prompt in one piece, with its own blocks."""
    answer = run(PROMPTS, enable_prefix_caching=False, max_num_batched_tokens=2048)
    return dict(zip(PROMPTS, zip(answer["tokens"], answer["logprobs"], strict=True), strict=True))


def assert_as_plain(plain, prompts, tokens):
    expected = [plain[prompt] for prompt in prompts]
    assert_equal_up_to_ties(prompts, tokens, [t for t, _ in expected], [best for _, best in expected], TIE)


def test_chunks_and_prefix_reuse(run, plain):
    """Case T07: chunks of 512 and every prompt twice; the second time from the cache."""
    prompts = [*EDGES, *SHARED]
    answer = run(prompts, passes=2, enable_prefix_caching=True, max_num_batched_tokens=512)
    first, second = answer["passes"]
    assert_as_plain(plain, prompts, first)
    assert_as_plain(plain, prompts, second)
    # A reused prompt is cached up to its last full block of 128, but for the block of its last token.
    for length, cached in zip(LENGTHS, answer["cached"][1], strict=False):
        assert cached == (length - 1) // 128 * 128, length
    assert all(cached >= 512 for cached in answer["cached"][1][len(EDGES) :])


def test_preemption(run, plain):
    """A cache too small for all that has started: sequences are thrown out, and computed again."""
    answer = run(
        GROWING,
        enable_prefix_caching=False,
        block_size=32,
        num_gpu_blocks_override=18,
        max_model_len=256,
        disable_log_stats=False,
    )
    assert answer["preemptions"] > 0
    assert_as_plain(plain, GROWING, answer["tokens"])


def test_speculative_decoding_gives_the_same_tokens(run, plain):
    """Drafts are checked as short queries."""
    answer = run(
        REPEATED,
        speculative_config={"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3},
    )
    assert_as_plain(plain, REPEATED, answer["tokens"])

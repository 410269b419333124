"""Tensor, pipeline and data parallel on two cores: the tokens of one process, and cores of their own."""

import os
import re

import openai
import pytest
from greedy import assert_equal_up_to_ties
from models import build_llama
from servers import serve_demo, serving

from vllm_zen import host
from vllm_zen.schemes import SCHEMES

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two workers need two cores"),
]

PROMPTS = ["The capital of France is", "Once upon a time there was", "def fibonacci(n):"]
WORDS = ["the a of to", "w1 w2 w3", "in is it that was for on"]
TOKENS = 12
SMALL = {"enforce_eager": True, "kv_cache_memory_bytes": 2**26}

# As a server starts them: the engine in a process of its own, beside the workers.
PROCESSES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}

# Logits of the demo model are below 32, where bf16 values are 2^-3 apart at most.
TIE = 2**-3


def worker_cpus(log: str) -> list[list[int]]:
    """The CPU ids in each worker's start-up line, which only the Zen platform's worker writes."""
    lines = re.findall(r"vllm-zen \d\S*: .* \| \d+ threads on (\S+)", log)
    return [host.parse_cpu_list(cpus) for cpus in lines]


def assert_two_workers_on_cores_of_their_own(log: str) -> None:
    workers = worker_cpus(log)
    assert len(workers) == 2, log[-3000:]
    assert all(workers) and not set(workers[0]) & set(workers[1]), workers


@pytest.fixture(scope="module")
def reference(generate_in, demo_model, platform_environment, tmp_path_factory):
    """The demo model's tokens from a single worker."""
    folder = tmp_path_factory.mktemp("single")
    run = generate_in(folder, {"model": str(demo_model), **SMALL}, PROMPTS, TOKENS, **platform_environment)
    assert run.returncode == 0, run.log[-3000:]
    assert len(worker_cpus(run.log)) == 1
    return run.answer


@pytest.mark.timeout(900)  # two engines and, if it is the first to ask, the demo model's conversion
def test_pipeline_parallel(generate, demo_model, platform_environment, reference):
    engine = {"model": str(demo_model), "pipeline_parallel_size": 2, **SMALL}
    run = generate(engine, PROMPTS, TOKENS, **platform_environment, **PROCESSES)
    assert run.returncode == 0, run.log[-3000:]
    assert run.answer["platform"] == "vllm_zen.platform.ZenCpuPlatform"
    assert_two_workers_on_cores_of_their_own(run.log)
    assert_equal_up_to_ties(PROMPTS, run.answer["tokens"], reference["tokens"], reference["logprobs"], TIE)


# int4's groups of weights and activations are the same on either side of a split, which then only reorders
# float32 sums. A scale of int8 covers what a rank has, so a split rounds elsewhere: see rounding().
QUANTIZATIONS = {"": {}, "int4": SCHEMES["int4-g32"], "int8": SCHEMES["int8"]}


def rounding(quantized, exact):
    """By how much quantizing moves the best log-probability of a first token, at most, on either side."""
    return 2 * max(
        abs(a[0][0] - b[0][0]) for a, b in zip(quantized["logprobs"], exact["logprobs"], strict=True)
    )


@pytest.fixture(scope="module")
def unsplit(generate_all, tmp_path_factory, platform_environment):
    """A tiny random Llama on a single worker: the demo model's 9 attention heads cannot be split in two.

    In float32, so that what the split of a sum may change is far below the distance of two tokens.
    """
    folder = tmp_path_factory.mktemp("unsplit")
    engine = {"model": str(build_llama(folder / "model")), "dtype": "float32", **SMALL}
    engines = {name: {**engine, **scheme} for name, scheme in QUANTIZATIONS.items()}
    requests = [
        {"engine": engine, "prompts": WORDS, "max_tokens": TOKENS, "passes": 1} for engine in engines.values()
    ]
    answers, log = generate_all(folder, requests, **platform_environment)
    assert len(answers) == len(QUANTIZATIONS), log[-3000:]
    return engines, dict(zip(QUANTIZATIONS, answers, strict=True))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("quantization", ["", "int4", pytest.param("int8", marks=pytest.mark.full)])
def test_tensor_parallel(generate, platform_environment, unsplit, quantization):
    engines, answers = unsplit
    engine = {**engines[quantization], "tensor_parallel_size": 2}
    run = generate(engine, WORDS, TOKENS, **platform_environment, **PROCESSES)
    assert run.returncode == 0, run.log[-3000:]
    assert run.answer["platform"] == "vllm_zen.platform.ZenCpuPlatform"
    assert_two_workers_on_cores_of_their_own(run.log)
    single = answers[quantization]
    tie = rounding(single, answers[""]) if quantization == "int8" else 1e-4
    assert_equal_up_to_ties(WORDS, run.answer["tokens"], single["tokens"], single["logprobs"], tie)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_data_parallel(demo_model, platform_environment, reference, tmp_path):
    """Through the server: offline vLLM refuses data parallelism for dense models. Each engine is asked."""
    arguments = ["--data-parallel-size", "2", "--api-server-count", "1"]
    with serving(tmp_path, [*serve_demo(demo_model), *arguments], **platform_environment) as server:
        client = openai.OpenAI(base_url=server.url, api_key="none", timeout=120, max_retries=0)
        for engine in ("0", "1"):
            answer = client.completions.create(
                model="smollm2",
                prompt=PROMPTS,
                max_tokens=TOKENS,
                temperature=0,
                extra_body={"return_token_ids": True, "ignore_eos": True},
                extra_headers={"X-data-parallel-rank": engine},
            )
            tokens = [choice.token_ids for choice in sorted(answer.choices, key=lambda c: c.index)]
            assert_equal_up_to_ties(PROMPTS, tokens, reference["tokens"], reference["logprobs"], TIE)
        log = server.log.read_text(errors="replace")
    assert_two_workers_on_cores_of_their_own(log)

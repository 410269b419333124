"""Whole engines: the same tokens as stock vLLM, across restarts, and with parts missing or odd."""

import pytest
import torch
from greedy import assert_equal_up_to_ties
from models import build_llama

from vllm_zen import zentorch

pytestmark = pytest.mark.e2e

STOCK = {"VLLM_PLUGINS": ""}  # no plugin: vLLM's own choice, its in-tree zentorch path on a Zen CPU

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was",
    "def fibonacci(n):",
    "Water boils at a temperature of",
    "The three primary colours are",
    "A short list of fruits: apple,",
    "In 1969, the first people",
    "To make bread you need",
]


# Logits of the demo model are below 32, where bf16 values are 2^-3 apart at most.
TIE = 2**-3


@pytest.mark.timeout(900)  # two engines and, if it is the first to ask, the demo model's conversion
def test_greedy_tokens_equal_stock(generate, demo_model, platform_environment):
    """8 prompts of 64 tokens, eager, on native attention.

    They may differ only where stock's two best tokens tie in bf16.
    """
    engine = {"model": str(demo_model), "enforce_eager": True}
    ours = generate(engine, PROMPTS, 64, **platform_environment, VLLM_ZEN_ATTENTION="native")
    stock = generate(engine, PROMPTS, 64, **STOCK)
    assert ours.returncode == 0, ours.log[-3000:]
    assert stock.returncode == 0, stock.log[-3000:]
    assert ours.answer["platform"] == "vllm_zen.platform.ZenCpuPlatform"
    assert stock.answer["platform"].startswith("vllm.platforms.")
    assert "| attention native |" in ours.log
    assert all(len(tokens) == 64 for tokens in ours.answer["tokens"])
    assert_equal_up_to_ties(
        PROMPTS, ours.answer["tokens"], stock.answer["tokens"], stock.answer["logprobs"], TIE
    )


@pytest.mark.timeout(600)  # two engines
def test_a_warm_compile_cache_gives_the_same_tokens(generate, tmp_path, platform_environment):
    """The second start finds the first one's graph, and that graph its own packed weights."""
    supported = zentorch.supports_linear(torch.bfloat16)[0]
    dtype = "bfloat16" if supported else "float32"  # what zentorch runs here
    engine = {"model": str(build_llama(tmp_path / "model")), "dtype": dtype}
    cold = generate(engine, ["the a of to", "w1 w2 w3"], 16, **platform_environment)
    assert cold.returncode == 0, cold.log[-3000:]
    artifacts = list((tmp_path / "vllm-cache").rglob("torch_aot_compile/*/*/model"))
    assert artifacts, "nothing was stored: the second start would compile again and prove nothing"
    stored = {path: path.stat().st_mtime_ns for path in artifacts}

    warm = generate(engine, ["the a of to", "w1 w2 w3"], 16, **platform_environment)
    assert warm.returncode == 0, warm.log[-3000:]
    assert {
        path: path.stat().st_mtime_ns
        for path in (tmp_path / "vllm-cache").rglob("torch_aot_compile/*/*/model")
    } == stored
    assert warm.answer["tokens"] == cold.answer["tokens"]


@pytest.fixture(scope="module")
def float16_model(tmp_path_factory):
    return build_llama(tmp_path_factory.mktemp("float16"), torch.float16)


def test_a_float16_checkpoint_runs_in_bfloat16_with_a_notice(generate, float16_model, platform_environment):
    """Case T09, automatic dtype."""
    run = generate({"model": str(float16_model), "enforce_eager": True}, ["the a"], **platform_environment)
    assert run.returncode == 0, run.log[-3000:]
    assert run.answer["dtype"] == "torch.bfloat16"
    assert run.log.count("Falling back to torch.bfloat16") == 1


def test_float16_is_refused_before_weights_load(generate, float16_model, platform_environment):
    run = generate({"model": str(float16_model), "dtype": "float16"}, ["the a"], **platform_environment)
    assert run.returncode != 0
    assert "--dtype float16 is refused" in run.log
    assert "Loading weights" not in run.log and "Loading safetensors" not in run.log


def broken_zentorch(folder):
    package = folder / "zentorch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('no kernel for this moon phase')\n")
    return str(folder)


def test_a_broken_zentorch_is_one_warning_and_a_working_engine(
    generate, float16_model, tmp_path, platform_environment
):
    environment = {
        **platform_environment,
        "PYTHONPATH": broken_zentorch(tmp_path / "fake"),
        # An Intel CPU only: vLLM's attention uses AMX there, and dies unless zentorch has asked Linux for it.
        "VLLM_ZEN_ATTENTION": "native",
    }
    run = generate({"model": str(float16_model), "enforce_eager": True}, ["the a"], **environment)
    assert run.returncode == 0, run.log[-3000:]
    assert run.answer["platform"] == "vllm_zen.platform.ZenCpuPlatform"
    warnings = [
        line for line in run.log.splitlines() if "no kernel for this moon phase" in line and "WARNING" in line
    ]
    assert len(warnings) == 1, warnings
    assert "Way out:" in warnings[0]


def test_strict_mode_makes_it_an_error(generate, float16_model, tmp_path, platform_environment):
    environment = {
        **platform_environment,
        "PYTHONPATH": broken_zentorch(tmp_path / "fake"),
        "VLLM_ZEN_STRICT": "1",
    }
    run = generate({"model": str(float16_model), "enforce_eager": True}, ["the a"], **environment)
    assert run.returncode != 0
    assert "BrokenComponentError" in run.log and "VLLM_ZEN_STRICT=1" in run.log

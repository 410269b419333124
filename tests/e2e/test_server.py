"""The demo model through `vllm serve` and the real openai client."""

import json
import re
from pathlib import Path

import openai
import pytest

from vllm_zen import zentorch

pytestmark = pytest.mark.e2e

README = Path(__file__).parents[2] / "README.md"


def _ask_of_the_readme():
    """The body of README's curl command, for the model by the name it has here.

    The model is small: asked "What is the capital of France?", it finds two first words equally likely, in
    bfloat16, and one of them starts an endless answer. A question that ends up here needs a clear first word.
    """
    (body,) = re.findall(r"curl .*? -d '(\{.*?\})'", README.read_text(), re.DOTALL)
    return {**json.loads(body), "model": "smollm2"}


ASK = _ask_of_the_readme()
QUESTION = ASK["messages"]


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url, api_key="none", timeout=120, max_retries=0)


def test_the_readmes_question_is_answered(client):
    answer = client.chat.completions.create(**ASK)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


def test_the_answer_does_not_hang_by_rounding(client):
    """The first word of the answer leads by more than bfloat16 rounds: every CPU's kernels say the same."""
    answer = client.chat.completions.create(**ASK, logprobs=True, top_logprobs=2)
    first, second = answer.choices[0].logprobs.content[0].top_logprobs
    assert first.logprob - second.logprob > 0.5


def test_streaming_gives_the_same_text_in_pieces(client):
    whole = client.chat.completions.create(**ASK).choices[0].message.content
    chunks = list(client.chat.completions.create(**ASK, stream=True))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole
    assert sum(bool(piece) for piece in pieces) > 1


def test_usage_counts_are_right(client, demo_model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    expected = len(tokenizer(prompt, add_special_tokens=False).input_ids)
    usage = client.chat.completions.create(
        model="smollm2", messages=QUESTION, temperature=0, max_tokens=5
    ).usage
    assert usage.prompt_tokens == expected
    assert usage.completion_tokens == 5
    assert usage.total_tokens == expected + 5


def test_an_unknown_model_is_404(client):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="no-such-model", messages=QUESTION)


def test_a_prompt_above_the_limit_is_400(client):
    with pytest.raises(openai.BadRequestError, match="1024"):
        client.completions.create(model="smollm2", prompt="one " * 1100, max_tokens=1)


def test_the_log_says_what_is_active(server, platform_environment):
    """One start-up line, from the worker, with every part named."""
    attention = "| attention vllm" if platform_environment else "| attention native |"
    lines = [line for line in server.log.read_text().splitlines() if "vllm-zen 0" in line]
    assert len(lines) == 1
    zentorch_part = f"| {zentorch.load().describe()} |"
    for part in ("| isa ", zentorch_part, "| linear ", attention, " threads on "):
        assert part in lines[0], lines[0]

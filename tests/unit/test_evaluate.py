"""`vllm-zen eval` without an engine: schemes, the text, and what the figures say."""

import json
import math

import pytest

from vllm_zen import cli, evaluate
from vllm_zen.errors import EvaluationError


@pytest.fixture
def engines(monkeypatch):
    """Engines that answer at once: bf16 predicts tokens with 1/4, int8 with 1/5 and one other likeliest."""
    answers = {
        "bf16": {"logprobs": [math.log(1 / 4)] * 4, "likeliest": [1, 2, 3, 4]},
        "int8": {"logprobs": [math.log(1 / 5)] * 4, "likeliest": [1, 2, 3, 9]},
    }
    monkeypatch.setattr(evaluate, "_in_a_process", lambda model, scheme, text, tokens: answers[scheme])


def test_figures(engines, tmp_path):
    bf16, int8 = evaluate.evaluate("m", ["bf16", "int8"], tmp_path, 4, lambda line: None)
    assert bf16.perplexity == pytest.approx(4) and bf16.ratio == 1 and bf16.agreement == 1
    assert (
        int8.perplexity == pytest.approx(5) and int8.ratio == pytest.approx(1.25) and int8.agreement == 0.75
    )
    table = evaluate.markdown([bf16, int8], "m", tmp_path)
    assert "| int8 | 5.000 | +25.00% | 75.0% |" in table
    assert json.loads(evaluate.to_json([bf16, int8]))[1]["agreement"] == 0.75


@pytest.mark.parametrize("schemes", [["bf16", "int3"], []])
def test_unknown_schemes_are_refused(schemes, tmp_path):
    with pytest.raises(EvaluationError, match="allowed: bf16, int8, int4, int4-g32, int4-g64"):
        evaluate.evaluate("m", schemes, tmp_path, 4, lambda line: None)


def test_the_default_text_is_long_enough():
    assert len(evaluate.default_text().read_text(errors="replace").split()) > 20_000


def test_a_text_that_is_missing_is_refused(tmp_path, capsys):
    assert cli.main(["eval", "model", "--text", str(tmp_path / "no.txt")]) == 2
    assert "no.txt is not a file" in capsys.readouterr().err


def test_the_plot_is_written(engines, tmp_path):
    pytest.importorskip("matplotlib")
    scores = evaluate.evaluate("m", ["bf16", "int8"], tmp_path, 4, lambda line: None)
    evaluate.plot(scores, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 3000

"""Real engines and a real server, each in processes of their own that do not outlive the test."""

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import STARTUP_SECONDS, Server, serve_demo, serving, started

from vllm_zen import demo
from vllm_zen.bench import shapes
from vllm_zen.errors import DemoModelError

GENERATE = Path(__file__).parent / "generate.py"
ONE_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"


@dataclasses.dataclass(frozen=True)
class Run:
    """One finished engine process: 0 or 1 for whether it answered, its log, and what it answered."""

    returncode: int
    log: str
    answer: dict[str, Any]


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, converted into a cache folder of this session."""
    try:
        demo.source_gguf()
    except DemoModelError as error:
        pytest.skip(str(error))
    return demo.prepare(tmp_path_factory.mktemp("cache"))


def run_engines(folder: Path, requests: list[dict[str, Any]], **environment: str) -> tuple[list[Any], str]:
    """Runs generate.py in `folder`, which takes its log, its answers and vLLM's cache: answers and log.

    Worker included in its process unless the environment says otherwise: vLLM is imported once and not
    three times.
    """
    output, log = folder / "answers.json", folder / "log.txt"
    output.unlink(missing_ok=True)
    command = [sys.executable, str(GENERATE), json.dumps(requests), str(output)]
    with started(folder, command, **{ONE_PROCESS: "0", **environment}) as process:
        process.wait(timeout=STARTUP_SECONDS)
    answers = json.loads(output.read_text()) if output.exists() else []
    return answers, log.read_text(errors="replace")


def run_engine(
    folder: Path, engine: dict[str, Any], prompts: list[str], max_tokens: int = 8, **environment: str
) -> Run:
    """One engine of run_engines()."""
    request = {"engine": engine, "prompts": prompts, "max_tokens": max_tokens, "passes": 1}
    answers, log = run_engines(folder, [request], **environment)
    return Run(0 if answers else 1, log, answers[0] if answers else {})


@pytest.fixture
def generate(tmp_path: Path) -> Callable[..., Run]:
    """generate(engine, prompts, max_tokens, **environment): run_engine() in the test's own folder."""
    return functools.partial(run_engine, tmp_path)


@pytest.fixture(scope="session")
def generate_all() -> Callable[..., tuple[list[Any], str]]:
    """run_engines(), for several engines one after the other in one process."""
    return run_engines


@pytest.fixture(scope="session")
def generate_in() -> Callable[..., Run]:
    """run_engine(), for a run that several tests share."""
    return run_engine


@pytest.fixture(scope="session")
def server(
    demo_model: Path, platform_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """`vllm serve` with the demo model and the Zen platform."""
    with serving(
        tmp_path_factory.mktemp("server"), serve_demo(demo_model), **platform_environment
    ) as running:
        yield running


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The model and options of a server that is up as fast as one can be: two layers of random weights."""
    model = shapes.build("tiny", tmp_path_factory.mktemp("tiny"))
    options = ["--load-format", "dummy", "--enforce-eager", "--served-model-name", "tiny"]
    return [str(model), *options, "--max-model-len", "512"]

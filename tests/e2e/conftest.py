"""Real engines and a real server, each in processes of their own that do not outlive the test."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import BIN, STARTUP_SECONDS, Server, serving, stop

from vllm_zen import demo
from vllm_zen.bench import shapes
from vllm_zen.errors import DemoModelError

GENERATE = Path(__file__).parent / "generate.py"


@dataclasses.dataclass(frozen=True)
class Run:
    """One finished engine process: its exit code, its log, and what generate.py wrote, if it got there."""

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


@pytest.fixture
def generate(tmp_path: Path) -> Callable[..., Run]:
    """generate(engine, prompts, max_tokens, **environment): runs generate.py and returns its Run."""

    def run(engine: dict[str, Any], prompts: list[str], max_tokens: int = 8, **environment: str) -> Run:
        output, log = tmp_path / "answer.json", tmp_path / "log.txt"
        output.unlink(missing_ok=True)
        request = json.dumps({"engine": engine, "prompts": prompts, "max_tokens": max_tokens})
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, str(GENERATE), request, str(output)],
                env={**os.environ, "VLLM_CACHE_ROOT": str(tmp_path / "vllm-cache"), **environment},
                cwd=tmp_path,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(timeout=STARTUP_SECONDS)
            finally:
                stop(process)
        answer = json.loads(output.read_text()) if output.exists() else {}
        return Run(process.returncode, log.read_text(errors="replace"), answer)

    return run


@pytest.fixture(scope="session")
def server(
    demo_model: Path, platform_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """`vllm serve` with the demo model and the Zen platform, eager to spare the compile time."""
    command = [str(BIN / "vllm"), "serve", str(demo_model), "--host", "127.0.0.1", "--enforce-eager"]
    command += ["--max-model-len", "1024", "--kv-cache-memory-bytes", str(2**28)]
    command += ["--served-model-name", "smollm2"]
    with serving(tmp_path_factory.mktemp("server"), command, **platform_environment) as running:
        yield running


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The model and options of a server that is up as fast as one can be: two layers of random weights."""
    model = shapes.build("tiny", tmp_path_factory.mktemp("tiny"))
    options = ["--load-format", "dummy", "--enforce-eager", "--served-model-name", "tiny"]
    return [str(model), *options, "--max-model-len", "512"]

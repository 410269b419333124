"""Real engines and a real server, each in processes of their own that do not outlive the test."""

import contextlib
import dataclasses
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_zen import demo
from vllm_zen.errors import DemoModelError

STARTUP_SECONDS = 240
GENERATE = Path(__file__).parent / "generate.py"


@dataclasses.dataclass(frozen=True)
class Run:
    """One finished engine process: its exit code, its log, and what generate.py wrote, if it got there."""

    returncode: int
    log: str
    answer: dict[str, Any]


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and all that it started (its own session)."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sent)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
            if sent == signal.SIGKILL:
                return


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, converted into a cache folder of this session."""
    try:
        demo.source_gguf()
    except DemoModelError as error:
        pytest.skip(str(error))
    return demo.prepare(tmp_path_factory.mktemp("cache"))


def run_engine(
    folder: Path, engine: dict[str, Any], prompts: list[str], max_tokens: int = 8, **environment: str
) -> Run:
    """Runs generate.py in `folder`, which takes its log, its answer and vLLM's cache."""
    output, log = folder / "answer.json", folder / "log.txt"
    output.unlink(missing_ok=True)
    request = json.dumps({"engine": engine, "prompts": prompts, "max_tokens": max_tokens})
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, str(GENERATE), request, str(output)],
            env={**os.environ, "VLLM_CACHE_ROOT": str(folder / "vllm-cache"), **environment},
            cwd=folder,
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


@pytest.fixture
def generate(tmp_path: Path) -> Callable[..., Run]:
    """generate(engine, prompts, max_tokens, **environment): run_engine() in the test's own folder."""
    return functools.partial(run_engine, tmp_path)


@pytest.fixture(scope="session")
def generate_in() -> Callable[..., Run]:
    """run_engine(), for a run that several tests share."""
    return run_engine


@dataclasses.dataclass(frozen=True)
class Server:
    """A running OpenAI server."""

    url: str
    log: Path


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + STARTUP_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(
                f"the server ended with {process.returncode}:\n{log.read_text(errors='replace')[-4000:]}"
            )
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.5)
    pytest.fail(
        f"the server was not healthy in {STARTUP_SECONDS} s:\n{log.read_text(errors='replace')[-4000:]}"
    )


@contextlib.contextmanager
def serving(folder: Path, model: Path, *arguments: str, **environment: str) -> Iterator[Server]:
    """`vllm serve` in `folder`, eager to spare the compile time; `arguments` go to its command line."""
    port, log = free_port(), folder / "log.txt"
    command = [
        str(Path(sys.executable).parent / "vllm"),
        *("serve", str(model), "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"),
        *("--max-model-len", "1024", "--kv-cache-memory-bytes", str(2**28), "--served-model-name", "smollm2"),
        *arguments,
    ]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            env={**os.environ, "VLLM_CACHE_ROOT": str(folder / "cache"), **environment},
            cwd=folder,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            wait_until_healthy(process, f"http://127.0.0.1:{port}", log)
            yield Server(f"http://127.0.0.1:{port}/v1", log)
        finally:
            stop(process)


@pytest.fixture(scope="session")
def serve() -> Callable[..., contextlib.AbstractContextManager[Server]]:
    """serving(), for a server with arguments of its own."""
    return serving


@pytest.fixture(scope="session")
def server(
    demo_model: Path, platform_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """`vllm serve` with the demo model and the Zen platform."""
    with serving(tmp_path_factory.mktemp("server"), demo_model, **platform_environment) as running:
        yield running

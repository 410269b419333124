"""Real servers in processes of their own that do not outlive the test."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from vllm_zen.bench.server import free_port

STARTUP_SECONDS = 240
BIN = Path(sys.executable).parent
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (only listed)


@contextlib.contextmanager
def started(folder: Path, command: Sequence[str], **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command that runs in `folder`, which takes its log and vLLM's cache, and ends with the block."""
    with (folder / "log.txt").open("wb") as stream:
        process = subprocess.Popen(
            command,
            env={**os.environ, "VLLM_CACHE_ROOT": str(folder / "vllm-cache"), **environment},
            cwd=folder,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and all that it started (its own session)."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sent)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
            if sent == signal.SIGKILL:
                return


@dataclasses.dataclass(frozen=True)
class Server:
    """A running OpenAI server."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def text(self) -> str:
        """Its log so far."""
        return self.log.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """It and all that it started."""
        server = psutil.Process(self.process.pid)
        return [server, *server.children(recursive=True)]


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
def serving(folder: Path, command: Sequence[str], **environment: str) -> Iterator[Server]:
    """A server started by a command, to which its port is added, until it answers; its log in `folder`."""
    port, log = free_port(), folder / "log.txt"
    with started(folder, [*command, "--port", str(port)], **environment) as process:
        wait_until_healthy(process, f"http://127.0.0.1:{port}", log)
        yield Server(f"http://127.0.0.1:{port}/v1", log, process)


def serve_demo(model: Path) -> list[str]:
    """The command of `vllm serve` with the demo model, eager to spare the compile time."""
    command = [str(BIN / "vllm"), "serve", str(model), "--host", "127.0.0.1", "--enforce-eager"]
    command += ["--max-model-len", "1024", "--kv-cache-memory-bytes", str(2**28)]
    return [*command, "--served-model-name", "smollm2"]

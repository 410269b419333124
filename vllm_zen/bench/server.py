"""A server under test: started, warmed, put to sleep while the other one is measured, and ended."""

import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from vllm_zen.errors import BenchmarkError

START_TIMEOUT_SECONDS = 1800  # an 8B model compiled on two cores takes ten minutes
STOP_TIMEOUT_SECONDS = 20


@dataclass(frozen=True)
class Side:
    """What is compared: a name, the command without its port, and what it changes in the environment."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]


class Server:
    """One running side. Use as a context manager: every process it started ends with it."""

    def __init__(self, side: Side, log: Path) -> None:
        self.side, self.log = side, log
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Without the /v1."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "Server":
        with self.log.open("wb") as stream:
            self._process = subprocess.Popen(
                [*self.side.command, "--host", "127.0.0.1", "--port", str(self.port)],
                env={**os.environ, **self.side.environment},
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.resume()
        for sent in (signal.SIGTERM, signal.SIGKILL):
            self._signal(sent)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._running.wait(timeout=STOP_TIMEOUT_SECONDS)
                break
        self._signal(signal.SIGKILL)  # whatever of its session is left

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise BenchmarkError(f"the {self.side.name} server was not started")
        return self._process

    def _signal(self, sent: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._running.pid, sent)

    def pause(self) -> None:
        """Stops every process of it, so that its polling takes no time from the side that is measured."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets it go on."""
        self._signal(signal.SIGCONT)

    def wait_until_ready(self, tick: Callable[[float], None]) -> float:
        """Waits for /health, calling tick(seconds so far) meanwhile; returns the seconds it took.

        Raises BenchmarkError, with the last lines of its log, when it ends or is not ready in time.
        """
        began = time.monotonic()
        while (elapsed := time.monotonic() - began) < START_TIMEOUT_SECONDS:
            if self._running.poll() is not None:
                raise BenchmarkError(
                    f"the {self.side.name} server ended with {self._running.returncode}:\n{self.tail()}"
                )
            if self._is_healthy():
                return elapsed
            tick(elapsed)
            time.sleep(1)
        raise BenchmarkError(
            f"the {self.side.name} server was not ready in {START_TIMEOUT_SECONDS} s:\n{self.tail()}"
        )

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):  # noqa: S310 (our own server)
                return True
        except (OSError, http.client.HTTPException):
            return False

    def tail(self, lines: int = 20) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def peak_memory(self) -> int:
        """Bytes: the peaks of its processes' resident sets, summed. Shared pages count more than once."""
        processes = [psutil.Process(self._running.pid)]
        processes += processes[0].children(recursive=True)
        return sum(_high_water(process.pid) for process in processes)

    def startup_line(self) -> str:
        """What our platform said about itself, or empty."""
        found = re.search(r"vllm-zen \d\S*: .*\|.*", self.log.read_text(errors="replace"))
        return found.group(0) if found else ""


def _high_water(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def free_port() -> int:
    """A port of the loopback address that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_bounded(command: Sequence[str], log: Path, timeout: float) -> None:
    """Runs a command to its end with its output in a log. Raises BenchmarkError with the end of it."""
    with log.open("ab") as stream:
        try:
            done = subprocess.run(command, stdout=stream, stderr=stream, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            raise BenchmarkError(f"a run took over {timeout:.0f} s and was ended; its log is {log}") from None
    if done.returncode:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise BenchmarkError(f"the benchmark client ended with {done.returncode}:\n{end}")

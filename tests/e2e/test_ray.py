"""A pipeline over two machines through vLLM's own Ray executor.

As root the machines are two network namespaces, each with processes, shared memory and temporary files of its
own; otherwise two Ray nodes on this host, at two loopback addresses.
"""

import dataclasses
import importlib.util
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from greedy import assert_equal_up_to_ties

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.full,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra `ray` is not installed"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two machines need two cores"),
]

PROMPTS = ["The capital of France is", "Once upon a time there was", "def fibonacci(n):"]
TOKENS = 12
SMALL = {"enforce_eager": True, "kv_cache_memory_bytes": 2**26}
TIE = 2**-3  # see test_engine.py
PORT = 6379
SECONDS = 400
GENERATE = Path(__file__).parent / "generate.py"
RAY = Path(sys.executable).parent / "ray"

NAMESPACES = os.geteuid() == 0 and all(shutil.which(tool) for tool in ("ip", "unshare", "mount"))


@dataclasses.dataclass(frozen=True)
class Machine:
    """One of the two: its address, its core, and the folder of its log."""

    address: str
    core: int
    folder: Path
    temporary: Path
    namespace: str | None
    environment: dict[str, str]

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    def start(self, script: str) -> subprocess.Popen[bytes]:
        """Runs a shell script there. What it leaves behind ends with it, or with the marker's owner."""
        command = ["bash", "-euc", script]
        if self.namespace is not None:
            alone = (
                "ip link set lo up; mount -t tmpfs tmpfs /dev/shm; "
                f"mount -t tmpfs tmpfs {shlex.quote(str(self.temporary))}; {script}"
            )
            command = ["ip", "netns", "exec", self.namespace, "unshare", "--mount", "--pid", "--fork"]
            command += ["--kill-child", "--mount-proc", "bash", "-euc", alone]
        environment = {**os.environ, **self.environment, "VLLM_HOST_IP": self.address}
        environment.update(RAY_USAGE_STATS_ENABLED="0", RAY_DEDUP_LOGS="0", RAY_ADDRESS="")
        with self.log.open("wb") as stream:
            return subprocess.Popen(
                command,
                env=environment,
                cwd=self.folder,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ray(self, *arguments: str) -> str:
        """`ray start` on this machine's core, with one slot for a worker."""
        return shlex.join(
            [
                *("taskset", "-c", str(self.core), str(RAY), "start", f"--node-ip-address={self.address}"),
                *("--num-cpus=1", "--num-gpus=1", f"--object-store-memory={2**27}"),
                *("--disable-usage-stats", *arguments),
            ]
        )


def make_network(tag: str) -> list[str]:
    """Two namespaces joined by a cable, at 198.51.100.1 and .2 (a network reserved for documentation)."""
    names = [f"zen{tag}a", f"zen{tag}b"]
    for name in names:
        subprocess.run(["ip", "netns", "add", name], check=True)
    ends = [f"z{tag}a", f"z{tag}b"]
    cable = ["ip", "link", "add", ends[0], "netns", names[0], "type", "veth"]
    subprocess.run([*cable, "peer", "name", ends[1], "netns", names[1]], check=True)
    for number, (name, end) in enumerate(zip(names, ends, strict=True), start=1):
        inside = ["ip", "-n", name]
        subprocess.run([*inside, "addr", "add", f"198.51.100.{number}/24", "dev", end], check=True)
        subprocess.run([*inside, "link", "set", end, "up"], check=True)
    return names


def kill_marked(marker: str) -> None:
    """Ends what Ray started: its daemons leave the session they were started in."""
    for process in psutil.process_iter():
        try:
            if process.environ().get("ZEN_TEST_MARKER") == marker:
                process.kill()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


@pytest.fixture
def machines(tmp_path: Path, platform_environment: dict[str, str]) -> Iterator[list[Machine]]:
    """Two machines, and nothing left of them afterwards."""
    tag = secrets.token_hex(3)
    # Ray's sockets stand in here, and their paths are limited to 107 characters.
    temporary = Path(tempfile.mkdtemp(prefix="zen-", dir="/tmp"))
    names: list[str | None] = [None, None]
    try:
        if NAMESPACES:
            names = [*make_network(tag)]
        cores = sorted(os.sched_getaffinity(0))
        made = []
        for number, name in enumerate(names):
            folder = tmp_path / f"machine{number}"
            folder.mkdir()
            address = f"198.51.100.{number + 1}" if name else f"127.0.0.{number + 1}"
            environment = {**platform_environment, "ZEN_TEST_MARKER": tag}
            environment["VLLM_CACHE_ROOT"] = str(folder / "vllm-cache")
            made.append(Machine(address, cores[number], folder, temporary, name, environment))
        yield made
    finally:
        kill_marked(tag)
        for name in filter(None, names):
            subprocess.run(["ip", "netns", "delete", name], check=False)
        shutil.rmtree(temporary, ignore_errors=True)


def wait_for(path: Path, process: subprocess.Popen[bytes], log: Path, seconds: int) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"no {path.name}, exit status {process.poll()}:\n{log.read_text()[-6000:]}")
        time.sleep(0.5)


@pytest.mark.timeout(1200)
def test_a_pipeline_over_two_machines(
    machines, generate_in, demo_model, platform_environment, tmp_path, tmp_path_factory
):
    engine = {"model": str(demo_model), **SMALL}
    single = generate_in(tmp_path_factory.mktemp("single"), engine, PROMPTS, TOKENS, **platform_environment)
    assert single.returncode == 0, single.log[-3000:]

    engine.update(pipeline_parallel_size=2, distributed_executor_backend="ray")
    request = json.dumps({"engine": engine, "prompts": PROMPTS, "max_tokens": TOKENS})
    head, other = machines
    up, answer = tmp_path / "up", tmp_path / "answer.json"
    ask = shlex.join([sys.executable, str(GENERATE), request, str(answer)])
    start = head.ray("--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={head.temporary}")
    then = f"touch {shlex.quote(str(up))}; export RAY_ADDRESS={head.address}:{PORT}; timeout {SECONDS} {ask}"
    first = head.start(f"{start}; {then}")
    wait_for(up, first, head.log, 60)
    other.start(other.ray(f"--address={head.address}:{PORT}", "--block"))
    wait_for(answer, first, head.log, SECONDS)

    log = head.log.read_text(errors="replace")
    # A set: two Ray nodes that share a folder for temporary files each forward the logs of both.
    lines = set(re.findall(r"vllm-zen \d\S*: .* \| (\d+) threads on (\S+)", log))
    assert lines == {("1", str(machine.core)) for machine in machines}, log[-6000:]
    assert f"ip={other.address}" in log, "the second worker was not on the second machine"
    result = json.loads(answer.read_text())
    assert_equal_up_to_ties(
        PROMPTS, result["tokens"], single.answer["tokens"], single.answer["logprobs"], TIE
    )

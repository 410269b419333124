"""Situations people met in public reports, on this machine: quotas, pinned CPUs, odd topology tools.

Those that need a control group are skipped, visibly, where none can be made.
"""

import contextlib
import re
import sys
import threading
from pathlib import Path

import groups
import openai
import psutil
import pytest
from servers import BIN, serving

from vllm_zen import host

pytestmark = pytest.mark.e2e


def serve(tiny, *prefix):
    return [*prefix, str(BIN / "vllm-zen"), "serve", *tiny]


def compute_threads(server):
    """What the worker says: how many threads on which CPUs."""
    found = re.search(r"\| (\d+) threads on ([\d,-]+)", server.text())
    assert found, server.text()[-3000:]
    return int(found[1]), host.parse_cpu_list(found[2])


def ask(server, requests=1, tokens=8):
    client = openai.OpenAI(base_url=server.url, api_key="none", timeout=120)
    for number in range(requests):
        prompt = " ".join(f"w{number * 7 + i}" for i in range(200))
        answer = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=tokens, extra_body={"ignore_eos": True}
        )
        assert answer.usage.completion_tokens == tokens


def allowed_of_every_thread(server):
    """The CPUs each thread of each process may run on, together."""
    allowed = set()
    for process in server.processes():
        for status in Path(f"/proc/{process.pid}/task").glob("*/status"):
            with contextlib.suppress(OSError):  # a thread that has just ended
                text = status.read_text()
                allowed |= set(host.parse_cpu_list(re.search(r"Cpus_allowed_list:\s*(\S+)", text)[1]))
    return allowed


@pytest.mark.parametrize(
    "cpus", [1.5, pytest.param(1.0, marks=pytest.mark.full), pytest.param(0.5, marks=pytest.mark.full)]
)
def test_t01_a_time_quota_below_the_visible_cpus(tmp_path, tiny, platform_environment, cpus):
    """One thread, the file that says so, and hardly a period in which the threads are stopped."""
    with (
        groups.group("cpu") as group,
        serving(tmp_path, serve(tiny, *group.limit_cpu(cpus)), **platform_environment) as server,
    ):
        assert compute_threads(server)[0] == 1
        assert str(group.folder / "cpu.cfs_quota_us") in server.text()
        assert ("less than one CPU" in server.text()) is (cpus < 1)
        before = group.periods()
        ask(server, requests=20, tokens=100)
        periods, throttled = (after - was for after, was in zip(group.periods(), before, strict=True))
        assert periods > 0
        if cpus >= 1:
            # Threads beyond the quota are stopped in every busy period. A few stops are the API server's and
            # the machine's: 0 to 30 of 100 were seen.
            assert throttled / periods < 0.5, f"{throttled} of {periods} periods"


@pytest.mark.full
def test_t01_the_users_threads_win_with_a_warning(tmp_path, tiny, platform_environment):
    if len(host.allowed_cpus()) < 2:
        pytest.skip("two threads need two CPUs")
    first, second = host.allowed_cpus()[:2]
    with (
        groups.group("cpu") as group,
        serving(
            tmp_path,
            serve(tiny, *group.limit_cpu(1.0)),
            VLLM_CPU_OMP_THREADS_BIND=f"{first},{second}",
            **platform_environment,
        ) as server,
    ):
        assert compute_threads(server) == (2, [first, second])
        assert re.search(r"warning: .*2 compute threads, but the CPU time quota is 1 CPU", server.text())


@pytest.mark.full
def test_t02_a_cpuset_of_one(tmp_path, tiny, platform_environment):
    last = host.allowed_cpus()[-1]
    with (
        groups.group("cpuset") as group,
        serving(tmp_path, serve(tiny, *group.limit_cpuset(last)), **platform_environment) as server,
    ):
        ask(server)
        assert compute_threads(server) == (1, [last])
        assert allowed_of_every_thread(server) == {last}


@pytest.mark.full
def test_t02_two_servers_side_by_side(tmp_path, tiny, platform_environment):
    """Each pinned to a CPU of its own: no shared CPU, and memory for both."""
    if len(host.allowed_cpus()) < 2:
        pytest.skip("two servers need two CPUs")
    pins = host.allowed_cpus()[:2]
    with contextlib.ExitStack() as stack:
        servers = {}

        def start(cpu):
            folder = tmp_path / str(cpu)
            folder.mkdir()
            command = serve(tiny, sys.executable, str(Path(groups.__file__)), "--cpu", str(cpu), "--")
            servers[cpu] = stack.enter_context(serving(folder, command, **platform_environment))

        threads = [threading.Thread(target=start, args=(cpu,)) for cpu in pins]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(servers) == set(pins)
        for cpu, server in servers.items():
            ask(server)
            assert compute_threads(server) == (1, [cpu])
            assert allowed_of_every_thread(server) == {cpu}
        sizes = [int(re.search(r"--kv-cache-memory-bytes (\d+)", s.text())[1]) for s in servers.values()]
        assert sum(sizes) < psutil.virtual_memory().total


@pytest.mark.full  # tests/plugin/test_compat.py reads the host without any program
def test_t05_the_topology_tool_is_never_asked(tmp_path, tiny, platform_environment):
    """A stand-in for lscpu that notes the call and hangs; so absent, odd and slow ones are all one."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "lscpu").write_text(f"#!/bin/sh\necho asked >> {tmp_path}/asked\nsleep 60\n")
    (tools / "lscpu").chmod(0o755)
    path = f"{tools}:/usr/bin:/bin"
    with serving(tmp_path, serve(tiny), PATH=path, **platform_environment) as server:
        ask(server)
        threads, cpus = compute_threads(server)
        assert threads == len(cpus)
        assert set(cpus) <= set(host.allowed_cpus())
    assert not (tmp_path / "asked").exists()

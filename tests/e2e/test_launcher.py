"""`vllm-zen serve` for real: the plan applied, one signal ends it, nothing is left."""

import re
import signal
import time
from pathlib import Path

import openai
import psutil
import pytest
from servers import BIN, SHARED_MEMORY, serving

pytestmark = pytest.mark.e2e

STOP_SECONDS = 60  # the goal is 10; a busy test machine gets more


def ask(url: str) -> str:
    client = openai.OpenAI(base_url=url, api_key="none", timeout=120)
    answer = client.completions.create(model="tiny", prompt="w1 w2 w3", max_tokens=8, temperature=0)
    assert answer.usage.completion_tokens == 8
    return answer.choices[0].text


def shared_memory(processes: list[psutil.Process]) -> set[str]:
    """The files below /dev/shm that the processes have mapped."""
    files = {region.path for process in processes for region in process.memory_maps()}
    return {path for path in files if Path(path).is_relative_to(SHARED_MEMORY)}


def test_it_serves_by_its_plan_and_one_signal_ends_it(tmp_path, tiny, platform_environment):
    with serving(tmp_path, [str(BIN / "vllm-zen"), "serve", *tiny], **platform_environment) as server:
        ask(server.url)
        log = server.text()
        assert re.search(r"vllm-zen: threads: .*cores a rank", log)
        assert re.search(r"vllm-zen: KV cache: .* are usable", log)
        assert "vllm-zen 0" in log, "the platform is active"
        processes = server.processes()
        assert len(processes) >= 3, "the API server, the engine and a worker"
        mapped = shared_memory(processes)
        assert mapped, "vLLM's processes talk through shared memory"
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(timeout=STOP_SECONDS)
        _, alive = psutil.wait_procs(processes, timeout=STOP_SECONDS)
    assert alive == []
    assert [path for path in mapped if Path(path).exists()] == []


@pytest.mark.full
def test_a_request_in_flight_does_not_hold_it_up(tmp_path, tiny, platform_environment):
    with serving(tmp_path, [str(BIN / "vllm-zen"), "serve", *tiny], **platform_environment) as server:
        client = openai.OpenAI(base_url=server.url, api_key="none", timeout=120)
        stream = client.completions.create(
            model="tiny", prompt="w1", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        processes = server.processes()
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(processes, timeout=STOP_SECONDS)
        assert alive == [], f"still there after {time.monotonic() - began:.0f} s"

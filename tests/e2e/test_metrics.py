"""/metrics of a real server, the dashboard that reads them, and doctor's look at them."""

import json
import re
import urllib.request
from pathlib import Path

import openai
import pytest

from vllm_zen import live

pytestmark = pytest.mark.e2e

DASHBOARD = Path(__file__).parents[2] / "docs/grafana/vllm-zen.json"


@pytest.fixture(scope="module")
def samples(server):
    """After one request, so that every histogram has something."""
    client = openai.OpenAI(base_url=server.url, api_key="none", timeout=120)
    client.completions.create(model="smollm2", prompt="The sea is", max_tokens=8)
    return live.parse(live.fetch(server.url))


def test_what_runs_is_on_the_metrics_page(server, samples):
    [(labels, value)] = samples["vllm_zen_info"]
    assert value == 1
    assert labels["platform"] == "vllm_zen.platform.ZenCpuPlatform"
    line = next(line for line in server.text().splitlines() if "| isa " in line)
    assert f"| isa {labels['isa']} |" in line
    assert f"| linear {labels['linear']}" in line
    assert f"| {live.total(samples, 'vllm_zen_compute_threads'):.0f} threads on" in line
    assert live.total(samples, "vllm_zen_granted_cpus") > 0


def test_every_series_of_the_dashboard_exists(samples):
    dashboard = json.loads(DASHBOARD.read_text())
    targets = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    names = {name for expr in targets for name in re.findall(r"\b(?:vllm:|vllm_zen_)[a-z_]+", expr)}
    assert len(names) > 10
    assert sorted(name for name in names if name not in samples) == []


def test_doctor_reads_a_live_server(server):
    rows = list(live.examine(server.url))
    assert rows[0].name == "platform"
    assert rows[0].state == "ok"
    assert re.fullmatch(r"[\d.]+ tok/s a request since the start", rows[-1].detail)


def test_an_address_without_a_server_path_is_enough(server):
    with urllib.request.urlopen(f"{server.url.removesuffix('/v1')}/metrics", timeout=30) as answer:
        assert b"vllm_zen_info" in answer.read()

"""`vllm-zen bench serve` on a tiny model: real servers, vLLM's client, the report."""

import json
import os
import subprocess

import pytest
from servers import BIN

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_a_scheme_against_stock(tmp_path, platform_environment):
    out = tmp_path / "results"
    command = [str(BIN / "vllm-zen"), "bench", "serve", "--shape", "tiny"]
    command += ["--schemes", "int8", "--concurrency", "2", "--pairs", "1", "--out", str(out)]
    command += ["--input-len", "16", "--output-len", "4", "--", "--enforce-eager"]
    environment = {**os.environ, **platform_environment, "VLLM_CACHE_ROOT": str(tmp_path / "vllm")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((out / "results.json").read_text())
    assert list(results["sides"]) == ["zen-int8", "stock"]
    assert "linear zen_int8 (w8a8" in results["startup_lines"]["zen-int8"]
    assert len(results["runs"]) == 2 and all(size > 0 for size in results["peak_memory_bytes"].values())
    metrics = {row["metric"] for row in results["comparisons"]["zen-int8"]["2"]}
    assert {"output throughput", "TTFT, median", "TPOT, median"} <= metrics
    report = (out / "report.md").read_text()
    assert report in done.stdout
    assert "| | vllm-zen int8 | stock |" in report

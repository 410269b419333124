"""`doctor --live`: what a server's metrics say, and the likeliest reason of a low rate."""

import http.server
import threading

import examples
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from vllm_zen import host, live, metrics

EXPOSITION = """
vllm:num_requests_running{{engine="0"}} {running}
vllm:num_requests_waiting{{engine="0"}} {waiting}
vllm:num_preemptions_total{{engine="0"}} {preempted}
vllm:kv_cache_usage_perc{{engine="0"}} {usage}
vllm:request_time_per_output_token_seconds_sum{{engine="0"}} {tpot_sum}
vllm:request_time_per_output_token_seconds_count{{engine="0"}} {requests}
"""
ZEN = """
vllm_zen_info{{isa="zen4",linear="zentorch"}} 1
vllm_zen_compute_threads {threads}
vllm_zen_granted_cpus {granted}
vllm_zen_cpu_throttled_periods_total {throttled}
vllm_zen_cpu_periods_total 100
"""
CALM = {
    "running": 0,
    "waiting": 0,
    "preempted": 0,
    "usage": 0.1,
    "tpot_sum": 0.5,
    "requests": 10,
    "threads": 2,
    "granted": 2,
    "throttled": 0,
}


def judge(expected=None, zen=True, **changes):
    values = CALM | changes
    text = (EXPOSITION + (ZEN if zen else "")).format(**values)
    return list(live.judge(live.parse(text), expected))


def rate_of(rows):
    return next(row for row in rows if row.name == "rate")


def test_a_server_at_the_expected_rate():
    rows = judge(expected=21.0)
    assert [row.state for row in rows] == ["ok", "ok"]
    assert "isa zen4 | linear zentorch | 2 threads" in rows[0].detail
    assert rate_of(rows).detail == "20.0 tok/s a request since the start, 95% of the 21.0 expected"


def test_without_an_expectation_the_rate_is_reported():
    assert rate_of(judge()).state == "ok"
    assert "--expected" in rate_of(judge()).fix


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"throttled": 30, "waiting": 3}, "quota stopped it in 30%"),
        ({"threads": 4, "running": 8}, "4 threads on 2 CPUs wait"),
        ({"threads": 1, "granted": 8}, "1 threads on 8 CPUs leave most idle"),
        ({"preempted": 5}, "5 requests were put back"),
        ({"usage": 0.99}, "99% full"),
        ({"waiting": 3, "running": 4}, "3 requests wait"),
        ({"running": 8}, "8 requests share"),
        ({}, "other processes"),
    ],
    ids=["throttled", "too many threads", "too few", "preempted", "full", "queue", "batch", "unknown"],
)
def test_the_likeliest_reason_of_a_low_rate(changes, reason):
    row = rate_of(judge(expected=100.0, **changes))
    assert row.state == "warn"
    assert "20% of the 100.0 expected" in row.detail
    assert reason in row.detail.partition("likeliest:")[2]


def test_stock_vllm_is_said_to_be_stock():
    assert judge(zen=False)[0].state == "warn"
    assert "stock vLLM serves" in judge(zen=False)[0].detail


def test_a_server_that_has_answered_nothing():
    assert "no request" in rate_of(judge(requests=0, tpot_sum=0)).detail


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:1", "refused"),
        ("ftp://127.0.0.1", "not an http address"),
        ("file:///etc/passwd", "not an http address"),
        ("", "not an http address"),
        ("http://a b", "InvalidURL"),
    ],
)
def test_what_cannot_be_asked_is_a_row(url, words):
    [row] = live.examine(url)
    assert row.state == "fail"
    assert words in row.detail


@pytest.mark.parametrize("body", ["up 1\n", "<html>", "", "a{"])
def test_an_answer_that_is_no_vllm_is_a_row(body):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        [row] = live.examine(f"127.0.0.1:{server.server_port}")
    assert row.state == "fail"


# The collector


def collected(collector):
    registry = CollectorRegistry()
    registry.register(collector)
    return live.parse(generate_latest(registry).decode())


def test_what_the_collector_shows():
    collector = metrics.ZenCollector(examples.machine())
    collector.facts, collector.threads = {"isa": "ref"}, 2
    samples = collected(collector)
    assert samples["vllm_zen_info"] == [({"isa": "ref"}, 1.0)]
    assert live.total(samples, "vllm_zen_compute_threads") == 2
    assert live.total(samples, "vllm_zen_granted_cpus") == 2
    assert live.total(samples, "vllm_zen_cpu_throttled_seconds_total") == 0


@pytest.mark.parametrize(
    ("before", "after", "seconds"),
    [
        ("throttled_time 1000000000", "throttled_time 2500000000", 1.5),
        ("throttled_usec 500000", "throttled_usec 3000000", 2.5),
        ("garbage", "garbage", 0),
    ],
    ids=["v1", "v2", "odd"],
)
def test_throttling_counts_from_the_servers_start(tmp_path, before, after, seconds):
    stat = tmp_path / "group/cpu.stat"
    stat.parent.mkdir()
    stat.write_text(f"nr_periods 10\nnr_throttled 2\n{before}\n")
    machine = examples.machine(quota=host.Limit(1.5, "/group/cpu.max"))
    collector = metrics.ZenCollector(machine, tmp_path)
    stat.write_text(f"nr_periods 30\nnr_throttled 7\n{after}\n")
    samples = collected(collector)
    assert live.total(samples, "vllm_zen_cpu_throttled_seconds_total") == seconds
    if seconds:
        assert live.total(samples, "vllm_zen_cpu_periods_total") == 20
        assert live.total(samples, "vllm_zen_cpu_throttled_periods_total") == 5
    assert live.total(samples, "vllm_zen_granted_cpus") == 1.5


def test_a_second_engine_of_the_process_replaces_the_first():
    import torch

    metrics.publish(None, "native", torch.bfloat16)
    metrics.publish("some", "vllm", torch.float32)
    assert live.parse(generate_latest().decode())["vllm_zen_info"][0][0]["quantization"] == "some"

"""What `vllm-zen serve` would start, for hosts, arguments and environments that are not this one's."""

import dataclasses

import examples
import pytest

from vllm_zen import serve
from vllm_zen.bench import shapes
from vllm_zen.errors import EnvironmentVariableError, PlanError, UnsupportedError

BIND = "VLLM_CPU_OMP_THREADS_BIND"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(shapes.build("tiny", tmp_path_factory.mktemp("model")))


def prepare(model, *arguments, machine=None, **environ):
    return serve.prepare(model, arguments, machine or examples.machine(), environ)


def value(launch, option):
    return launch.command[launch.command.index(option) + 1]


def test_the_plan_is_applied(model):
    launch = prepare(model)
    assert launch.environment[BIND] == "0-1"
    assert value(launch, "--host") == "127.0.0.1"
    assert int(value(launch, "--kv-cache-memory-bytes")) > 0
    assert value(launch, "--max-model-len") == "32768"
    assert model in launch.command
    assert launch.warned == []
    assert any("threads" in line for line in launch.said)


def test_everything_else_reaches_vllm_as_it_is(model):
    given = [
        "--served-model-name",
        "m",
        "--enable-auto-tool-choice",
        "--override-generation-config",
        '{"a": 1}',
    ]
    assert prepare(model, *given).command[-5:] == given


@pytest.mark.parametrize(
    ("given", "absent"),
    [
        (["--max-model-len", "1k"], "--max-model-len"),
        (["--max_model_len=1K"], "--max-model-len"),
        (["--max-model-len", "auto"], "--max-model-len"),
        (["--kv-cache-memory-bytes", "1G"], "--kv-cache-memory-bytes"),
        (["--gpu-memory-utilization", "0.5"], "--kv-cache-memory-bytes"),
        (["--host", "127.0.0.1"], "--host"),
        (["--uds", "/tmp/socket"], "--host"),  # noqa: S108
    ],
    ids=" ".join,
)
def test_what_the_user_set_is_not_set_again(model, given, absent):
    ours = prepare(model, *given).command[: -len(given)]
    assert absent not in ours


def test_the_users_threads_and_cache_stay(model):
    launch = prepare(model, **{BIND: "1", "VLLM_CPU_KVCACHE_SPACE": "2"})
    assert BIND not in launch.environment
    assert "--kv-cache-memory-bytes" not in launch.command


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4096", 4096),
        ("4k", 4000),
        ("4K", 4096),
        ("1.5K", 1536),
        ("2m", 2 * 10**6),
        ("auto", None),
        ("-1", None),
    ],
)
def test_numbers_as_vllm_writes_them(text, number):
    assert serve.count(text) == number


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example"])  # noqa: S104
def test_an_open_address_without_a_key_is_warned_about(model, host):
    assert "no --api-key" in prepare(model, "--host", host).warned[0]
    assert prepare(model, "--host", host, "--api-key", "k").warned == []
    assert prepare(model, "--host", host, VLLM_API_KEY="k").warned == []


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.1.2.3"])
def test_a_loopback_address_needs_no_key(model, host):
    assert prepare(model, "--host", host).warned == []


T04 = {
    BIND: ["0-31", "1-", "abc", "0|1", "1-0", "0-1-2", "-1"],
    "VLLM_CPU_NUM_OF_RESERVED_CPU": ["2", "9", "-1", "one"],
    "VLLM_CPU_KVCACHE_SPACE": ["4GB", "-1", "0", "1e6", "99999"],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in T04.items() for text in texts])
def test_wrong_values_are_refused_with_the_name_and_the_value(model, name, text):
    """Case T04."""
    with pytest.raises(EnvironmentVariableError) as refused:
        prepare(model, **{name: text})
    assert f"{name}={text!r}" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "taken"), [("auto ", "auto"), ("", "auto"), ("0,0", "0"), (" nobind", "nobind"), ("0, 1", "0-1")]
)
def test_harmless_mistakes_are_corrected_with_a_warning(model, text, taken):
    launch = prepare(model, **{BIND: text})
    assert launch.environment[BIND] == ("0-1" if taken == "auto" else taken)
    assert repr(text) in launch.warned[0]


@pytest.mark.parametrize("text", ["nobind", "auto", "0", "0-1", "0,1"])
def test_right_values_are_taken_without_a_word(model, text):
    assert prepare(model, **{BIND: text}).warned == []


def test_a_model_that_cannot_be_read_is_served_without_a_plan(tmp_path):
    launch = prepare(str(tmp_path / "nothing"))
    assert "no plan" in launch.warned[0]
    assert "--kv-cache-memory-bytes" not in launch.command


def test_a_model_that_cannot_fit_is_refused_with_numbers(model):
    with pytest.raises(PlanError, match=r"weights 0\.00 GiB.*0\.50 GiB are usable"):
        prepare(model, machine=examples.machine(memory=0.5))


def test_ranks_over_numa_nodes(model):
    launch = prepare(model, machine=examples.machine(nodes=2, cores_per_node=8))
    assert value(launch, "--tensor-parallel-size") == "2"
    assert launch.environment[BIND] == "0-6|8-14"
    asked = prepare(model, "-pp", "2", machine=examples.machine(nodes=2, cores_per_node=8))
    assert "--tensor-parallel-size" not in asked.command


def test_one_of_several_servers_is_said(model):
    launch = prepare(model, machine=examples.machine(nodes=2, sockets=2, cores_per_node=8))
    assert "one of 2 servers" in launch.warned[0]


def test_bad_options_of_ours_are_refused(model):
    with pytest.raises(UnsupportedError, match="pack_tied_heads"):
        prepare(model, "--additional-config", '{"vllm_zen": {"pack_tied_heads": true}}')
    with pytest.raises(PlanError, match="no JSON"):
        prepare(model, "--additional-config", "{")


def test_the_command_can_be_pasted(model):
    launch = dataclasses.replace(prepare(model), environment={"A": "b c"}, command=["vllm", "x y"])
    assert launch.to_text() == "env 'A=b c' vllm 'x y'"

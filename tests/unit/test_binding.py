"""vLLM's CPU variables: case T04's whole list, and the corrected thread default (T01, T03)."""

import multiprocessing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import GIB

from vllm_zen import binding, host
from vllm_zen.errors import EnvironmentVariableError, UnsupportedError

TWO = [0, 1]

FILE = "/sys/fs/cgroup/a/cpu.max"


def machine(cpus=(0, 1), quota=None, memory_limit=None, threads=1):
    """A host of these CPUs on one node, 24 GiB; with two threads, the CPUs are pairs of siblings."""
    cores = tuple(tuple(cpus[start : start + threads]) for start in range(0, len(cpus), threads))
    return host.Host(
        cpus=tuple(cpus),
        cores=cores,
        l3_groups=(tuple(cpus),),
        l3_bytes=None,
        nodes=(host.Node(0, tuple(cpus), 24 * GIB),),
        sockets=(tuple(cpus),),
        quota=None if quota is None else host.Limit(quota, FILE),
        memory_total=24 * GIB,
        memory_available=20 * GIB,
        memory_limit=None if memory_limit is None else host.Limit(memory_limit, "/sys/fs/cgroup/memory.max"),
        shm_bytes=None,
        huge_pages="madvise",
        mbind=None,
        unknown=(),
    )


@pytest.fixture(autouse=True)
def first_engine(monkeypatch):
    """No test inherits what an earlier one made apply() write."""
    monkeypatch.setattr(binding, "_written", {})


def bind(value, ranks=1, allowed=TWO):
    return binding.check_binding({binding.BIND: value}, ranks, allowed)


@pytest.mark.parametrize("value", ["auto", "nobind", "0", "1", "0,1", "0-1"])
def test_right_values_stay(value):
    assert bind(value) == []


@pytest.mark.parametrize(
    ("value", "meant"),
    [("auto ", "auto"), ("", "auto"), (" nobind", "nobind"), ("0,0", "0"), ("0, 1", "0-1"), ("0-1,1", "0-1")],
)
def test_harmless_mistakes_are_corrected_with_a_line(value, meant):
    [correction] = bind(value)
    assert (correction.name, correction.value) == (binding.BIND, meant)
    assert repr(value) in correction.why and repr(meant) in correction.why


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("0-31", "names CPUs 2-31, but this process may use 0-1 only"),
        ("1-", "'1-' is neither a CPU id nor a range"),
        ("abc", "'abc' is neither a CPU id nor a range"),
        ("-1", "'-1' is neither a CPU id nor a range"),
        ("0,,1", "'' is neither a CPU id nor a range"),
        ("0|1", "holds 2 CPU lists for 1 workers"),
        ("1-0", "the range '1-0' runs backwards. Write 0-1"),
        ("AUTO", "'AUTO' is neither a CPU id nor a range"),
        ("\u0661", "is neither a CPU id nor a range"),
        ("0-99999999999", "names CPUs 0-99999999999, but this process may use 0-1 only"),
        ("65536", "names CPUs 65536, but"),
        ("9" * 5000, "is neither a CPU id nor a range"),
    ],
)
def test_wrong_values_are_refused_with_the_value_and_the_way_out(value, words):
    with pytest.raises(EnvironmentVariableError) as refused:
        bind(value)
    message = str(refused.value)
    assert words in message and repr(value) in message and len(message.splitlines()) == 1
    assert "Unset it" in message or "Write" in message or "Use those" in message


def test_one_list_a_worker():
    assert bind("0|1", ranks=2) == []
    with pytest.raises(EnvironmentVariableError, match="holds 1 CPU lists for 2 workers"):
        bind("0-1", ranks=2)


@pytest.mark.parametrize("value", ["2", "9", "-1", "one", "", "1.5"])
def test_wrong_reserved_counts_are_refused(value):
    with pytest.raises(EnvironmentVariableError, match="whole number from 0 to 1"):
        binding.check_reserved({binding.RESERVED: value}, cores=2)


@pytest.mark.parametrize("environ", [{}, {binding.RESERVED: "0"}, {binding.RESERVED: "1"}])
def test_right_reserved_counts_pass(environ):
    binding.check_reserved(environ, cores=2)


@pytest.mark.parametrize("value", ["4GB", "-1", "0", "1e6", "25", "0.5", "four"])
def test_wrong_kv_spaces_are_refused(value):
    with pytest.raises(EnvironmentVariableError, match="whole number of GiB, without a unit, from 1 to 24"):
        binding.check_kv_space({binding.KV_SPACE: value}, 24 * 2**30)


@pytest.mark.parametrize(
    "environ", [{}, {binding.KV_SPACE: ""}, {binding.KV_SPACE: "1"}, {binding.KV_SPACE: "24"}]
)
def test_right_kv_spaces_pass(environ):
    binding.check_kv_space(environ, 24 * 2**30)


@pytest.mark.parametrize(
    ("cores", "quota", "value"),
    [
        ([0, 1], None, "0-1"),
        ([0, 1, 2, 3], None, "0-3"),
        ([4, 6], None, "4,6"),
        ([0, 1], 1.0, "0"),
        ([0, 1], 1.5, "0"),
        ([0, 1], 0.5, "0"),
        ([0, 1], 2.0, "0-1"),
        (list(range(96)), 8.0, "0-7"),
    ],
)
def test_the_default_is_corrected_on_few_cores_and_under_a_quota(cores, quota, value):
    limit = None if quota is None else host.Limit(quota, FILE)
    [correction] = binding.better_default({}, 1, [cores], limit)
    assert (correction.name, correction.value) == (binding.BIND, value)
    assert "keeps vLLM's choice" in correction.why
    assert (FILE in correction.why) == (quota is not None and quota < len(cores))


@pytest.mark.parametrize(
    ("environ", "ranks", "cores"),
    [
        ({}, 1, [0]),
        ({}, 1, list(range(8))),
        ({binding.BIND: "0|1"}, 2, [0, 1]),
        ({binding.RESERVED: "0"}, 2, [0, 1]),
        ({binding.BIND: "0"}, 1, [0, 1]),
        ({binding.BIND: "nobind"}, 1, [0, 1]),
        ({binding.BIND: "auto", binding.RESERVED: "1"}, 1, [0, 1]),
    ],
    ids=[
        "one core",
        "many cores",
        "two lists",
        "two workers and the switch",
        "a list",
        "nobind",
        "the switch",
    ],
)
def test_the_default_stays(environ, ranks, cores):
    assert binding.better_default(environ, ranks, [cores], None) == []


LOW, HIGH = list(range(8)), list(range(8, 16))


@pytest.mark.parametrize(
    ("nodes", "ranks", "lists"),
    [
        ([[0, 1]], 2, [[0], [1]]),
        ([[0, 1, 2]], 2, [[0, 1], [2]]),
        ([LOW], 3, [[0, 1, 2], [3, 4, 5], [6, 7]]),
        ([LOW, HIGH], 1, [LOW]),
        ([LOW, HIGH], 2, [LOW, HIGH]),
        ([LOW, HIGH], 3, [LOW[:4], LOW[4:], HIGH]),
        ([LOW, HIGH], 4, [LOW[:4], LOW[4:], HIGH[:4], HIGH[4:]]),
        ([LOW, [8]], 3, [LOW[:4], LOW[4:], [8]]),
        ([[0], LOW[1:]], 4, [[0], [1, 2, 3], [4, 5], [6, 7]]),
    ],
)
def test_split_cores(nodes, ranks, lists):
    assert binding.split_cores(nodes, ranks) == lists


@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4), ranks=st.integers(1, 48))
def test_split_cores_gives_each_worker_cores_of_one_node_and_none_twice(sizes, ranks):
    ids = iter(range(100))
    nodes = [[next(ids) for _ in range(size)] for size in sizes]
    if ranks > sum(sizes):
        with pytest.raises(UnsupportedError):
            binding.split_cores(nodes, ranks)
        return
    lists = binding.split_cores(nodes, ranks)
    chosen = [cpu for cores in lists for cpu in cores]
    assert len(lists) == ranks and all(lists)
    assert len(set(chosen)) == len(chosen)
    assert all(any(set(cores) <= set(node) for node in nodes) for cores in lists)
    if ranks >= len(nodes):
        assert len(chosen) == sum(sizes)


def test_more_workers_than_cores_are_refused_with_the_way_out():
    with pytest.raises(UnsupportedError) as refused:
        binding.better_default({}, 3, [[0, 1]], None)
    message = str(refused.value)
    assert "3 workers" in message and "2 cores" in message and binding.BIND in message


@pytest.mark.parametrize(
    ("nodes", "ranks", "quota", "value"),
    [
        ([[0, 1]], 2, None, "0|1"),
        ([[0, 1]], 2, 1.0, "0|1"),
        ([list(range(8))], 2, None, "0-3|4-7"),
        ([list(range(32))], 2, None, "0-14|16-30"),
        ([LOW, HIGH], 2, None, "0-6|8-14"),
        ([list(range(32))], 2, 8.0, "0-3|16-19"),
    ],
)
def test_several_workers_get_cores_of_their_own(nodes, ranks, quota, value):
    limit = None if quota is None else host.Limit(quota, FILE)
    [correction] = binding.better_default({}, ranks, nodes, limit)
    assert (correction.name, correction.value) == (binding.BIND, value)
    assert not correction.of_user and f"{ranks} workers" in correction.why
    allowed = [cpu for node in nodes for cpu in node]
    assert binding.check_binding({binding.BIND: value}, ranks, allowed) == []


def test_an_engine_that_was_started_with_others_finds_their_lists_too(monkeypatch):
    """vLLM tells each engine of a dense model that it is the only one; its parent checked the whole."""
    cpu = min(binding.host.allowed_cpus())
    lists = {binding.BIND: f"{cpu}|{cpu}"}
    with pytest.raises(EnvironmentVariableError, match="holds 2 CPU lists for 1 workers"):
        binding.apply(lists, 1)
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    assert binding.apply(lists, 1) == []


@pytest.mark.parametrize("value", [None, "", "auto", " nobind"])
def test_under_ray_workers_bind_themselves(value):
    environ = {} if value is None else {binding.BIND: value}
    binding.check_under_ray(environ)
    assert environ.get(binding.BIND) == value


def test_cpu_lists_are_refused_under_ray(monkeypatch):
    with pytest.raises(EnvironmentVariableError, match="taskset"):
        binding.check_under_ray({binding.BIND: "0-1"})
    monkeypatch.setattr(binding, "_written", {binding.BIND: "0-1"})
    ours = {binding.BIND: "0-1"}
    binding.check_under_ray(ours)
    assert ours == {}


def test_apply_writes_what_vllm_reads():
    environ = {binding.BIND: "1,1"}
    [correction] = binding.apply(environ, 1, machine=machine())
    assert environ[binding.BIND] == correction.value == "1"
    assert binding.apply(environ, 1, machine=machine()) == []


def test_apply_reads_this_machine_where_none_is_given():
    cpu = host.allowed_cpus()[0]
    environ = {binding.BIND: str(cpu)}
    assert [line for line in binding.apply(environ, 1) if line.value is not None] == []
    with pytest.raises(EnvironmentVariableError, match="this process may use"):
        binding.apply({binding.BIND: str(host.allowed_cpus()[-1] + 1)}, 1)


def test_the_memory_limit_bounds_the_kv_space():
    with pytest.raises(EnvironmentVariableError, match="from 1 to 24"):
        binding.apply({binding.KV_SPACE: "25"}, 1, machine=machine())
    with pytest.raises(EnvironmentVariableError, match="from 1 to 4"):
        binding.apply({binding.KV_SPACE: "5"}, 1, machine=machine(memory_limit=4 * GIB))
    binding.apply({binding.KV_SPACE: "4"}, 1, machine=machine(memory_limit=4 * GIB))


# Case T01: a quota smaller than what is visible


def warnings(environ, quota, cpus=(0, 1), ranks=1, **options):
    """The lines that change nothing, with the file and the quota in each; `environ` is changed in place."""
    corrections = binding.apply(environ, ranks, machine=machine(cpus, quota), **options)
    lines = [correction.why for correction in corrections if correction.value is None]
    assert all(correction.of_user for correction in corrections if correction.value is None)
    assert all(f"{quota:g} CPU" in line and FILE in line for line in lines)
    return lines


@pytest.mark.parametrize("quota", [1.0, 1.5, 2.0, 4.0])
def test_a_quota_that_the_default_fits_needs_no_warning(quota):
    environ = {}
    assert warnings(environ, quota) == []
    assert environ[binding.BIND] == ("0" if quota < 2 else "0-1")


def test_less_than_one_cpu_is_warned_of():
    environ = {}
    [line] = warnings(environ, 0.5)
    assert "less than one CPU is available" in line and environ[binding.BIND] == "0"
    assert len(warnings({binding.BIND: "0"}, 0.5)) == 1
    assert len(warnings({binding.BIND: "0-1"}, 0.5)) == 2
    assert len(warnings({}, 0.5, ranks=2)) == 1


@pytest.mark.parametrize(
    ("environ", "threads"),
    [
        ({binding.BIND: "0-1"}, 2),
        ({binding.BIND: "nobind"}, 2),
        ({binding.BIND: "auto", binding.RESERVED: "0"}, 2),
    ],
)
def test_what_the_user_asked_for_wins_over_the_quota_with_a_warning(environ, threads):
    before = dict(environ)
    [line] = warnings(environ, 1.5)
    assert environ == before
    assert f"gives {threads} compute threads" in line and "they wait for each other" in line
    assert f"Unset {binding.BIND}" in line


def test_threads_of_all_workers_count_against_the_quota():
    assert len(warnings({binding.BIND: "0|1"}, 1.5, ranks=2)) == 1
    assert warnings({binding.BIND: "0|1"}, 2.0, ranks=2) == []
    # Of another engine's workers the quota may be another one.
    assert warnings({binding.BIND: "0|1"}, 1.5, replica=1) == []
    assert len(warnings({binding.BIND: "0|0-1"}, 1.5, replica=1)) == 1


def test_the_default_goes_by_cores_not_by_threads():
    environ = {}
    binding.apply(environ, 1, machine=machine(tuple(range(8)), threads=2))
    assert environ[binding.BIND] == "1,3,5,7"


def test_our_own_default_is_not_the_users_for_a_later_engine(monkeypatch):
    """LLM() of one worker, then one of two: the first one's correction must not count as a wrong list."""
    monkeypatch.setattr(binding, "_written", {binding.BIND: "0-1"})
    environ = {binding.BIND: "0-1"}
    binding.apply(environ, 2, machine=machine())
    assert environ == {binding.BIND: "0|1"}


def test_an_engine_that_something_else_placed_is_left_alone():
    """A data-parallel rank of an outside launcher takes its share of the lists; vLLM asserts on too few."""
    lists = {binding.BIND: "0|0"}
    assert binding.apply(lists, 1, replica=1, machine=machine()) == []
    assert binding.apply({}, 1, replica=0, machine=machine()) == []
    with pytest.raises(EnvironmentVariableError, match="holds 1 CPU lists for 2 workers"):
        binding.apply({binding.BIND: "0"}, 1, replica=1, machine=machine())
    assert binding.apply(lists, 1, replicas=2, machine=machine()) == []


@pytest.mark.parametrize("name", ["CPU_VISIBLE_MEMORY_NODES", "VLLM_CPU_SIM_MULTI_NUMA"])
def test_a_worker_placed_by_memory_node_keeps_vllms_binding(name):
    assert binding.apply({name: "1"}, 1, machine=machine()) == []

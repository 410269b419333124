"""Plans for machines that are not here: who computes where, what fits, and what is said about it."""

import shlex
from dataclasses import replace

import examples
import machines
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_zen import host, plan
from vllm_zen.errors import PlanError, UnsupportedError

GIB = 2**30


def make(machine=None, model=None, rate=None, **request):
    return plan.make(
        model or examples.model(billions=1.2), machine or examples.machine(), plan.Request(**request), rate
    )


def binds(made):
    return [instance.bind for instance in made.instances]


# Who computes where


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (examples.machine(cores_per_node=1), ["0"]),
        (examples.machine(cores_per_node=2), ["0-1"]),
        (examples.machine(cores_per_node=4), ["0-3"]),
        (examples.machine(cores_per_node=5), ["0-3"]),
        (examples.machine(cores_per_node=64), ["0-62"]),
        (examples.machine(cores_per_node=8, smt=2), ["8-14"]),
        (examples.machine(nodes=4, cores_per_node=24, memory=768), ["0-22|24-46|48-70|72-94"]),
        (examples.machine(nodes=2, sockets=2, cores_per_node=96, memory=1536), ["0-94", "96-190"]),
        (
            examples.machine(nodes=8, sockets=2, cores_per_node=16, memory=1536),
            ["0-14|16-30|32-46|48-62", "64-78|80-94|96-110|112-126"],
        ),
    ],
    ids=["1 core", "2", "4", "5: one is left", "64", "SMT", "NPS4", "2 sockets", "2 sockets NPS4"],
)
def test_threads_and_ranks(machine, expected):
    assert binds(make(machine)) == expected


@pytest.mark.parametrize(
    ("quota", "expected"), [(1.5, "0"), (1.0, "0"), (0.5, "0"), (2.0, "0-1"), (3.0, "0-2"), (9.0, "0-6")]
)
def test_no_more_threads_than_the_time_quota_grants(quota, expected):
    limit = host.Limit(quota, "/sys/fs/cgroup/cpu.max")
    made = make(examples.machine(cores_per_node=8, quota=limit))
    if quota < 8:
        assert binds(made) == [expected]
        assert any("/sys/fs/cgroup/cpu.max" in reason for reason in made.reasons)
    else:
        assert binds(made) == ["0-6"]
    assert any("less than one CPU" in reason for reason in made.reasons) is (quota < 1)


def test_nodes_that_do_not_divide_the_heads_are_one_rank():
    made = make(examples.machine(nodes=4, cores_per_node=8), examples.model(1.2, heads=9, kv_heads=3))
    assert len(made.instances[0].ranks) == 1
    assert any("do not split into 4" in reason for reason in made.reasons)


def test_a_model_too_large_for_a_socket_takes_both():
    machine = examples.machine(nodes=2, sockets=2, cores_per_node=64, memory=96)
    made = make(machine, examples.model(32))
    assert binds(made) == ["0-62|64-126"]
    assert made.ranks == 2
    assert "--tensor-parallel-size" in made.arguments()


def test_the_users_lists_stay():
    made = make(bind="1|0")
    assert binds(made) == ["1|0"]
    assert made.instances[0].ranks == ((1,), (0,))


def test_asked_for_ranks_get_cores_of_their_own():
    made = make(examples.machine(cores_per_node=10), ranks=4)
    ranks = [set(rank) for rank in made.instances[0].ranks]
    assert len(ranks) == 4
    assert len(set.union(*ranks)) == sum(map(len, ranks))


def test_more_ranks_than_cores_are_refused():
    with pytest.raises(UnsupportedError, match=r"3 workers.*2 cores"):
        make(ranks=3)


@given(
    nodes=st.sampled_from([1, 2, 4, 8]),
    cores=st.integers(1, 40),
    sockets=st.sampled_from([1, 2]),
    smt=st.sampled_from([1, 2]),
    quota=st.none() | st.floats(0.1, 100),
)
def test_every_layout_uses_allowed_cpus_once(nodes, cores, sockets, smt, quota):
    limit = None if quota is None else host.Limit(quota, "f")
    machine = examples.machine(max(nodes, sockets), cores, sockets, smt, memory=4096, quota=limit)
    made = make(machine)
    used = [cpu for instance in made.instances for rank in instance.ranks for cpu in rank]
    assert used
    assert len(set(used)) == len(used)
    assert set(used) <= set(machine.cpus)
    for core in machine.cores:
        assert len(set(core) & set(used)) <= 1, "two threads on one core"


# What fits


def test_the_cache_is_what_is_needed_or_what_is_left():
    small = make(max_model_len=1024, max_num_seqs=2)
    assert small.memory.kv_cache == 2 * 1024 * small.memory.kv_per_token
    large = make()
    assert large.memory.kv_cache + large.memory.fixed <= 64 * GIB
    assert large.memory.kv_cache + large.memory.fixed >= 64 * GIB * (1 - plan.MARGIN) - 1


def test_a_long_context_is_cut_to_what_the_cache_holds():
    made = make(examples.machine(memory=24), examples.model(8))
    assert 0 < made.max_model_len < 131072
    assert made.max_model_len % plan.BLOCK == 0
    assert made.max_model_len * made.memory.kv_per_token <= made.memory.kv_cache
    assert any(f"{made.max_model_len} of 131072" in reason for reason in made.reasons)


def test_a_model_that_cannot_fit_is_refused_with_the_scheme_that_would():
    with pytest.raises(PlanError, match=r"weights 14.90 GiB.*9\.00 GiB are usable.*zen_int4 it would"):
        make(examples.machine(memory=9), examples.model(8))
    with pytest.raises(PlanError, match=r"--quantization zen_int8 it would"):
        make(examples.machine(memory=16), examples.model(8))
    with pytest.raises(PlanError, match="No scheme"):
        make(examples.machine(memory=4), examples.model(8))


def test_a_cache_of_the_user_that_does_not_fit_is_refused():
    with pytest.raises(PlanError, match=r"KV cache of 60\.00 GiB does not fit"):
        make(kv_bytes=60 * GIB)


def test_the_users_cache_is_a_ranks():
    made = make(examples.machine(cores_per_node=8), ranks=2, kv_bytes=GIB)
    assert made.memory.kv_cache == 2 * GIB
    assert made.kv_cache_per_rank == GIB


def test_a_memory_limit_is_named():
    limit = host.Limit(20 * GIB, "/sys/fs/cgroup/memory.max", used=GIB)
    made = make(examples.machine(memory_limit=limit))
    assert made.memory.usable == 19 * GIB
    assert any("/sys/fs/cgroup/memory.max" in reason for reason in made.reasons)


def test_half_of_the_cpus_get_half_of_the_memory():
    """Case T02: two servers, each pinned to one of two CPUs, do not both take the whole machine."""
    half = replace(examples.machine(), cpus=(1,), cores=((1,),), nodes=(host.Node(0, (1,), None),))
    assert make(half).memory.usable == 32 * GIB


def test_replicas_share():
    made = make(examples.machine(cores_per_node=8), replicas=2)
    assert made.memory.usable == 32 * GIB
    assert len(made.instances[0].ranks) == 2
    assert made.ranks == 1


def test_float32_takes_twice():
    assert make(dtype="float32").memory.weights == 2 * make().memory.weights
    assert make(dtype="float32").memory.kv_per_token == 2 * make().memory.kv_per_token


def test_a_tied_head_is_counted_twice_unless_told_otherwise():
    tied = examples.model(1.2, tied=True)
    assert make(model=tied).memory.tied_head_copy == 128256 * 4096 * 2
    assert make(model=tied, pack_tied_head=False).memory.tied_head_copy == 0


def test_a_prepared_checkpoint_weighs_what_its_files_do():
    prepared = examples.model(8, quantization="compressed-tensors", file_bytes=5 * GIB)
    assert make(examples.machine(memory=16), prepared).memory.weights == 5 * GIB


# What is said


def test_the_estimate_shows_its_arithmetic():
    made = make(rate=plan.Rate(30e9, "zentorch", 2))
    read = made.weights_by_scheme["bfloat16"] - 128256 * 4096 * 2
    seconds = plan.READ_FACTOR * read / 30e9 + 32 * plan.LAYER_SECONDS
    assert made.expected.tokens_per_second == pytest.approx(1 / seconds, rel=1e-6)
    assert "30.0 GB/s" in made.expected.formula


def test_the_command_can_be_pasted():
    made = make(examples.machine(nodes=2, sockets=2, cores_per_node=8, memory=512))
    first, second = (shlex.split(command) for command in made.commands())
    assert first[:2] == ["env", "VLLM_CPU_OMP_THREADS_BIND=0-6"]
    assert first[first.index("--port") + 1] == "8000"
    assert second[second.index("--port") + 1] == "8001"
    assert "127.0.0.1" in first
    text = plan.to_text(made)
    assert all(command in text for command in made.commands())


def test_the_report_for_machines_is_json():
    import json

    report = json.loads(json.dumps(make(rate=plan.Rate(30e9, "vllm", 2)).to_dict()))
    assert report["instances"][0]["bind"] == "0-1"
    assert report["expected"]["tokens_per_second"] > 0
    assert len(report["commands"]) == 1


@pytest.mark.parametrize("name", machines.MACHINES)
def test_every_known_machine_gets_a_plan(tmp_path, name):
    """From its kernel's files to a command: CPUs it may use, memory it has."""
    machine = host.read_host(machines.build(tmp_path, machines.MACHINES[name]))
    small = {"linear": 10**8, "expert": 0, "head": 10**7, "embedding": 10**7, "other": 0}
    made = make(machine, examples.model(0.5, vocabulary=8192, parameters=small))
    used = {cpu for instance in made.instances for rank in instance.ranks for cpu in rank}
    assert used <= set(machine.cpus)
    assert made.memory.kv_cache + made.memory.fixed <= machine.usable_memory
    assert len(list(made.commands())) == len(machine.sockets)


def test_memory_that_a_node_does_not_show_is_not_planned_with():
    """A virtual machine's memory may be added as it is used; vLLM asks the node."""
    machine = examples.machine(memory=24)
    (node,) = machine.nodes
    ballooned = replace(machine, nodes=(replace(node, memory=14 * GIB),))
    assert (machine.usable_memory, ballooned.usable_memory) == (24 * GIB, 14 * GIB)

"""ZenCpuPlatform as vLLM's configuration meets it."""

import os

import fakes
import pytest
import torch

from vllm_zen import envs, host, zentorch
from vllm_zen.errors import EnvironmentVariableError, UnsupportedError


def configure(config):
    """Runs the platform's hook on a configuration made by whatever platform this machine has."""
    from vllm_zen.platform import ZenCpuPlatform

    config.parallel_config.worker_cls = "auto"
    ZenCpuPlatform.check_and_update_config(config)
    return config


def test_it_is_a_cpu_platform_to_all_of_vllm():
    from vllm.platforms.cpu import CpuPlatform
    from vllm.platforms.interface import PlatformEnum

    from vllm_zen.platform import ZenCpuPlatform

    platform = ZenCpuPlatform()
    assert isinstance(platform, CpuPlatform) and platform._enum is PlatformEnum.CPU
    assert platform.is_cpu() and not platform.is_out_of_tree()
    assert platform.supported_dtypes == [torch.bfloat16, torch.float32]


IS_ZEN = """
import json
from vllm_zen.platform import ZenCpuPlatform
print(json.dumps(ZenCpuPlatform().is_zen_cpu()))
"""


def test_vllms_own_zentorch_branches_open_only_where_zentorch_runs():
    """They ask for an op's name alone, and would raise in the first request without AVX512-BF16."""
    assert fakes.ask(IS_ZEN) == (
        zentorch.load().state == "absent" or zentorch.supports_linear(torch.bfloat16)[0]
    )


@pytest.mark.parametrize("code", ["raise RuntimeError('two registrations')", "raise SystemExit(3)"])
def test_they_stay_closed_for_a_broken_zentorch(tmp_path, code):
    assert fakes.ask(IS_ZEN, fakes.zentorch(tmp_path, code)) is False


ENGINE_ARGUMENTS = """
import sys
from vllm.engine.arg_utils import EngineArgs
EngineArgs(model=sys.argv[1], additional_config={"vllm_zen": {"no_such_option": True}}).create_engine_config()
"""


def test_a_refusal_reaches_the_user_through_vllms_own_wrapping(tiny_models, platform_environment):
    """vLLM's configuration turns our error into a pydantic one, which keeps the text."""
    result = fakes.python(ENGINE_ARGUMENTS, arguments=[str(tiny_models["untied"])], **platform_environment)
    assert result.returncode != 0
    assert "it takes an object with the keys pack_tied_head" in result.stderr


def test_the_worker_is_ours_unless_another_is_chosen(engine_config):
    config = configure(engine_config("untied"))
    assert config.parallel_config.worker_cls == "vllm_zen.worker.ZenWorker"
    from vllm_zen.platform import ZenCpuPlatform

    config.parallel_config.worker_cls = "some.other.Worker"
    ZenCpuPlatform.check_and_update_config(config)
    assert config.parallel_config.worker_cls == "some.other.Worker"


def test_float16_is_refused_with_the_way_out(engine_config):
    config = engine_config("untied", dtype="bfloat16")
    config.model_config.dtype = torch.float16
    with pytest.raises(UnsupportedError, match=r"--dtype float16 is refused.*Use --dtype bfloat16"):
        configure(config)


@pytest.mark.parametrize(
    "options", [{"pack_tied_heads": True}, {"pack_tied_head": "no"}, ["pack_tied_head"]], ids=str
)
def test_wrong_options_are_refused_before_any_weight_is_read(engine_config, options):
    config = engine_config("untied")
    config.additional_config = {"vllm_zen": options}
    with pytest.raises(UnsupportedError, match=r"additional-config.*pack_tied_head"):
        configure(config)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_CPU_OMP_THREADS_BIND", "abc"),
        ("VLLM_CPU_NUM_OF_RESERVED_CPU", "-1"),
        ("VLLM_CPU_KVCACHE_SPACE", "4GB"),
    ],
)
def test_wrong_cpu_variables_are_refused_before_any_weight_is_read(engine_config, monkeypatch, name, value):
    """Case T04 without our launcher; tests/unit/test_binding.py has the whole list."""
    config = engine_config("untied")
    monkeypatch.setenv(name, value)
    with pytest.raises(EnvironmentVariableError, match=name):
        configure(config)


def test_the_corrected_binding_is_what_workers_inherit(engine_config, monkeypatch):
    machine = host.read_host()
    cores = machine.cores_of(machine.nodes[0])
    configure(engine_config("untied"))
    corrected = os.environ["VLLM_CPU_OMP_THREADS_BIND"] != "auto"
    quota = machine.quota
    assert corrected == (1 < len(cores) <= 4 or (quota is not None and quota.value < len(cores)))


def test_the_cache_is_sized_from_what_is_free(engine_config):
    """vLLM would take 92 % of the node, and not start where less is free."""
    config = engine_config("untied")
    config.cache_config.kv_cache_memory_bytes = None  # sized already where our platform is the active one
    configure(config)
    size = config.cache_config.kv_cache_memory_bytes
    assert 0 < size < host.read_host().memory_total


@pytest.mark.parametrize(
    ("name", "value"), [("kv_cache_memory_bytes", 2**28), ("gpu_memory_utilization", 0.5)]
)
def test_a_cache_the_user_sized_stays(engine_config, name, value):
    config = engine_config("untied")
    setattr(config.cache_config, name, value)
    before = config.cache_config.kv_cache_memory_bytes
    configure(config)
    assert config.cache_config.kv_cache_memory_bytes == before


def test_vllm_knows_our_variables(monkeypatch, caplog):
    """No warning about them, even with --fail-on-environ-validation; a misspelt one is still reported."""
    from vllm_zen.platform import ZenCpuPlatform

    for variable in envs.VARIABLES:
        monkeypatch.setenv(variable.name, variable.default)
    ZenCpuPlatform.validate_environ(hard_fail=True)
    monkeypatch.setenv("VLLM_ZEN_LINAER", "auto")
    with pytest.raises(ValueError, match="VLLM_ZEN_LINAER"):
        ZenCpuPlatform.validate_environ(hard_fail=True)


def test_packing_is_part_of_the_key_of_the_compile_cache(engine_config, monkeypatch):
    """vLLM leaves the variable out of its key, but a graph traced for packed weights needs them."""
    keys = set()
    for value in ("0", "1"):
        monkeypatch.setenv("VLLM_ZENTORCH_WEIGHT_PREPACK", value)
        keys.add(configure(engine_config("untied")).compute_hash())
    assert len(keys) == 2

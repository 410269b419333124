"""Case T06 in register(): one warning and the safe path, or an error in strict mode."""

import fakes
import pytest

from vllm_zen import activation

REGISTER = """
import json
from vllm_zen import plugin
plugin.register()
plugin.register()
from vllm.model_executor.layers import utils
from vllm.platforms import current_platform
wired = hasattr(utils.dispatch_cpu_unquantized_gemm, "_vllm_zen_stock")
print(json.dumps([type(current_platform).__name__, wired]))
"""


def register(*paths, **environment):
    return fakes.python(REGISTER, *paths, **environment)


def assert_one_warning(result, words):
    assert fakes.last_json(result) == ["ZenCpuPlatform", True]
    lines = [line for line in (result.stdout + result.stderr).splitlines() if words in line]
    assert len(lines) == 1 and "WARNING" in lines[0] and "Way out: " in lines[0], lines


def assert_refused(result, words):
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert "BrokenComponentError" in last and words in last and "VLLM_ZEN_STRICT=1" in last


@pytest.mark.parametrize("strict", [False, True], ids=["safe path", "strict"])
@pytest.mark.parametrize("content", [None, b"not a library" * 1000], ids=["missing", "garbage"])
def test_a_native_library_that_does_not_load(tmp_path, platform_environment, content, strict):
    folder = fakes.copy_with_library(tmp_path, content)
    result = register(folder, **platform_environment, VLLM_ZEN_STRICT=str(int(strict)))
    words = "vllm-zen's native kernels are not used"
    if strict:
        assert_refused(result, words)
    else:
        assert_one_warning(result, words)


@pytest.mark.parametrize("strict", [False, True], ids=["safe path", "strict"])
def test_a_zentorch_for_another_torch(tmp_path, platform_environment, strict):
    folder = fakes.zentorch(tmp_path, built_for="2.9.1+cpu")
    result = register(folder, **platform_environment, VLLM_ZEN_STRICT=str(int(strict)))
    words = "zentorch 9.9.9.9 is not used (built for torch 2.9.1+cpu"
    if strict:
        assert_refused(result, words)
    else:
        assert_one_warning(result, words)


@pytest.mark.parametrize("name", ["VLLM_ZEN_LINEAR", "VLLM_ZENTORCH_WEIGHT_PREPACK", "VLLM_ZEN_ISA"])
def test_a_wrong_variable_ends_the_start(name):
    result = register(**{name: "2"})
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("vllm_zen.errors.EnvironmentVariableError: ") and f"{name}='2'" in last


def test_a_table_this_cpu_lacks_ends_the_start_even_where_the_platform_steps_aside():
    if activation.cpuid_features() >= {"avx512_bf16", "avx512_vnni"}:
        pytest.skip("this CPU runs every table")
    result = register(VLLM_ZEN_ISA="zen4")
    assert result.returncode != 0
    assert (
        result.stderr.strip()
        .splitlines()[-1]
        .startswith("vllm_zen.errors.UnsupportedError: VLLM_ZEN_ISA=zen4")
    )


def test_vllm_target_device_is_named_with_the_way_out(platform_environment):
    result = register(**platform_environment, VLLM_TARGET_DEVICE="cpu")
    platform, wired = fakes.last_json(result)
    assert platform != "ZenCpuPlatform" or not wired
    assert "unset VLLM_TARGET_DEVICE" in result.stdout + result.stderr

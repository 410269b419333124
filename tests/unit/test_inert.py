"""Importing has no effect, and the two entry points may be called any number of times."""

import fakes
import pytest

# Prints, for each module named, the heavy packages that its import brought in, and other effects.
IMPORT = """
import importlib, json, logging, os, sys
HEAVY = {"torch", "vllm", "transformers", "numpy", "zentorch", "psutil"}
environment, effects = dict(os.environ), {}
for name in sys.argv[1:]:
    importlib.import_module(name)
    found = sorted(HEAVY & set(sys.modules))
    if dict(os.environ) != environment:
        found.append("the environment")
    if logging.getLogger().handlers or logging.getLogger("vllm").handlers:
        found.append("logging")
    if found:
        effects[name] = found
        break
print(json.dumps(effects))
"""

MODULES = [
    "vllm_zen",
    *(
        f"vllm_zen.{name}"
        for name in "errors cpu envs host options activation zentorch doctor demo cli plugin".split()  # noqa: SIM905
    ),
    "vllm_zen.compile",
    "vllm_zen.compile.backports",
    "vllm_zen.linear",
]


def test_importing_brings_in_nothing_heavy():
    assert fakes.ask(IMPORT, arguments=MODULES) == {}


def test_importing_needs_nothing_but_the_standard_library(tmp_path):
    (tmp_path / "vllm_zen").symlink_to(fakes.PACKAGE)
    assert fakes.ask(IMPORT, tmp_path, site=False, arguments=MODULES) == {}


# The entry points, as vLLM calls them in its processes: platform() twice for one choice, register() once in
# each process, and again where a program loads the plugins itself.
TWICE = """
import json
from vllm_zen import activation, plugin
answers = [plugin.platform(), plugin.platform()]
from vllm.platforms import current_platform
from vllm.model_executor.layers import utils
stock = utils.dispatch_cpu_unquantized_gemm
after = []
for _ in range(2):
    plugin.register()
    after.append(utils.dispatch_cpu_unquantized_gemm)
print(json.dumps({
    "active": activation.decide().active,
    "answers": answers,
    "platform": f"{type(current_platform).__module__}.{type(current_platform).__qualname__}",
    "same": after[0] is after[1],
    "patched": after[0] is not stock,
}))
"""


@pytest.mark.parametrize("environment", [{}, {"VLLM_ZEN_ISA": "ref"}], ids=["this CPU", "ref"])
def test_the_entry_points_twice(environment):
    """With ref the platform is active on any CPU; without, on a Zen 4 or later only. Both are harmless."""
    result = fakes.python(TWICE, **environment)
    found = fakes.last_json(result)
    if environment:
        assert found["active"]
    ours = "vllm_zen.platform.ZenCpuPlatform"
    assert found["answers"] == [ours if found["active"] else None] * 2
    assert (found["platform"] == ours) is found["active"]
    assert found["same"]
    assert found["patched"] is found["active"]
    said = result.stdout + result.stderr
    assert said.count("vllm-zen steps aside") == (0 if found["active"] else 1)


# The answers that need no vLLM, beside a torch that reports a Genoa and a zentorch that does not import.
ANSWER = """
import json
from vllm_zen import plugin
answers = {"platform": plugin.platform()}
try:
    plugin.register()
except Exception as error:
    answers["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(answers))
"""


@pytest.mark.parametrize(
    ("variable", "value"),
    [("VLLM_ZEN_ISA", "bogus"), ("VLLM_ZEN_LINEAR", "mkl"), ("VLLM_ZEN_STRICT", "yes")],
)
def test_register_refuses_a_bad_variable(tmp_path, variable, value):
    """platform() must not raise: vLLM swallows it, and would go on as if the plugin were not there."""
    found = fakes.ask(ANSWER, fakes.torch(tmp_path), **{variable: value})
    assert found["platform"] in (None, "vllm_zen.platform.ZenCpuPlatform")
    assert found["error"].startswith(f"EnvironmentVariableError: {variable}={value!r}")


def test_platform_survives_a_broken_zentorch(tmp_path):
    """Asks for the portable kernels, so that the answer is yes whatever this machine's text says."""
    fakes.zentorch(tmp_path, "raise OSError('undefined symbol')", built_for="2.13.0")
    fakes.torch(tmp_path)
    code = "import json; from vllm_zen import plugin; print(json.dumps(plugin.platform()))"
    found = fakes.ask(code, tmp_path, VLLM_ZEN_ISA="ref")
    assert found == "vllm_zen.platform.ZenCpuPlatform"

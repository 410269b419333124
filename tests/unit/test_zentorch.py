"""vllm_zen.zentorch beside fake packages, each in a child of its own, and beside the real one."""

import os

import fakes
import pytest

from vllm_zen import zentorch

# Prints the status before and after loading, and what a second load says.
REPORT = """
import dataclasses, json
from vllm_zen import zentorch
inspected = zentorch.inspect()
loaded = zentorch.load()
assert zentorch.load() is loaded
print(json.dumps({
    "inspected": dataclasses.asdict(inspected),
    "loaded": dataclasses.asdict(loaded),
    "usable": loaded.usable,
    "described": loaded.describe(),
}))
"""
WHOLE = "SimpleNamespace(zentorch_linear_unary=len, zentorch_weight_prepack_for_linear=len)"


def marked(folder, code=""):
    """Code that leaves a file behind when it runs, and that file."""
    marker = folder / "it ran"
    return f"open({str(marker)!r}, 'w').close()\n{code}", marker


def report(tmp_path, code="", built_for="2.13.0+cpu", ops=WHOLE):
    """REPORT beside a fake torch 2.13.0 and a fake zentorch with this code; and whether the code ran."""
    code, marker = marked(tmp_path, code)
    fakes.torch(tmp_path, ops=ops)
    fakes.zentorch(tmp_path, code, built_for)
    return fakes.ask(REPORT, tmp_path), marker.exists()


def test_absent(tmp_path):
    """Nothing is installed but this package. load() needs no torch to say so."""
    (tmp_path / "vllm_zen").symlink_to(fakes.PACKAGE)
    found = fakes.ask(REPORT, tmp_path, site=False)
    assert found["inspected"] == found["loaded"]
    assert found["loaded"]["state"] == "absent"
    assert found["loaded"]["remedy"] == "pip install 'vllm-zen[zen]'"
    assert found["described"] == "no zentorch (not installed)"
    assert not found["usable"]


def test_a_folder_that_is_no_package_is_absent(tmp_path):
    (tmp_path / "vllm_zen").symlink_to(fakes.PACKAGE)
    (tmp_path / "zentorch").mkdir()
    assert fakes.ask(REPORT, tmp_path, site=False)["loaded"]["state"] == "absent"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise ImportError('no module named _C')", "ImportError: no module named _C"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        (
            "raise OSError('libzentorch.so: undefined symbol: _ZN2at\\nmore')",
            "OSError: libzentorch.so: undefined symbol: _ZN2at",
        ),
        ("raise RuntimeError('two registrations')", "RuntimeError: two registrations"),
        ("raise AttributeError()", "AttributeError: "),
        ("def broken(:", "SyntaxError: invalid syntax (__init__.py, line 2)"),
    ],
)
def test_broken_at_import(tmp_path, code, reason):
    found, _ = report(tmp_path, code)
    assert found["inspected"]["state"] == "present"
    assert found["loaded"]["state"] == "broken"
    assert found["loaded"]["reason"] == reason
    assert (found["loaded"]["version"], found["loaded"]["torch"]) == ("9.9.9.9", "2.13.0+cpu")
    assert "pip install --force-reinstall --no-deps zentorch==9.9.9.9" in found["loaded"]["remedy"]
    assert found["described"] == f"no zentorch ({reason})"


@pytest.mark.parametrize("built_for", ["2.12.1+cpu", "2.14.0", "2.1.3", "3.13.0", "2.130.0"])
def test_built_for_another_torch_is_known_before_it_is_loaded(tmp_path, built_for):
    found, ran = report(tmp_path, built_for=built_for)
    assert not ran
    assert found["inspected"] == found["loaded"]
    assert found["loaded"]["state"] == "broken"
    assert found["loaded"]["reason"] == f"built for torch {built_for}, but torch 2.13.0+cpu is installed"
    assert found["loaded"]["remedy"] == "install zentorch for torch 2.13, or pip uninstall zentorch"


@pytest.mark.parametrize("built_for", ["2.13.0", "2.13.0+cpu", "2.13.4+cu130"])
def test_built_for_this_torch(tmp_path, built_for):
    found, ran = report(tmp_path, built_for=built_for)
    assert ran
    assert found["loaded"] == found["inspected"] | {"state": "loaded"}
    assert (found["usable"], found["described"]) == (True, "zentorch 9.9.9.9")


@pytest.mark.parametrize(
    "build_info",
    [
        pytest.param(None, id="no file"),
        pytest.param("", id="empty"),
        pytest.param("this is not python", id="not python"),
        pytest.param("__torchversion__ = compute()", id="not a constant"),
        pytest.param("# coding: latin-1\n\xff", id="not UTF-8"),
    ],
)
def test_without_a_readable_build_the_import_decides(tmp_path, build_info):
    fakes.torch(tmp_path, ops=WHOLE)
    fakes.zentorch(tmp_path)
    path = tmp_path / "zentorch/_build_info.py"
    path.unlink()
    if build_info is not None:
        path.write_bytes(build_info.encode("latin-1"))
    found = fakes.ask(REPORT, tmp_path)
    assert (found["loaded"]["state"], found["loaded"]["built_for"]) == ("loaded", "")


@pytest.mark.parametrize(
    ("ops", "missing"),
    [
        ("SimpleNamespace(zentorch_linear_unary=len)", "zentorch_weight_prepack_for_linear"),
        ("SimpleNamespace(zentorch_weight_prepack_for_linear=len)", "zentorch_linear_unary"),
        ("SimpleNamespace()", "zentorch_linear_unary, zentorch_weight_prepack_for_linear"),
    ],
)
def test_one_that_imports_but_lacks_ops_is_broken(tmp_path, ops, missing):
    """As zentorch's stable-ABI library beside another torch, which has a part of the ops."""
    found, ran = report(tmp_path, ops=ops)
    assert ran
    assert found["loaded"]["state"] == "broken"
    assert found["loaded"]["reason"] == f"it lacks the op {missing}"


def test_whole_beside_a_torch_that_does_not_import(tmp_path):
    """load() asks torch for the ops, and must not raise for torch's sake either."""
    fakes.zentorch(tmp_path)
    fakes.package(tmp_path, "torch", "raise OSError('libtorch_cpu.so: cannot open shared object file')")
    found = fakes.ask(REPORT, tmp_path)
    assert found["loaded"]["state"] == "broken"
    assert found["loaded"]["reason"].startswith("OSError: libtorch_cpu.so")


def test_a_package_without_a_distribution(tmp_path):
    """Copied in place by hand: its version is unknown, and the remedy does not ask pip for that."""
    (tmp_path / "vllm_zen").symlink_to(fakes.PACKAGE)
    fakes.package(tmp_path, "zentorch", "raise ImportError('half')")
    found = fakes.ask(REPORT, tmp_path, site=False)
    assert (found["loaded"]["state"], found["loaded"]["version"]) == ("broken", "unknown")
    assert "==unknown" not in found["loaded"]["remedy"]


def test_the_weekly_build_has_a_version_too(tmp_path):
    (tmp_path / "vllm_zen").symlink_to(fakes.PACKAGE)
    fakes.torch(tmp_path, ops=WHOLE)
    fakes.package(tmp_path, "zentorch", "")
    fakes.distribution(tmp_path, "zentorch-weekly", "2.13.0.dev7")
    found = fakes.ask(REPORT, tmp_path, site=False)
    assert (found["usable"], found["loaded"]["version"]) == (True, "2.13.0.dev7")


# Which dtypes, and whether to pack

SUPPORTS = """
import json, torch
from vllm_zen import zentorch
dtypes = (torch.float32, torch.bfloat16, torch.float16)
print(json.dumps([zentorch.supports_linear(dtype) for dtype in dtypes]))
"""


@pytest.mark.parametrize("has_bf16", [True, False])
def test_supported_dtypes_follow_the_cpu(tmp_path, has_bf16):
    features = [name for name in fakes.GENOA if has_bf16 or name != "avx512_bf16"]
    fakes.torch(tmp_path, features, ops=WHOLE)
    fakes.zentorch(tmp_path, built_for="2.13.0")
    fp32, bf16, fp16 = fakes.ask(SUPPORTS, tmp_path)
    assert fp32 == [True, ""]
    assert bf16[0] is has_bf16 and ("AVX512-BF16" in bf16[1]) is not has_bf16
    assert fp16 == [False, "zentorch has no linear kernel for float16 here"]


def test_no_dtype_is_supported_by_a_broken_one(tmp_path):
    fakes.torch(tmp_path)
    fakes.zentorch(tmp_path, "raise OSError('x')")
    answers = fakes.ask(SUPPORTS, tmp_path)
    assert answers == [[False, "no zentorch (OSError: x)"]] * 3


@pytest.mark.parametrize("value", [None, "", " ", "1", " 1 "])
def test_prepack_agrees_with_the_algorithm_that_reads_it(monkeypatch, value):
    monkeypatch.delenv("ZENDNNL_MATMUL_ALGO", raising=False)
    if value is not None:
        monkeypatch.setenv("ZENDNNL_MATMUL_ALGO", value)
    assert zentorch.prepack_agrees() == (True, "")


@pytest.mark.parametrize("value", ["0", "2", "auto", "-1", "10"])
def test_prepack_disagrees_with_any_other(monkeypatch, value):
    monkeypatch.setenv("ZENDNNL_MATMUL_ALGO", value)
    agrees, reason = zentorch.prepack_agrees()
    assert not agrees
    assert f"ZENDNNL_MATMUL_ALGO={value} " in reason and "set it to 1" in reason


# The real one


def test_the_installed_one_is_whole():
    if zentorch.inspect().state == "absent":
        pytest.skip("zentorch is not installed here")
    status = zentorch.load()
    assert (status.state, status.reason, status.remedy) == ("loaded", "", ""), status
    assert status.describe() == f"zentorch {status.version}"
    assert status.built_for.split(".")[:2] == status.torch.split(".")[:2]
    assert all(hasattr(zentorch.ops(), op) for op in zentorch.REQUIRED_OPS)


def test_its_build_is_read_without_loading_it():
    if zentorch.inspect().state == "absent":
        pytest.skip("zentorch is not installed here")
    code = "import json, sys; from vllm_zen import zentorch; status = zentorch.inspect(); "
    code += "loaded = sorted({'torch', 'zentorch'} & set(sys.modules))\n"
    code += "print(json.dumps([status.state, status.built_for, loaded]))"
    state, built_for, loaded = fakes.ask(code, timeout=60, HOME=os.environ.get("HOME", "/"))
    assert (state, loaded) == ("present", [])
    assert built_for

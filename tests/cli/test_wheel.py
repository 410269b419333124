"""The built wheel in a clean virtual environment: what a person who types `pip install` gets."""

import os
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

USE_IT = """
from vllm_zen import ops
print(ops.LIBRARY)
status = ops.load()
assert status.ok, status.reason
import torch
print(ops.quantize_rows_s8(torch.ones(2, 8, dtype=torch.bfloat16))[0].sum().item())
"""


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=240
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    built = run(
        *(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"),
        *("--config-settings", f"build-dir={folder}/build", "--wheel-dir", str(folder), str(ROOT)),
    )
    assert built.returncode == 0, built.stderr[-3000:]
    (found,) = folder.glob("vllm_zen-*.whl")
    return found


@pytest.fixture(scope="module")
def clean_bin(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=True)
    installed = run(str(folder / "bin/pip"), "install", "--no-deps", "--no-index", str(wheel))
    assert installed.returncode == 0, installed.stderr[-3000:]
    return folder / "bin"


def test_one_wheel_serves_every_python(wheel):
    assert wheel.name.startswith("vllm_zen-0.") and "-py3-none-" in wheel.name


def test_the_command_is_there_without_torch(clean_bin):
    answer = run(str(clean_bin / "vllm-zen"), "--version")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith("vllm-zen 0.")


def test_doctor_says_what_is_missing(clean_bin):
    answer = run(str(clean_bin / "vllm-zen"), "doctor")
    assert answer.returncode == 2, answer.stdout + answer.stderr
    assert "fail  torch" in answer.stdout and "fail  vllm" in answer.stdout
    assert "Traceback" not in answer.stderr


@pytest.fixture(scope="module")
def beside_a_stack(clean_bin: Path) -> Path:
    """The stack of the test environment, put behind the clean one's own packages."""
    packages = next((clean_bin.parent / "lib").glob("python3*/site-packages"))
    (packages / "stack.pth").write_text("\n".join(site.getsitepackages()))
    return packages


def test_vllm_takes_its_platform(clean_bin, beside_a_stack, platform_environment):
    """`pip install vllm-zen` beside a vLLM is all it takes."""
    code = "from vllm.platforms import current_platform; print(type(current_platform).__module__)"
    answer = run(str(clean_bin / "python"), "-c", code, **platform_environment)
    assert answer.stdout.split()[-1:] == ["vllm_zen.platform"], answer.stderr[-3000:]


def test_the_native_library_loads_beside_a_stack(clean_bin, beside_a_stack):
    packages = beside_a_stack
    answer = run(str(clean_bin / "python"), "-c", USE_IT)
    assert answer.returncode == 0, answer.stderr[-3000:]
    library, total = answer.stdout.split()
    assert Path(library).is_relative_to(packages)
    assert float(total) == 2 * 8 * 127

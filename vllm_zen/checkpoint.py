"""What a model needs of a machine, from its config and the headers of its weight files. No weight is read.

Standard library, and huggingface_hub only to find a hub id in the local cache.
"""

import functools
import json
import math
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vllm_zen.errors import ModelError

# A safetensors header of a 1,000-layer model is a few MB; more is a damaged length.
MAX_HEADER_BYTES = 100 * 2**20
# Layers whose attention keeps no cache that grows with the context.
STATE_LAYERS = ("linear_attention", "mamba", "recurrent", "conv")

Role = Literal["linear", "expert", "head", "embedding", "other"]


class Tensor(NamedTuple):
    """One entry of a safetensors header."""

    name: str
    shape: tuple[int, ...]
    size: int  # bytes in the file


@dataclass(frozen=True)
class Linear:
    """A weight [n, k] as vLLM runs it (q, k and v as one, gate and up as one), and how many there are."""

    n: int
    k: int
    count: int

    @property
    def parameters(self) -> int:
        """Of all of them together."""
        return self.n * self.k * self.count


@dataclass(frozen=True)
class Model:
    """One checkpoint."""

    path: Path
    quantization: str | None  # the method of a prepared checkpoint
    tied: bool  # the head is the embedding table
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_len: int
    kv_values_per_token: int  # cached numbers for one token, over all layers
    linears: tuple[Linear, ...]  # without experts and head
    parameters: dict[Role, int]
    experts: int
    experts_per_token: int
    file_bytes: int

    @property
    def read_per_token(self) -> int:
        """Parameters that a decode step of one token reads: all but the table and the idle experts."""
        active = self.experts_per_token / self.experts if self.experts else 0
        head = self.parameters["embedding"] if self.tied else self.parameters["head"]
        return self.parameters["linear"] + int(self.parameters["expert"] * active) + head


def find(name: str) -> Path:
    """The folder of a model: a local folder, or a hub id in the local cache. Nothing is downloaded.

    Raises ModelError when neither is there.
    """
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if folder.is_dir():
        raise ModelError(f"{folder} holds no config.json, so it is no model folder. Name one that does.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        raise ModelError(
            f"{name!r} is neither a folder with a config.json nor a model in the local hub cache. Name a "
            f"folder, or download it first: hf download {name}"
        ) from None


def read(name: str) -> Model:
    """Reads a model's config and weight headers. Raises ModelError for what is not a model vLLM serves."""
    folder = find(name)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / 'config.json'} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{folder / 'config.json'} holds no JSON object")
    text = {**config, **config.get("text_config", {})}
    try:
        return _model(folder, config, text)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(
            f"{folder / 'config.json'} lacks or misstates what a decoder needs ({type(error).__name__}: "
            f"{error}). vLLM may still serve it; there is no plan for it."
        ) from None


def _model(folder: Path, config: dict[str, Any], text: dict[str, Any]) -> Model:
    tensors = list(_tensors(folder))
    tied = bool(text.get("tie_word_embeddings", not any(_role(t) == "head" for t in tensors)))
    parameters: dict[Role, int] = dict.fromkeys(("linear", "expert", "head", "embedding", "other"), 0)
    for tensor in tensors:
        role = _role(tensor)
        if not (role == "head" and tied):  # some checkpoints store a tied head once more
            parameters[role] += math.prod(tensor.shape)
    experts = int(_first(text, "num_experts", "num_local_experts", "n_routed_experts", default=0))
    heads = int(_first(text, "num_attention_heads", "n_head"))
    hidden = int(_first(text, "hidden_size", "n_embd"))
    kv_heads = int(_first(text, "num_key_value_heads", default=heads))
    head_dim = int(text.get("head_dim") or hidden // heads)
    layers = int(_first(text, "num_hidden_layers", "n_layer"))
    quantization = config.get("quantization_config") or {}
    return Model(
        path=folder,
        quantization=quantization.get("quant_method"),
        tied=tied,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=int(text["vocab_size"]),
        max_len=int(_first(text, "max_position_embeddings", "n_positions", default=2048)),
        kv_values_per_token=_kv_values(text, layers, kv_heads, head_dim),
        linears=tuple(_linears(tensors)),
        parameters=parameters,
        experts=experts,
        experts_per_token=int(_first(text, "num_experts_per_tok", "moe_topk", default=1)),
        file_bytes=sum(tensor.size for tensor in tensors),
    )


def _first(config: dict[str, Any], *names: str, default: Any = None) -> Any:
    for name in names:
        if config.get(name) is not None:
            return config[name]
    if default is None:
        raise KeyError(" or ".join(names))
    return default


def _kv_values(text: dict[str, Any], layers: int, kv_heads: int, head_dim: int) -> int:
    """Cached numbers a token. Layers with a sliding window count in full: an upper bound."""
    kinds = text.get("layer_types")
    cached = sum(kind not in STATE_LAYERS for kind in kinds) if isinstance(kinds, list) else layers
    if text.get("kv_lora_rank"):  # multi-head latent attention caches one latent vector and one rotary key
        return cached * (int(text["kv_lora_rank"]) + int(text.get("qk_rope_head_dim", 0)))
    return cached * 2 * kv_heads * head_dim


def _tensors(folder: Path) -> Iterator[Tensor]:
    """Every tensor of every safetensors file of the folder. Raises ModelError for none or a damaged one."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(
            f"{folder} holds no .safetensors file, whose headers a plan is made from. Convert the "
            f"checkpoint, or serve it without a plan: vllm serve {folder}"
        )
    for file in files:
        for name, entry in _header(file).items():
            if name == "__metadata__":
                continue
            try:
                begin, end = entry["data_offsets"]
                yield Tensor(name, tuple(map(int, entry["shape"])), int(end) - int(begin))
            except (KeyError, TypeError, ValueError):
                raise ModelError(f"{file}: the header's entry {name!r} is damaged") from None


def _header(file: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file: 8 bytes of length, little-endian, then the text."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(stream.read(length))
        if not isinstance(header, dict):
            raise ValueError("the header is no JSON object")
        return header
    except (OSError, ValueError, struct.error) as error:
        raise ModelError(f"{file} is no whole safetensors file: {error}") from None


@functools.cache
def _words(name: str) -> frozenset[str]:
    return frozenset(name.split("."))


def _role(tensor: Tensor) -> Role:
    words = _words(tensor.name)
    if words & {"lm_head", "embed_out"}:
        return "head"
    if words & {"embed_tokens", "wte", "word_embeddings", "embed_in", "wpe"}:
        return "embedding"
    if "experts" in words and len(tensor.shape) >= 2:
        return "expert"
    if len(tensor.shape) == 2 and "visual" not in words and "vision_tower" not in words:
        return "linear"
    return "other"


def is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is the weight of a linear layer, without head, table, experts and their routers."""
    router = name.endswith((".gate.weight", ".router.weight"))
    return name.endswith(".weight") and not router and _role(Tensor(name, shape, 0)) == "linear"


# What vLLM computes as one matrix, by the words of the parts' names.
_MERGED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


def _linears(tensors: list[Tensor]) -> Iterator[Linear]:
    """The distinct dense shapes, merged as vLLM merges them."""
    rows: dict[tuple[str, int], int] = {}
    for tensor in tensors:
        if _role(tensor) == "linear":
            merged = ".".join(_MERGED.get(word, word) for word in tensor.name.split("."))
            key = (merged, tensor.shape[1])
            rows[key] = rows.get(key, 0) + tensor.shape[0]
    shapes = Counter((n, k) for (_, k), n in rows.items())
    for (n, k), count in sorted(shapes.items(), reverse=True):
        yield Linear(n, k, count)

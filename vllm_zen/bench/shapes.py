"""Models known by their shape only: a config and a tokenizer; vLLM fills in random weights.

Speed does not depend on the values of the weights, so a shape can be measured without a checkpoint.
"""

import json
import math
import struct
from pathlib import Path
from typing import Any

from vllm_zen.errors import BenchmarkError

# Published configurations, the numbers that decide time.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "vocab_size": 2048,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "llama-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "llama-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
}
KINDS = {"qwen3-0.6b": ("Qwen3ForCausalLM", "qwen3")}
MAX_LEN = 32768


def build(name: str, folder: Path) -> Path:
    """Writes the config and tokenizer of a shape into `folder` and returns it: serve it with dummy weights.

    Raises BenchmarkError for an unknown name.
    """
    if name not in SHAPES:
        raise BenchmarkError(f"--shape {name!r} is not known. Allowed: {', '.join(SHAPES)}.")
    architecture, kind = KINDS.get(name, ("LlamaForCausalLM", "llama"))
    config = SHAPES[name] | {
        "architectures": [architecture],
        "model_type": kind,
        "dtype": "bfloat16",
        "max_position_embeddings": MAX_LEN,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    write_empty_weights(folder / "model.safetensors", _tensors(config))
    _write_tokenizer(folder, config["vocab_size"])
    return folder


def _tensors(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of each weight of a decoder, by name."""
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    q, kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    rows = {"q_proj": q, "k_proj": kv, "v_proj": kv}
    shapes = {"model.embed_tokens": (config["vocab_size"], hidden), "model.norm": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{name}": (n, hidden) for name, n in rows.items()}
        shapes |= {f"{at}.self_attn.o_proj": (hidden, q), f"{at}.mlp.down_proj": (hidden, wide)}
        shapes |= {f"{at}.mlp.{name}": (wide, hidden) for name in ("gate_proj", "up_proj")}
        shapes |= {f"{at}.{name}": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def write_empty_weights(file: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A header that says what bf16 weights would be, for a plan, and a hole of their size on the disk."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * 2
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + offset)


def _write_tokenizer(folder: Path, vocabulary: int) -> None:
    """One word a token, so that a prompt of n words is a prompt of n tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(vocabulary - 3))]
    words = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))  # noqa: S106 (no secret)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": MAX_LEN,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))

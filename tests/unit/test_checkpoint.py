"""What a model needs, read from configs and safetensors headers."""

import json
import math
import struct

import models
import pytest

from vllm_zen import checkpoint
from vllm_zen.bench import shapes
from vllm_zen.errors import BenchmarkError, ModelError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}
TENSORS = {
    "model.embed_tokens.weight": (100, 64),
    "model.layers.0.self_attn.q_proj.weight": (64, 64),
    "model.layers.0.self_attn.k_proj.weight": (32, 64),
    "model.layers.0.self_attn.v_proj.weight": (32, 64),
    "model.layers.0.self_attn.q_proj.bias": (64,),
    "model.layers.0.mlp.gate_proj.weight": (96, 64),
    "model.layers.0.mlp.up_proj.weight": (96, 64),
    "model.layers.0.mlp.down_proj.weight": (64, 96),
    "model.norm.weight": (64,),
}


def write(folder, config=CONFIG, tensors=TENSORS, name="model.safetensors"):
    """A checkpoint of headers and holes."""
    (folder / "config.json").write_text(json.dumps(config))
    shapes.write_empty_weights(folder / name, tensors)
    return folder


def test_a_decoder(tmp_path):
    model = checkpoint.read(str(write(tmp_path)))
    assert (model.layers, model.heads, model.kv_heads, model.head_dim) == (2, 4, 2, 16)
    assert model.tied, "there is no head beside the table"
    assert model.kv_values_per_token == 2 * 2 * 2 * 16
    assert model.file_bytes == 2 * sum(map(math.prod, TENSORS.values()))
    assert model.parameters["linear"] == 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64
    assert model.parameters["embedding"] == 6400
    assert model.parameters["other"] == 128
    assert model.read_per_token == model.parameters["linear"] + 6400, "a tied head reads the table"


def test_projections_are_merged_as_vllm_merges_them(tmp_path):
    model = checkpoint.read(str(write(tmp_path)))
    assert {(linear.n, linear.k, linear.count) for linear in model.linears} == {
        (128, 64, 1),  # q, k and v
        (192, 64, 1),  # gate and up
        (64, 96, 1),  # down
    }


def test_a_stored_tied_head_counts_once(tmp_path):
    config = CONFIG | {"tie_word_embeddings": True}
    model = checkpoint.read(str(write(tmp_path, config, TENSORS | {"lm_head.weight": (100, 64)})))
    assert model.tied
    assert model.parameters["head"] == 0


def test_idle_experts_are_not_read(tmp_path):
    experts = {f"model.layers.0.mlp.experts.{i}.up_proj.weight": (8, 64) for i in range(4)}
    config = CONFIG | {"num_experts": 4, "num_experts_per_tok": 1}
    model = checkpoint.read(str(write(tmp_path, config, TENSORS | experts)))
    assert model.parameters["expert"] == 4 * 8 * 64
    dense = checkpoint.read(str(write(tmp_path)))
    assert model.read_per_token - dense.read_per_token == 8 * 64


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({}, 2 * 2 * 2 * 16),
        ({"head_dim": 128}, 2 * 2 * 2 * 128),
        ({"layer_types": ["full_attention", "linear_attention"]}, 1 * 2 * 2 * 16),
        ({"layer_types": ["full_attention", "sliding_attention"]}, 2 * 2 * 2 * 16),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 2 * 576),
    ],
    ids=["plain", "head_dim", "linear attention", "sliding window", "latent"],
)
def test_what_a_token_caches(tmp_path, changes, values):
    assert checkpoint.read(str(write(tmp_path, CONFIG | changes))).kv_values_per_token == values


def test_a_text_configuration_inside_another(tmp_path):
    nested = {"architectures": ["Some"], "text_config": CONFIG}
    assert checkpoint.read(str(write(tmp_path, nested))).hidden == 64


def test_shards_are_added_up(tmp_path):
    write(tmp_path, tensors={"a.weight": (8, 8)}, name="model-00001-of-00002.safetensors")
    write(tmp_path, tensors={"b.weight": (8, 8)}, name="model-00002-of-00002.safetensors")
    assert checkpoint.read(str(tmp_path)).parameters["linear"] == 128


def test_a_model_saved_by_transformers(tmp_path):
    """The headers agree with the tensors a real library wrote."""
    model = checkpoint.read(str(models.build_llama(tmp_path)))
    per_layer = 256 * (256 + 2 * 128) + 256 * 256 + 3 * 256 * 704
    assert model.parameters["linear"] == 2 * per_layer
    assert model.parameters["head"] == model.parameters["embedding"] == 2048 * 256
    assert model.head_dim == 32


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_every_known_shape_can_be_planned(tmp_path, name):
    model = checkpoint.read(str(shapes.build(name, tmp_path)))
    assert model.layers == shapes.SHAPES[name]["num_hidden_layers"]
    size = (tmp_path / "model.safetensors").stat()
    assert size.st_blocks * 512 < 2**20, "the weights are a hole"


def test_an_unknown_shape_is_refused_with_the_list(tmp_path):
    with pytest.raises(BenchmarkError, match=r"llama-70b.*llama-8b"):
        shapes.build("llama-70b", tmp_path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), "no JSON object"),
        (lambda folder: (folder / "config.json").write_text("{}"), "num_attention_heads"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no .safetensors file"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\x01"), "no whole safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 64), "no whole safetensors"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(struct.pack("<Q", 9) + b'{"a": {}}'),
            "entry 'a' is damaged",
        ),
    ],
    ids=["no config", "half a config", "a list", "empty", "no weights", "short", "garbage", "bad entry"],
)
def test_what_is_no_model_is_refused_by_name(tmp_path, damage, words):
    damage(write(tmp_path))
    with pytest.raises(ModelError, match=words):
        checkpoint.read(str(tmp_path))


def test_a_hub_id_that_is_not_in_the_cache_is_refused_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ModelError, match="hf download some/model"):
        checkpoint.find("some/model")

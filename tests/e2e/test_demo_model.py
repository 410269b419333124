"""The real conversion of the demo model, checked against the GGUF file and run through transformers."""

import importlib.util
import json

import numpy as np
import pytest

from vllm_zen import demo
from vllm_zen.errors import DemoModelError

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
HEADS, KV_HEADS, HEAD_SIZE = 9, 3, 64

# GGUF name of a layer's tensor -> name in the checkpoint.
LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


@pytest.fixture(scope="module")
def source():
    for name in ("gguf", "accelerate", "transformers"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"the demo model's conversion needs {name}, which is not installed")
    try:
        return demo.source_gguf()
    except DemoModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def folder(source, tmp_path_factory):
    return demo.prepare(tmp_path_factory.mktemp("cache"), source=source)


@pytest.fixture(scope="module")
def reader(source):
    from gguf import GGUFReader

    return GGUFReader(source)


@pytest.fixture(scope="module")
def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def checkpoint_name(name: str) -> str:
    if not name.startswith("blk."):
        return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[
            name
        ]
    _, layer, kind, _ = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[kind]}.weight"


def undo_rope_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """[heads * size, K] with llama.cpp's rotary pairs side by side -> transformers' two halves."""
    pairs = weight.reshape(heads, HEAD_SIZE // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def test_config_is_plain_bf16_llama(folder):
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    assert config["max_position_embeddings"] == 8192
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2


def test_tensors_are_the_gguf_values_rounded_to_bf16(folder, reader):
    import torch
    from gguf import dequantize
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == {checkpoint_name(tensor.name) for tensor in reader.tensors}
        for tensor in reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type)
            if ".attn_q." in tensor.name:
                values = undo_rope_order(values, HEADS)
            elif ".attn_k." in tensor.name:
                values = undo_rope_order(values, KV_HEADS)
            # A copy: GGUF's f32 tensors are views of a read-only file, which torch warns about.
            expected = torch.from_numpy(np.array(values, dtype=np.float32)).to(torch.bfloat16)
            written = file.get_tensor(checkpoint_name(tensor.name))
            assert written.dtype == torch.bfloat16
            assert torch.equal(written, expected), tensor.name


def test_special_tokens_are_single_ids_and_end_the_answer(tokenizer):
    assert tokenizer.encode("<|im_start|>") == [1]
    assert tokenizer.encode("<|im_end|>") == [2]
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert tokenizer.model_max_length == 8192


def test_chat_template(tokenizer):
    text = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_digits_stand_alone(tokenizer, reader):
    """tokenizer.ggml.pre = smollm splits at every digit before GPT-2's rule sees the white space."""
    assert reader.fields["tokenizer.ggml.pre"].contents() == "smollm"
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode("one\n\n12  3")]
    assert pieces == ["one", "\n\n", "1", "2", "  ", "3"]


@pytest.mark.parametrize(
    "text", ["Grüße, 世界 \U0001f600", "  a\tb\n\n\n c ", "def f(x):\n    return x**2 + 10"]
)
def test_text_survives_the_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_greedy_answer_names_paris_and_stops(folder, tokenizer):
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    prompt = tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.inference_mode():
        tokens = model.generate(**prompt, max_new_tokens=40, do_sample=False)
    answer = tokens[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id

"""Tiny models with random weights and a fixed seed, built on the spot: no hub, no download."""

from pathlib import Path
from typing import Any

import torch

WORDS = ["the", "a", "of", "to", "and", "in", "is", "it", "that", "was", "for", "on", "are", "as", "with"]

SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build_tokenizer(folder: Path, vocabulary: int) -> None:
    """A word-level tokenizer over WORDS and numbered fillers, `vocabulary` entries in all."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<unk>", "<s>", "</s>", *WORDS]
    names += [f"w{number}" for number in range(vocabulary - len(names))]
    tokenizer = Tokenizer(
        models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def build_llama(folder: Path, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    """A Llama of 2 layers, hidden 256, 8 heads, 4 KV heads, vocabulary 2048; `changes` go to LlamaConfig."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{**SMALL, "intermediate_size": 704, **changes})
    return _save(LlamaForCausalLM, config, dtype, folder)


def build_moe(folder: Path, **changes: Any) -> Path:
    """A Qwen3-MoE of 2 layers, hidden 256, 8 experts of 96, 2 a token; `changes` go to Qwen3MoeConfig."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {
        "moe_intermediate_size": 96,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }
    config = Qwen3MoeConfig(**{**SMALL, "intermediate_size": 512, "head_dim": 32, **experts, **changes})
    return _save(Qwen3MoeForCausalLM, config, torch.bfloat16, folder)


def _save(model: Any, config: Any, dtype: torch.dtype, folder: Path) -> Path:
    torch.manual_seed(0)
    model(config).to(dtype).save_pretrained(folder)
    build_tokenizer(folder, config.vocab_size)
    return folder


def build_adapter(base: Path, adapter: Path, merged: Path, strength: float, rank: int = 8) -> None:
    """A random LoRA adapter for every linear layer of a model, and the model with the adapter merged in.

    What it adds to a weight has `strength` of the weight's norm.
    """
    import json

    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    targets, parts = set(), {}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or name == "lm_head":
            continue
        down, up = torch.randn(rank, module.in_features), torch.randn(module.out_features, rank)
        weight = module.weight.data.float()
        up *= strength * weight.norm() / (up @ down).norm()
        down, up = down.bfloat16(), up.bfloat16()
        module.weight.data = (weight + up.float() @ down.float()).bfloat16()
        parts[f"base_model.model.{name}.lora_A.weight"] = down
        parts[f"base_model.model.{name}.lora_B.weight"] = up
        targets.add(name.rpartition(".")[2])
    model.save_pretrained(merged)
    AutoTokenizer.from_pretrained(base).save_pretrained(merged)
    adapter.mkdir(parents=True)
    save_file(parts, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(targets)}
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "bias": "none"}))

"""Layers as the formats of prepared checkpoints hold them, made from random codes: tensors and config.

Every builder returns the tensors of a layer, the quantization_config that belongs to them, and the weight
[N, K] that they stand for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # of eight columns in a word


@dataclass(frozen=True)
class Prepared:
    """A layer of a checkpoint."""

    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]
    weight: torch.Tensor  # float32 [N, K]


def pack_words(codes: torch.Tensor, dim: int) -> torch.Tensor:
    """Eight codes of 0 to 15 along `dim` in each int32, the first lowest."""
    parts = codes.long().unflatten(dim, (-1, 8)).movedim(dim + 1, -1)
    words = (parts << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _int4(n: int, k: int, group: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [n, k], scale in bf16 and zero points [n, groups]."""
    generator = torch.Generator().manual_seed(seed)
    groups = k // group
    codes = torch.randint(0, 16, (n, k), generator=generator)
    scale = (torch.rand(n, groups, generator=generator) * 0.01 + 1e-3).bfloat16()
    return codes, scale, torch.randint(0, 16, (n, groups), generator=generator)


def _weight(codes: Any, scale: torch.Tensor, zero: Any, index: torch.Tensor) -> torch.Tensor:
    zero = zero[:, index] if isinstance(zero, torch.Tensor) else zero
    return (codes.float() - zero) * scale.float()[:, index]


def _index(k: int, group: int, ordered: bool) -> torch.Tensor:
    """The group of each input: in order, or as GPTQ numbers them by activity."""
    index = torch.arange(k) // group
    return index[torch.randperm(k, generator=torch.Generator().manual_seed(7))] if ordered else index


def compressed_tensors_int4(
    n: int, k: int, group: int = 64, *, symmetric: bool = True, ordered: bool = False, seed: int = 0
) -> Prepared:
    """pack-quantized; group = k is one scale an output."""
    codes, scale, zero = _int4(n, k, group, seed)
    index = _index(k, group, ordered)
    tensors = {
        "weight_packed": pack_words(codes, 1),
        "weight_scale": scale,
        "weight_shape": torch.tensor([n, k]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = pack_words(zero, 0)
    if ordered:
        tensors["weight_g_idx"] = index.int()
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group == k else "group",
        "group_size": None if group == k else group,
        "actorder": "group" if ordered else None,
    }
    config = _compressed("pack-quantized", weights, None)
    return Prepared(tensors, config, _weight(codes, scale, 8 if symmetric else zero, index))


def compressed_tensors_int8(
    n: int, k: int, *, per_tensor: bool = False, static: bool = False, zero_point: bool = False, seed: int = 0
) -> Prepared:
    """int-quantized W8A8."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (n, k), generator=generator).to(torch.int8)
    scale = torch.rand(1 if per_tensor else n, 1, generator=generator) * 1e-3 + 1e-4
    tensors = {"weight": codes, "weight_scale": scale.flatten() if per_tensor else scale}
    if static:
        tensors["input_scale"] = torch.tensor([0.03])
    if zero_point:
        tensors["input_zero_point"] = torch.tensor([5], dtype=torch.int8)
    weights = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "tensor" if per_tensor else "channel",
    }
    activations = {
        "num_bits": 8,
        "type": "int",
        "symmetric": not zero_point,
        "strategy": "tensor" if static else "token",
        "dynamic": not static,
    }
    config = _compressed("int-quantized", weights, activations)
    return Prepared(tensors, config, codes.float() * scale.float())


def _compressed(name: str, weights: dict[str, Any], activations: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def gptq(n: int, k: int, group: int = 64, *, ordered: bool = False, seed: int = 0) -> Prepared:
    """AutoGPTQ; group = k is one scale an output."""
    codes, scale, _ = _int4(n, k, group, seed)
    index = _index(k, group, ordered)
    tensors = {
        "qweight": pack_words(codes.t(), 0),
        "scales": scale.t().contiguous(),
        # AutoGPTQ writes zero points less one, here of 8.
        "qzeros": pack_words(torch.full((k // group, n), 7), 1),
        "g_idx": index.int(),
    }
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": -1 if group == k else group,
        "desc_act": ordered,
        "sym": True,
        "lm_head": False,
    }
    return Prepared(tensors, config, _weight(codes, scale, 8, index))


def awq(n: int, k: int, group: int = 64, *, seed: int = 0) -> Prepared:
    """AutoAWQ: packed along the outputs, in an order of its own."""
    codes, scale, zero = _int4(n, k, group, seed)

    def words(rows: torch.Tensor) -> torch.Tensor:
        return pack_words(rows.unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1), 1)

    tensors = {"qweight": words(codes.t()), "qzeros": words(zero.t()), "scales": scale.t().contiguous()}
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Prepared(tensors, config, _weight(codes, scale, zero, _index(k, group, False)))


FORMATS: dict[str, Callable[..., Prepared]] = {
    "int8": compressed_tensors_int8,
    "int8 a scale": lambda n, k, seed=0: compressed_tensors_int8(n, k, per_tensor=True, seed=seed),
    "int8 static": lambda n, k, seed=0: compressed_tensors_int8(n, k, static=True, seed=seed),
    "int8 static zero point": lambda n, k, seed=0: compressed_tensors_int8(
        n, k, static=True, zero_point=True, seed=seed
    ),
    "int4 g32": lambda n, k, seed=0: compressed_tensors_int4(n, k, 32, seed=seed),
    "int4 g64": lambda n, k, seed=0: compressed_tensors_int4(n, k, 64, seed=seed),
    "int4 g128": lambda n, k, seed=0: compressed_tensors_int4(n, k, 128, seed=seed),
    "int4 g128 zero points": lambda n, k, seed=0: compressed_tensors_int4(
        n, k, 128, symmetric=False, seed=seed
    ),
    "int4 g256": lambda n, k, seed=0: compressed_tensors_int4(n, k, 256, seed=seed),
    "int4 a scale an output": lambda n, k, seed=0: compressed_tensors_int4(n, k, k, seed=seed),
    "int4 a zero point an output": lambda n, k, seed=0: compressed_tensors_int4(
        n, k, k, symmetric=False, seed=seed
    ),
    "int4 ordered": lambda n, k, seed=0: compressed_tensors_int4(n, k, 64, ordered=True, seed=seed),
    "gptq g64": gptq,
    "gptq a scale an output": lambda n, k, seed=0: gptq(n, k, k, seed=seed),
    "gptq ordered": lambda n, k, seed=0: gptq(n, k, 32, ordered=True, seed=seed),
    "awq g64": awq,
    "awq g128": lambda n, k, seed=0: awq(n, k, 128, seed=seed),
}

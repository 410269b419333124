"""Mixtures of experts on quantized weights, ours against zentorch's fused op: the grid and both sides."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from vllm_zen import ops_moe, zentorch
from vllm_zen.bench.kernels import OurSide, Point, Side
from vllm_zen.bench.linear import GROUP, ROWS, Weights, limit_of
from vllm_zen.errors import BenchmarkError
from vllm_zen.quantization import weights
from vllm_zen.quantization.settings import Scheme


@dataclass(frozen=True)
class Model:
    """The sizes of a model's mixture."""

    name: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int

    @property
    def expert_values(self) -> int:
        return 3 * self.hidden * self.intermediate


MODELS = (
    Model("qwen3-30b-a3b", 128, 8, 2048, 768),
    Model("olmoe-1b-7b", 64, 8, 2048, 1024),
    Model("mixtral-8x7b", 8, 2, 4096, 14336),
)
SCHEMES = {8: Scheme("int8", rotated=True), 4: Scheme("int4", group=GROUP)}


@functools.lru_cache(maxsize=1)
def _layers(bits: int, model: Model) -> tuple[Weights, Weights]:
    """w13 and w2 of all experts, such that outputs are about as large as inputs."""
    shapes = ((2 * model.intermediate, model.hidden), (model.hidden, model.intermediate))
    w13, w2 = (
        Weights.random(bits, model.experts, columns, k, seed=seed, size=1.7 / k**0.5)
        for seed, (columns, k) in enumerate(shapes)
    )
    return w13, w2


def _experts(layer: Weights) -> Iterator[Weights]:
    return map(Weights, layer.codes, layer.scale)


def _ours(bits: int, layer: Weights) -> dict[str, torch.Tensor]:
    def packed(expert: Weights) -> dict[str, torch.Tensor]:
        if bits == 8:
            return weights.quantize(expert.bf16, SCHEMES[bits], "experts")
        return weights.pack_int4(expert.nibbles, expert.scale, None, GROUP)

    return weights.stacked(map(packed, _experts(layer)), len(layer.codes))


Stored = dict[str, torch.Tensor]


def _stored_int8(layer: Weights) -> Stored:
    return {"weight": layer.codes, "scale": layer.scale}


def _stored_int4(layer: Weights) -> Stored:
    repack = zentorch.ops().zentorch_woq_repack_weight
    packed = weights.stacked(({"weight": repack(codes)} for codes in layer.codes), len(layer.codes))
    return {**packed, "scale": layer.scale.transpose(1, 2).contiguous()}


def _stored_bf16(layer: Weights) -> Stored:
    return weights.stacked(({"weight": expert.bf16} for expert in _experts(layer)), len(layer.codes))


# By bits and name: how zentorch's fused op keeps a layer's experts; bits of the weights that it reads.
STOCK: dict[tuple[int, str], tuple[Callable[[Weights], Stored], int]] = {
    (8, "zentorch int8"): (_stored_int8, 8),
    (8, "zentorch bf16"): (_stored_bf16, 16),
    (4, "zentorch int4"): (_stored_int4, 4),
    (4, "zentorch bf16"): (_stored_bf16, 16),
}


@functools.cache
def _chosen(model: Model, rows: int) -> torch.Tensor:
    """Experts int32 [rows, top_k] that a router without a preference would choose."""
    generator = torch.Generator().manual_seed(2)
    return torch.rand(rows, model.experts, generator=generator).topk(model.top_k).indices.int()


@dataclass(frozen=True)
class Moe(Point):
    """`rows` tokens through the experts they chose, against one path of stock.

    A copy is another choice: the same one counted on by a few experts. The weights exist once.
    """

    bits: int
    model: Model
    rows: int
    against: str

    @property
    def name(self) -> str:
        scheme = "w8a8" if self.bits == 8 else f"w4a8 g{GROUP}"
        return f"{scheme} {self.model.name} M={self.rows} against {self.against}"

    @property
    def limit(self) -> str:
        # Of an expert that is active at all.
        return limit_of(self.rows * self.model.top_k / self._active, self.bits)

    @property
    def _active(self) -> int:
        return len(set(_chosen(self.model, self.rows).flatten().tolist()))

    @property
    def _expert_bytes(self) -> int:
        model = self.model
        if self.bits == 8:
            return model.expert_values + 4 * (2 * model.intermediate + model.hidden)
        return model.expert_values // 2 + 2 * model.expert_values // GROUP

    @property
    def cache_bytes(self) -> int:
        """Of our weights and scales that a choice reads; stock's rates are of the same bytes."""
        return self._active * self._expert_bytes

    def memory_bytes(self, copies: int) -> int:
        """Of both sides, and of the codes they are made from."""
        stock = self.model.expert_values * STOCK[self.bits, self.against][1] // 8
        return self.model.experts * (self._expert_bytes + stock + self.model.expert_values)

    @property
    def work(self) -> float:
        """Bytes read, or operations."""
        if self.limit == "bandwidth":
            return self.cache_bytes
        return 2.0 * self.rows * self.model.top_k * self.model.expert_values

    def sides(self, copies: int) -> tuple[OurSide, Side]:
        """Ours and stock's, over the same weights and choices."""
        if not zentorch.load().usable:
            raise BenchmarkError(f"zentorch's fused op is what there is to compare: {zentorch.load().reason}")
        model = self.model
        step = max(1, model.experts // copies)
        choices = [(_chosen(model, self.rows) + copy * step) % model.experts for copy in range(copies)]
        ours = _Ours(model, self.bits, choices)
        return ours, _Stock(model, self.bits, self.against, choices)


@functools.lru_cache(maxsize=1)
def _our_weights(bits: int, model: Model) -> tuple[dict[str, torch.Tensor], ...]:
    return tuple(_ours(bits, layer) for layer in _layers(bits, model))


@functools.lru_cache(maxsize=1)
def _stock_weights(bits: int, model: Model, against: str) -> tuple[Stored, ...]:
    store, _ = STOCK[bits, against]
    return tuple(store(layer) for layer in _layers(bits, model))


class _Routed:
    """Tokens and, copy by copy, the experts they choose, each of the same weight."""

    def __init__(self, model: Model, choices: list[torch.Tensor]) -> None:
        self._choices = choices
        rows = len(choices[0])
        self._x = torch.randn(rows, model.hidden, generator=torch.Generator().manual_seed(3)).bfloat16()
        self._shares = torch.full((rows, model.top_k), 1 / model.top_k)


class _Ours(_Routed):
    def __init__(self, model: Model, bits: int, choices: list[torch.Tensor]) -> None:
        super().__init__(model, choices)
        self._w13, self._w2 = _our_weights(bits, model)
        self._intermediate = model.intermediate
        self._rotated = SCHEMES[bits].rotated
        self.data = self._w13["weight"]

    def run(self, copy: int) -> torch.Tensor:
        return ops_moe.moe(
            self._x,
            self._w13,
            self._w2,
            self._shares,
            self._choices[copy],
            intermediate=self._intermediate,
            rotated=self._rotated,
        )


class _Stock(_Routed):
    def __init__(self, model: Model, bits: int, against: str, choices: list[torch.Tensor]) -> None:
        super().__init__(model, choices)
        self._w13, self._w2 = _stock_weights(bits, model, against)

    def run(self, copy: int) -> torch.Tensor:
        output = torch.empty_like(self._x)
        zentorch.ops().zentorch_fused_moe(
            output,
            self._x,
            self._w13["weight"],
            self._w2["weight"],
            None,
            None,
            self._shares,
            self._choices[copy],
            False,
            "silu",
            self._w13.get("scale"),
            self._w2.get("scale"),
        )
        return output


def grid() -> Iterator[Moe]:
    """Every point, model by model."""
    for model in MODELS:
        for bits, against in STOCK:
            for rows in ROWS:
                yield Moe(bits, model, rows, against)

"""Mixtures of experts: within a bound of both layers of every expert by their references.

Between the layers stands an activation, whose float32 result may be off by a few roundings. Quantized, that
can move a code by one, no more: the bound; of bf16 it is less. In float32 it is rare, so most values must be
far closer.
"""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from threads import on_threads
from torch.nn.functional import pad

from vllm_zen import ops, ops_linear, ops_moe, reference

SCHEMES = ["int8", "int8 rotated", "int4 g32", "int4 g128 offset", "int4 g32 bf16"]
EXPERTS = 5


@dataclass
class Layer:
    """One of the layers of all experts: stacked operands, and for each its reference and its weight."""

    operands: dict[str, torch.Tensor]
    references: list[partial]
    quantized: list[torch.Tensor]  # what the codes stand for, rotated where the scheme is

    @classmethod
    def random(cls, scheme: str, columns: int, depth: int, bias: bool, seed: int) -> "Layer":
        generator = torch.Generator().manual_seed(seed)
        stacks: dict[str, list[torch.Tensor]] = {}
        references, quantized = [], []
        for _ in range(EXPERTS):
            weight = torch.randn(columns, depth, generator=generator) / depth**0.5
            values = torch.randn(columns, generator=generator) if bias else None
            packed, expected, dense = quantize(scheme, weight)
            parts = {
                "weight": packed.weight,
                "scale": packed.scale,
                "offset": getattr(packed, "offset", None),
            }
            parts["bias"] = None if values is None else pad(values, (0, -columns % 64))
            for name, part in parts.items():
                if part is not None:
                    stacks.setdefault(name, []).append(part)
            references.append(partial(expected, bias=values))
            quantized.append(dense)
        return cls({name: torch.stack(parts) for name, parts in stacks.items()}, references, quantized)


def quantize(scheme: str, weight: torch.Tensor):
    if scheme.startswith("int8"):
        rotated = "rotated" in scheme
        codes, scale = ops.quantize_rows_s8(weight, rotate=rotated)
        packed = ops_linear.Int8Weight.pack(codes, scale, rotated=rotated)
        expected = partial(reference.linear_w8a8, codes=codes, scale=scale, rotated=rotated)
        return packed, expected, codes * scale[:, None]
    group = int(scheme.split()[1][1:])
    codes, scale, offset = ops_linear.search_groups_s4(weight, group, with_offset="offset" in scheme)
    packed = ops_linear.Int4Weight.pack(codes, scale, offset, group)
    linear = reference.linear_w4a16 if "bf16" in scheme else reference.linear_w4a8
    expected = partial(linear, codes=codes, scale=scale, offset=offset, group=group)
    return packed, expected, reference.dequantize_s4(codes, scale, offset, group)


@dataclass
class Experts:
    scheme: str
    w13: Layer
    w2: Layer
    intermediate: int
    activation: str

    @classmethod
    def random(cls, scheme, depth=96, intermediate=72, *, bias=False, activation="silu") -> "Experts":
        w13 = Layer.random(scheme, 2 * intermediate, depth, bias, 0)
        return cls(scheme, w13, Layer.random(scheme, depth, intermediate, bias, 1), intermediate, activation)

    def run(self, x, topk_weights, topk_ids) -> torch.Tensor:
        return ops_moe.moe(
            x,
            self.w13.operands,
            self.w2.operands,
            topk_weights,
            topk_ids,
            intermediate=self.intermediate,
            activation=self.activation,
            rotated="rotated" in self.scheme,
            act_bits=16 if "bf16" in self.scheme else 8,
        )

    def expected(self, x, topk_weights, topk_ids) -> torch.Tensor:
        return reference.experts(
            x, self.w13.references, self.w2.references, topk_weights, topk_ids, self.activation
        )

    def bound(self, x, topk_weights, topk_ids) -> torch.Tensor:
        """A code of every value between the layers moved by one, and x's rounding of a result and the sum."""
        bound = torch.zeros(x.shape)
        for token, row in enumerate(x.unsqueeze(1)):
            for weight, expert in zip(topk_weights[token], topk_ids[token].tolist(), strict=True):
                if expert < 0:
                    continue
                gate, up = self.w13.references[expert](row).float().chunk(2, dim=-1)
                hidden = reference.ACTIVATIONS[self.activation](gate) * up
                result = self.w2.references[expert](hidden)[0].abs()
                turned = reference.rotate(hidden) if "rotated" in self.scheme else hidden
                step = turned.abs().max() / 127
                flips = step * self.w2.quantized[expert].abs().sum(dim=1)
                bound[token] += weight.abs() * (
                    flips * 1.02 + 3 * torch.finfo(x.dtype).eps * (result + flips)
                )
        return bound


def assert_close(experts: Experts, x, topk_weights, topk_ids) -> None:
    got = experts.run(x, topk_weights, topk_ids)
    expected = experts.expected(x, topk_weights, topk_ids)
    assert got.shape == x.shape and got.dtype == x.dtype
    if not x.numel():
        return
    off = (got.float() - expected.float()).abs()
    bound = experts.bound(x, topk_weights, topk_ids)
    assert (off <= bound).all(), f"off by {(off / bound).max():.3f} times the bound"
    # What no code moved for: the roundings of the sums and, in bf16, of three tensors on the way.
    near = 16 * torch.finfo(x.dtype).eps * expected.float().norm(dim=1, keepdim=True) / x.shape[1] ** 0.5
    assert (off <= near).float().mean() > 0.8, f"{(off > near).float().mean():.3f} of the values moved"


def choices(tokens: int, top_k: int, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    weights, ids = scores.softmax(dim=-1).topk(top_k, dim=-1)
    return weights.contiguous(), ids.int().contiguous()


def random_rows(tokens: int, depth: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(tokens, depth, generator=torch.Generator().manual_seed(tokens)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [0, 1, 2, 33])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme(isa, scheme, tokens, dtype):
    assert_close(Experts.random(scheme), random_rows(tokens, 96, dtype), *choices(tokens, 2))


@pytest.mark.parametrize("activation", ops_moe.ACTIVATIONS)
@pytest.mark.parametrize(("depth", "intermediate"), [(1, 1), (17, 35), (130, 129), (390, 64)])
def test_odd_sizes_biases_and_activations(isa, depth, intermediate, activation):
    for scheme in ("int8", "int4 g32"):
        experts = Experts.random(scheme, depth, intermediate, bias=True, activation=activation)
        assert_close(experts, random_rows(7, depth, torch.float32), *choices(7, 3))


@pytest.mark.parametrize("scheme", ["int8 rotated", "int4 g128 offset", "int4 g32 bf16"])
def test_any_number_of_threads_and_any_company_give_the_same(isa, scheme):
    """Experts with hundreds of tokens and with none; a token alone gets what it gets among others."""
    experts = Experts.random(scheme, 256, 192)
    x, (weights, ids) = random_rows(600, 256), choices(600, 2)
    ids[ids == 3] = 1
    results = on_threads(lambda: experts.run(x, weights, ids))
    assert torch.equal(*results)
    for token in (0, 5, 599):
        alone = experts.run(*(tensor[token : token + 1].contiguous() for tensor in (x, weights, ids)))
        assert torch.equal(alone[0], results[0][token])


def test_one_choice_and_experts_of_other_ranks(isa):
    experts = Experts.random("int8")
    x = random_rows(6, 96, torch.float32)
    assert_close(experts, x, *choices(6, 1))
    weights, ids = choices(6, 2)
    ids[:, 1] = -1
    assert_close(experts, x, weights, ids)
    assert not experts.run(x, weights, torch.full_like(ids, -1)).any()


def test_a_fault_stays_in_its_token(isa):
    for scheme in SCHEMES:
        experts = Experts.random(scheme)
        x, (weights, ids) = random_rows(8, 96), choices(8, 2)
        clean = experts.run(x, weights, ids)
        x[3, 7] = float("nan")
        faulty = experts.run(x, weights, ids)
        others = torch.arange(8) != 3
        assert torch.equal(faulty[others], clean[others])
        assert faulty[3].isnan().all()


def test_more_pairs_than_are_worked_on_at_a_time(isa):
    """16 Ki pairs are; what a token gets does not change where they are cut."""
    experts = Experts.random("int8", 32, 16)
    x, (weights, ids) = random_rows(9000, 32), choices(9000, 2)
    whole = experts.run(x, weights, ids)
    tail = experts.run(x[8000:], weights[8000:], ids[8000:])
    assert torch.equal(whole[8000:], tail)


def test_wrong_arguments_are_named(isa):
    experts = Experts.random("int8")
    x, (weights, ids) = random_rows(4, 96), choices(4, 2)
    wrong = [
        ("x must be bfloat16 or float32, got Half", (x.half(), weights, ids)),
        ("x must have the weight's K, 93 to 96, got 80", (x[:, :80].contiguous(), weights, ids)),
        ("topk_ids must be below 5, got 5", (x, weights, torch.full_like(ids, 5))),
        ("topk_ids must be Int, got Long", (x, weights, ids.long())),
        (r"topk_weights and topk_ids must be \[4, top_k\]", (x, weights[:3].contiguous(), ids)),
        ("x must be contiguous", (torch.cat([x, x], dim=1)[:, :96], weights, ids)),
    ]
    for message, arguments in wrong:
        with pytest.raises(RuntimeError, match=message):
            experts.run(*arguments)
    for changes, message in (
        ({"activation": "relu"}, "activation must be silu, gelu or gelu_tanh, got relu"),
        ({"act_bits": 16}, "act_bits must be 8 for int8 weights, got 16"),
        ({"intermediate": 60}, "columns must fill the weight's 3 blocks of 64, got 120"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops_moe.moe(
                x,
                experts.w13.operands,
                experts.w2.operands,
                weights,
                ids,
                **{"intermediate": 72, "activation": "silu", **changes},
            )

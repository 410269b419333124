"""What a user may choose about quantization, checked, and the scheme that a layer gets from it.

Read from `--additional-config '{"vllm_zen": {"quantization": {...}}}'`.
"""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vllm_zen.errors import UnsupportedError

Bits = Literal["int8", "int4", "bf16"]

INT8, INT4 = "zen_int8", "zen_int4"
SCHEMES = ("int8", "int4", "bf16")
# Every key, what it takes, and the values allowed.
ALLOWED: dict[str, tuple[Any, ...]] = {
    "group_size": (32, 64, 128),
    "act_bits": (8, 16),
    "zero_points": (True, False),
    "rotate": (True, False),
    "head": SCHEMES,
    "embedding": ("bf16", "head"),
}


@dataclass(frozen=True)
class Scheme:
    """How a layer's weight is held."""

    bits: Bits
    group: int = 0  # int4
    zero_points: bool = False  # int4
    act_bits: int = 8
    rotated: bool = False  # int8

    def __str__(self) -> str:
        """For the start-up line: `int8 (w8a8)`, `int4 g128 (w4a8)`, `bf16`."""
        if self.bits == "bf16":
            return "bf16"
        zero_points = " zero points" if self.zero_points else ""
        group = f" g{self.group}{zero_points}" if self.bits == "int4" else ""
        rotated = ", rotated" if self.rotated else ""
        return f"{self.bits}{group} (w{self.bits[-1]}a{self.act_bits}{rotated})"


@dataclass(frozen=True)
class Settings:
    """The choices of one engine."""

    # Weights that share a scale, along the inputs; int4 only.
    group_size: int = 128
    # Activations of int4 layers: int8, a scale a token and group, or bf16.
    act_bits: int = 8
    # int4 with a zero point a group.
    zero_points: bool = False
    # int8: weights and activations are rotated before they are quantized, so that no outlier sets a scale.
    rotate: bool = True
    # The output head.
    head: Bits = "int8"
    # Look-up of token embeddings that are tied to the head: a table in bf16, or the head's int8 rows.
    embedding: Literal["bf16", "head"] = "bf16"
    # Schemes of single layers, by patterns of their names; the first that matches counts.
    layers: dict[str, Bits] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, given: Any, where: str) -> "Settings":
        """Checks keys and values. Raises UnsupportedError with the bad one and what is allowed."""
        keys = [*ALLOWED, "layers"]
        if not isinstance(given, dict) or not set(given) <= set(keys):
            raise UnsupportedError(
                f"{where} holds {given!r}; it takes an object with the keys {', '.join(keys)}."
            )
        for name, value in given.items():
            allowed = ALLOWED.get(name)
            # `in` alone would take True for 1.
            if allowed is not None and not any(
                value is a or (type(value) is type(a) and value == a) for a in allowed
            ):
                raise UnsupportedError(f"{where}.{name}={value!r} must be one of {_list(allowed)}.")
        layers = given.get("layers", {})
        if not isinstance(layers, dict) or not all(scheme in SCHEMES for scheme in layers.values()):
            raise UnsupportedError(
                f'{where}.layers={layers!r} must map patterns of layer names, as "*.mlp.*", to one of '
                f"{_list(SCHEMES)}."
            )
        settings = cls(**given)
        if settings.embedding == "head" and settings.head != "int8":
            raise UnsupportedError(f'{where}: embedding="head" reads int8 rows and needs head="int8".')
        return settings

    def scheme(self, bits: Bits) -> Scheme:
        """The scheme of that many bits, with these choices."""
        if bits == "int4":
            return Scheme(bits, self.group_size, self.zero_points, self.act_bits)
        return Scheme(bits, rotated=bits == "int8" and self.rotate)

    def scheme_of(self, method: str, names: Sequence[str]) -> Scheme:
        """The scheme of a layer known by `names`: its own, and those of the layers fused into it.

        Raises UnsupportedError where a pattern names some of the fused layers only.
        """
        for pattern, bits in self.layers.items():
            matches = [fnmatch.fnmatchcase(name, pattern) for name in names]
            if matches[0] or (len(names) > 1 and all(matches[1:])):
                return self.scheme(bits)
            if any(matches):
                raise UnsupportedError(
                    f"layers: {pattern!r} names a part of {names[0]}, which vLLM fuses from "
                    f"{', '.join(names[1:])}. Name all of them, or {names[0]}."
                )
        return self.scheme("int8" if method == INT8 else "int4")


def _list(values: Sequence[Any]) -> str:
    return ", ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in values)

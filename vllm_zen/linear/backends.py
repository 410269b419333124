"""The backends of an unquantized linear layer. Each says whether it supports a weight, and attaches itself.

A backend attaches by setting `layer.cpu_linear`, which vLLM calls as cpu_linear(x, weight, bias) with
x [..., K], weight the layer's own (empty once freed) and bias [N] or None, and expects [..., N].
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch.nn import Parameter

from vllm_zen import compat, envs, zentorch


class Support(NamedTuple):
    """Whether a backend takes a weight, and the reason when it does not."""

    ok: bool
    reason: str = ""


class Backend(Protocol):
    """What dispatch needs of a backend."""

    name: str

    def supports(self, weight: torch.Tensor) -> Support:
        """Whether this backend runs a layer of weight [N, K] here."""

    def attach(self, layer: Any, remove_weight: bool) -> str:
        """Makes the layer run on this backend; returns its name for reports, with details."""


def free_weight(layer: Any, name: str = "weight") -> None:
    """Replaces layer.weight by an empty parameter of its dtype. Whoever shares the old one keeps it."""
    empty = torch.empty(0, dtype=getattr(layer, name).dtype)
    setattr(layer, name, Parameter(empty, requires_grad=False))


# ZenDNN keeps its own reordered copy of a weight that was not packed, found by address and shape. A second
# weight at the address of a freed one would be computed with the first one's numbers.
_never_freed: list[torch.Tensor] = []


class ZentorchBackend:
    """zentorch_linear_unary, on weights packed once where the environment allows it."""

    name = "zentorch"

    def supports(self, weight: torch.Tensor) -> Support:
        """By dtype and CPU; every shape is served."""
        return Support(*zentorch.supports_linear(weight.dtype))

    def attach(self, layer: Any, remove_weight: bool) -> str:
        """Packs the weight if that is on. The operand is a buffer, so a traced graph takes it as an input."""
        linear_unary = zentorch.ops().zentorch_linear_unary
        packed = envs.weight_prepack() and zentorch.prepack_agrees()[0]
        weight = layer.weight.detach()
        if packed:
            weight = zentorch.ops().zentorch_weight_prepack_for_linear(weight)
        else:
            _never_freed.append(weight)
        layer.register_buffer("zen_weight", weight, persistent=False)

        def cpu_linear(x: torch.Tensor, _: torch.Tensor, bias: torch.Tensor | None) -> Any:
            return linear_unary(x, layer.zen_weight, bias, is_weight_prepacked=packed)

        layer.cpu_linear = cpu_linear
        if remove_weight:
            free_weight(layer)
        return "zentorch (prepacked)" if packed else "zentorch"


class VllmBackend:
    """vLLM's own path for this layer: SGL where the CPU has AMX, oneDNN elsewhere."""

    name = "vllm"

    def supports(self, weight: torch.Tensor) -> Support:
        """Everything vLLM runs."""
        return Support(True)

    def attach(self, layer: Any, remove_weight: bool) -> str:
        """Lets vLLM choose."""
        compat.stock_dispatch(layer, remove_weight)
        return "vllm"


class TorchBackend:
    """torch.nn.functional.linear on the weight as it is."""

    name = "torch"

    def supports(self, weight: torch.Tensor) -> Support:
        """Everything torch runs."""
        return Support(True)

    def attach(self, layer: Any, remove_weight: bool) -> str:
        """Keeps the weight whatever remove_weight says: it is the operand."""
        layer.cpu_linear = torch.nn.functional.linear
        return "torch"


BACKENDS: tuple[Backend, ...] = (ZentorchBackend(), VllmBackend(), TorchBackend())

"""Who runs each unquantized linear layer: decided once, at load, and counted for the start-up line."""

import dataclasses
import functools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from vllm_zen import compat, envs
from vllm_zen.activation import logger
from vllm_zen.errors import UnsupportedError
from vllm_zen.linear.backends import BACKENDS, Backend
from vllm_zen.options import Options

# Layers by what serves them, of the model this process loaded last.
_served_by: Counter[str] = Counter()


def summary() -> str:
    """What serves the loaded model's layers: `zentorch (prepacked)`, or counts where it is more than one."""
    if not _served_by:
        return "none"
    if len(_served_by) == 1:
        return next(iter(_served_by))
    return ", ".join(f"{name} x{count}" for name, count in _served_by.most_common())


def count(name: str) -> None:
    """Counts a layer that `name` serves, for summary()."""
    _served_by[name] += 1


def forget() -> None:
    """Starts the counts of summary() again: a process may load one model after another."""
    _served_by.clear()


def dispatch(layer: Any, remove_weight: bool) -> None:
    """Attaches a backend to a layer whose weight is loaded; vLLM calls this for every unquantized layer.

    With remove_weight, a backend that keeps its own copy of the weight frees layer.weight (numel 0).
    Raises UnsupportedError when VLLM_ZEN_LINEAR forces a backend that cannot run the layer.
    """
    if layer.weight.is_meta or layer.weight.ndim != 2:
        compat.stock_dispatch(layer, remove_weight)  # convolutions and expert weights have their own methods
    elif _is_embedding(layer):
        _attach_on_first_use(layer)
    elif _is_head(layer):
        _attach_head(layer, _HeadPolicy.of_current_model())
    else:
        _attach(layer, remove_weight)


def choose(weight: torch.Tensor) -> Backend:
    """The backend for a weight [N, K]: the one VLLM_ZEN_LINEAR forces, else the first that supports it.

    Raises UnsupportedError when the forced one does not.
    """
    backend, reasons = select(weight)
    if backend is not None:
        if reasons:
            _say_fallback(backend.name, "; ".join(reasons))
        return backend
    raise UnsupportedError(
        f"{envs.LINEAR.name}={envs.linear()} cannot run a layer of {tuple(weight.shape)}, {weight.dtype}: "
        f"{'; '.join(reasons)}. Use {envs.LINEAR.name}=auto."
    )


def select(weight: torch.Tensor) -> tuple[Backend | None, list[str]]:
    """The same without a word: the backend or None, and why those before it cannot."""
    wanted = envs.linear()
    reasons: list[str] = []
    for backend in BACKENDS:
        if wanted not in ("auto", backend.name):
            continue
        support = backend.supports(weight)
        if support.ok:
            return backend, reasons
        reasons.append(support.reason)
    return None, reasons


def _attach(layer: Any, remove_weight: bool) -> str:
    name = choose(layer.weight).attach(layer, remove_weight)
    count(name)
    return name


def _is_head(layer: Any) -> bool:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    return isinstance(layer, ParallelLMHead)


def _is_embedding(layer: Any) -> bool:
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return isinstance(layer, VocabParallelEmbedding) and not _is_head(layer)


@dataclass(frozen=True)
class _HeadPolicy:
    """How an output head treats its weight."""

    tied: bool  # the embedding table is the same tensor and must stay
    pack_tied: bool  # a tied head may hold a packed copy beside the table
    weight_is_read: bool  # something beside the layer reads its weight later

    @classmethod
    def of_current_model(cls) -> "_HeadPolicy":
        """From vLLM's current configuration, which is set while a model loads."""
        from vllm.config import get_current_vllm_config_or_none

        config = get_current_vllm_config_or_none()
        if config is None or config.model_config is None:
            return cls(tied=False, pack_tied=True, weight_is_read=False)
        model = config.model_config
        return cls(
            tied=bool(getattr(model.hf_text_config, "tie_word_embeddings", False)),
            pack_tied=Options.from_additional_config(config.additional_config).pack_tied_head,
            # LoRA and a head in another dtype use the plain weight; a draft model's head is compared with
            # the target's to decide whether they share one, and two freed weights would look equal.
            weight_is_read=config.lora_config is not None
            or config.speculative_config is not None
            or model.head_dtype != model.dtype,
        )


def _attach_on_first_use(layer: Any) -> None:
    """Leaves an embedding table alone until it is used as a head.

    Most tables are only looked up, and packing one would double it for nothing. Some models with tied
    embeddings use the table's own module as their head; the first step then attaches it, and vLLM's warm-up
    runs that step before the first request. Heads are outside the compiled graph.
    """
    policy = dataclasses.replace(_HeadPolicy.of_current_model(), tied=True)

    def cpu_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        _attach_head(layer, policy)
        return layer.cpu_linear(x, weight, bias)

    layer.cpu_linear = cpu_linear


def _attach_head(layer: Any, policy: _HeadPolicy) -> None:
    """The output head: an untied one gives up its original, a tied one is packed unless told otherwise."""
    if policy.tied and not policy.pack_tied:
        layer.cpu_linear = torch.nn.functional.linear
        count("torch (tied head)")
        return
    size = layer.weight.nbytes
    backend = _attach(layer, remove_weight=not policy.tied and not policy.weight_is_read)
    if policy.tied and backend != "torch":
        logger.info(
            "the tied output head is packed beside the embedding table: %.0f MiB more, for faster decoding. "
            'Off: --additional-config \'{"vllm_zen": {"pack_tied_head": false}}\'',
            size / 2**20,
        )


@functools.cache
def _say_fallback(backend: str, reason: str) -> None:
    logger.info("linear layers run on %s: %s", backend, reason)

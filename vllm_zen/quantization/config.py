"""What vLLM is told: the methods `zen_int8` and `zen_int4`, by name."""

from collections import Counter
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import get_quantization_config, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from vllm_zen.errors import UnsupportedError
from vllm_zen.options import Options
from vllm_zen.quantization import act_order, experts, weights
from vllm_zen.quantization.methods import ZenEmbeddingMethod, ZenHeadMethod, ZenLinearMethod
from vllm_zen.quantization.settings import INT4, INT8, Scheme, Settings


class ZenConfig(QuantizationConfig):  # type: ignore[misc]
    """Quantizes a bf16 or float32 checkpoint on load."""

    name = ""

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__()
        self._settings = settings
        self.progress = weights.Progress()
        self.schemes: dict[str, Scheme] = {}  # of the layers made so far
        self.experts: Scheme | None = None  # of the last layer of experts
        self.head: Scheme | None = None

    @property
    def settings(self) -> Settings:
        """Those given, else those of the current engine's --additional-config."""
        if self._settings is None:
            config = get_current_vllm_config_or_none()
            given = config.additional_config if config is not None else {}
            self._settings = Options.from_additional_config(given).quantization
        return self._settings

    @classmethod
    def get_name(cls) -> str:
        """The method's name, as --quantization takes it."""
        return cls.name

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Of the model."""
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """A matter of GPUs."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: there is nothing to read beside the weights."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ZenConfig":
        """From a dictionary of settings."""
        return cls(Settings.from_dict(config, cls.name))

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> None:
        """vLLM asks for every quantized checkpoint: this one cannot be quantized again."""
        if user_quant == cls.name:
            raise UnsupportedError(
                f"--quantization {cls.name} quantizes bf16 and float32 checkpoints, and this one is already "
                f"quantized ({hf_quant_cfg.get('quant_method', 'by an unnamed method')}). Leave "
                "--quantization out to serve it as it is."
            )

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """The method of a layer, or None for vLLM's own."""
        if isinstance(layer, LinearBase):
            scheme = self.schemes[prefix] = self._scheme_of(prefix)
            if scheme.bits == "bf16":
                return UnquantizedLinearMethod()
            return ZenLinearMethod(scheme, prefix, self.progress)
        if isinstance(layer, ParallelLMHead):
            self.head = self.settings.scheme(self.settings.head)
            if self.head.bits == "bf16":
                return None
            from_head = self.settings.embedding == "head"
            return ZenHeadMethod(self.head, prefix, self.progress, embedding_from_head=from_head)
        if isinstance(layer, VocabParallelEmbedding):
            return ZenEmbeddingMethod() if self.settings.embedding == "head" else None
        if isinstance(layer, RoutedExperts):
            method, self.experts = experts.method_of(layer, self._scheme_of(prefix), prefix, self.progress)
            return method
        return None

    def _scheme_of(self, prefix: str) -> Scheme:
        parent, _, last = prefix.rpartition(".")
        if last == "kv_b_proj":
            return Scheme("bf16")  # MLA attention reads its weight
        parts = self.packed_modules_mapping.get(last, [])
        names = [prefix, *(f"{parent}.{part}" for part in parts)]
        return self.settings.scheme_of(self.name, names)

    def describe(self) -> str:
        """For the start-up line: `zen_int4 g128 (w4a8), head int8`."""
        counts = Counter(str(scheme) for scheme in self.schemes.values())
        if len(counts) == 1:
            parts = ["zen_" + next(iter(counts))]
        else:
            parts = [f"{self.name}: " + " + ".join(f"{count} x {scheme}" for scheme, count in counts.items())]
        if self.experts is not None:
            parts.append(f"experts {self.experts.bits}")
        if self.head is not None:
            parts.append(f"head {self.head.bits}")
        if self.settings.embedding == "head":
            parts.append("embedding from the head")
        return ", ".join(parts)


class ZenInt8Config(ZenConfig):
    """W8A8: a scale an output of weights, and a scale a token and 256 inputs of activations."""

    name = INT8


class ZenInt4Config(ZenConfig):
    """W4A8 in groups; W4A16 by `act_bits`."""

    name = INT4


def register() -> None:
    """Tells vLLM the methods' names. Again: nothing. Raises UnsupportedError where another plugin has one."""
    act_order.register()
    for config in (ZenInt8Config, ZenInt4Config):
        try:
            existing = get_quantization_config(config.name)
        except ValueError:
            register_quantization_config(config.name)(config)
            continue
        if existing is not config:
            raise UnsupportedError(
                f"the quantization method {config.name} is already {existing.__module__}."
                f"{existing.__qualname__}. Uninstall the plugin that registers it."
            )

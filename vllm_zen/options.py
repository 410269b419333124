"""What a user may set through vLLM's --additional-config, under the key `vllm_zen`."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from vllm_zen.errors import UnsupportedError
from vllm_zen.quantization.settings import Settings

KEY = "vllm_zen"


@dataclass(frozen=True)
class Options:
    """The options of one engine."""

    # Pack a tied output head beside the embedding table. Costs vocabulary x hidden x 2 bytes in bf16.
    pack_tied_head: bool = True
    # Of --quantization zen_int8 and zen_int4.
    quantization: Settings = dataclasses.field(default_factory=Settings)

    @classmethod
    def from_additional_config(cls, additional_config: Any) -> "Options":
        """Reads the `vllm_zen` entry. Raises UnsupportedError with the bad key or value and what it takes."""
        given = additional_config.get(KEY, {}) if isinstance(additional_config, dict) else {}
        allowed = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(given, dict) or not set(given) <= set(allowed):
            raise UnsupportedError(
                f"--additional-config: {KEY!r} holds {given!r}; it takes an object with the keys "
                f"{', '.join(allowed)}."
            )
        values = dict(given)
        for name, value in given.items():
            if name == "quantization":
                values[name] = Settings.from_dict(value, f"--additional-config: {KEY}.{name}")
            elif not isinstance(value, bool):
                raise UnsupportedError(f"--additional-config: {KEY}.{name}={value!r} must be true or false.")
        return cls(**values)

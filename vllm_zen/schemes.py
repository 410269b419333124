"""The schemes that `eval` and `bench serve` compare, by name, as vLLM's arguments. Standard library only."""

import json
from collections.abc import Sequence
from typing import Any

# Engine arguments by scheme.
SCHEMES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "int8": {"quantization": "zen_int8"},
    "int4": {"quantization": "zen_int4"},
}
for _name, _settings in {
    "int4-g32": {"group_size": 32},
    "int4-g64": {"group_size": 64},
    "int4-zp": {"zero_points": True},
    "int4-g32-zp": {"group_size": 32, "zero_points": True},
}.items():
    SCHEMES[_name] = {
        "quantization": "zen_int4",
        "additional_config": {"vllm_zen": {"quantization": _settings}},
    }


def server_arguments(scheme: str) -> list[str]:
    """The scheme as `vllm serve` takes it."""
    arguments = []
    for name, value in SCHEMES[scheme].items():
        text = value if isinstance(value, str) else json.dumps(value)
        arguments += ["--" + name.replace("_", "-"), text]
    return arguments


def unknown(schemes: Sequence[str]) -> str:
    """What is wrong with a list of schemes, or empty."""
    wrong = [scheme for scheme in schemes if scheme not in SCHEMES]
    if not wrong and schemes:
        return ""
    return f"--schemes: {', '.join(wrong) or 'none'}; allowed: {', '.join(SCHEMES)}."

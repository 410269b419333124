"""The start-up line: what serves this worker, in one line."""

from typing import Any

import torch

from vllm_zen import __version__, activation, host, ops, zentorch
from vllm_zen.attention import choice
from vllm_zen.linear import dispatch
from vllm_zen.quantization.settings import INT4, INT8


def startup_line(quant_config: Any = None) -> str:
    """CPU, table of kernels, zentorch, linear backends, attention and threads, as this process has them.

    quant_config is vLLM's, or None.
    """
    native = ops.load()
    quantized = getattr(quant_config, "name", None) in (INT8, INT4)
    parts = [
        f"vllm-zen {__version__}: {activation.decide().info.describe()}",
        f"isa {ops.isa()}" if native.ok else f"no native kernels ({native.reason})",
        zentorch.load().describe(),
        f"linear {quant_config.describe() if quantized else dispatch.summary()}",
        f"attention {choice.summary()}",
        f"{torch.get_num_threads()} threads on {host.format_cpu_list(host.bound_cpus())}",
    ]
    return " | ".join(parts)

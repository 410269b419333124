"""The start-up line: what serves this worker, in one line."""

import torch

from vllm_zen import __version__, activation, host, ops, zentorch
from vllm_zen.attention import choice
from vllm_zen.linear import dispatch


def startup_line() -> str:
    """CPU, table of kernels, zentorch, linear backends, attention and threads, as this process has them."""
    native = ops.load()
    parts = [
        f"vllm-zen {__version__}: {activation.decide().info.describe()}",
        f"isa {ops.isa()}" if native.ok else f"no native kernels ({native.reason})",
        zentorch.load().describe(),
        f"linear {dispatch.summary()}",
        f"attention {choice.summary()}",
        f"{torch.get_num_threads()} threads on {host.format_cpu_list(host.bound_cpus())}",
    ]
    return " | ".join(parts)

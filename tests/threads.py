"""The same work on several numbers of threads."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


def on_threads(run: Callable[[], Any], counts: Sequence[int] = (1, 2)) -> list[Any]:
    """What run() gives with each number of torch's threads, which is then what it was."""
    before = torch.get_num_threads()
    results = []
    try:
        for count in counts:
            torch.set_num_threads(count)
            results.append(run())
    finally:
        torch.set_num_threads(before)
    return results

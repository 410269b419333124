"""Fixes of torch for releases that lack them. The one place that asks for a version.

pyproject.toml asks for torch 2.13, which needs none of these: the one below is for an installation that was
made to run on torch 2.10 all the same, where every compilation would otherwise miss the cache.
"""

import functools
import re
from typing import Any

_PATCHED = "_vllm_zen_backport"


def needs_pickler_backport(torch_version: str) -> bool:
    """Whether this torch is 2.10.x, the release with the fault below."""
    match = re.match(r"(\d+)\.(\d+)", torch_version)
    return match is not None and (int(match[1]), int(match[2])) == (2, 10)


def patch_pickler(pickler: type[Any], bypass: type[Exception]) -> bool:
    """Makes `pickler.dumps` raise `bypass` where it raised ValueError. True if this call changed it.

    Symptom: a packed weight is a view into a larger buffer, which torch 2.10's FxGraphCachePickler.dumps
    answers with a ValueError it does not catch, so every compilation misses the cache.
    Upstream: pytorch PR 176557, in torch 2.11. Delete when: nobody runs vLLM 0.32 on torch 2.10.
    """
    original = pickler.dumps
    if hasattr(original, _PATCHED):
        return False

    @functools.wraps(original)
    def dumps(self: Any, obj: Any) -> bytes:
        try:
            return original(self, obj)  # type: ignore[no-any-return]
        except ValueError as error:
            raise bypass(f"not cacheable: {error}") from error

    setattr(dumps, _PATCHED, True)
    pickler.dumps = dumps
    return True


def apply() -> None:
    """Patches the running torch if it is one that needs it. Idempotent."""
    import torch

    if not needs_pickler_backport(torch.__version__):
        return
    from torch._inductor.codecache import BypassFxGraphCache, FxGraphCachePickler

    patch_pickler(FxGraphCachePickler, BypassFxGraphCache)

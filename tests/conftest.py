"""What the whole suite shares: it tests the installed package, and its children see neither HOME nor hub."""

import os
from pathlib import Path

import pytest

import vllm_zen

ROOT = Path(__file__).resolve().parent.parent

# The source folder has no native library: a suite that imported it would skip or fake what it should test.
assert not Path(vllm_zen.__file__).is_relative_to(ROOT / "vllm_zen"), (
    "the tests must import the installed vllm_zen, not the source folder: run scripts/test"
)

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")


@pytest.fixture(scope="session")
def platform_environment() -> dict[str, str]:
    """What makes the Zen platform active here: nothing on Zen 4 and later, the ref kernels elsewhere."""
    from vllm_zen import activation

    return {} if activation.decide(environ={}).active else {"VLLM_ZEN_ISA": "ref"}

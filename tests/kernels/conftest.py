"""Kernel tests run on every table this machine can, by force, and with one and two threads."""

from collections.abc import Iterator

import pytest
import torch

from vllm_zen import ops


@pytest.fixture(params=["ref", "zen4"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    status = ops.load()
    assert status.ok, status.reason
    before = ops.isa()
    try:
        ops.force_isa(request.param)
    except RuntimeError as error:
        pytest.skip(str(error))
    yield request.param
    ops.force_isa(before)


@pytest.fixture(params=[1, 2], ids=["1thread", "2threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)

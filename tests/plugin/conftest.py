"""A process group of one and a tiny model's configuration, so that real vLLM layers can be built."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from models import build_llama


@contextlib.contextmanager
def restored_environment() -> Iterator[None]:
    """vLLM's CPU platform and ours write to the environment (LD_PRELOAD, bindings): not for later tests."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    with restored_environment():
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "auto"
        os.environ.pop("VLLM_CPU_NUM_OF_RESERVED_CPU", None)
        yield


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models that differ in whether the output head is tied to the embedding table."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "untied": build_llama(folder / "untied"),
        "tied": build_llama(folder / "tied", tie_word_embeddings=True),
    }


@pytest.fixture(scope="session")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    rendezvous = tmp_path_factory.mktemp("group") / "rendezvous"
    with restored_environment(), set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{rendezvous}", 0, backend="gloo")
        initialize_model_parallel(1, 1)
    yield
    cleanup_dist_env_and_memory()


@pytest.fixture
def engine_config(tiny_models: dict[str, Path], process_group: None) -> Any:
    """engine_config(name, **engine arguments): the VllmConfig vLLM makes for one of the tiny models."""
    from vllm.engine.arg_utils import EngineArgs

    def make(name: str, **arguments: Any) -> Any:
        return EngineArgs(model=str(tiny_models[name]), **arguments).create_engine_config()

    return make

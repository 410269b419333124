"""A process group of one and a tiny model's configuration, so that real vLLM layers can be built."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from models import build_llama


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The platform writes the thread binding into the environment; it must not reach later tests."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "auto")


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
    with set_current_vllm_config(VllmConfig()):
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

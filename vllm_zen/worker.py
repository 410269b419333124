"""The worker process: vLLM's own, on its own cores, and the start-up line once its weights are in place."""

from typing import TYPE_CHECKING, Any

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_zen import compat, ray_worker, report
from vllm_zen.activation import logger
from vllm_zen.linear import dispatch

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class ZenWorker(CPUWorker):  # type: ignore[misc]
    """CPUWorker that binds itself where nobody else does, and says what it runs on."""

    def __init__(self, vllm_config: "VllmConfig", *args: Any, **kwargs: Any) -> None:
        if vllm_config.parallel_config.use_ray:
            ray_worker.prepare()  # before vLLM looks at the CPUs to choose the memory node
        super().__init__(vllm_config, *args, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads the model, then logs what serves it."""
        dispatch.forget()
        super().load_model(*args, **kwargs)
        compat.allocate_pipeline_input(self.model_runner)
        logger.info(report.startup_line(self.vllm_config.quant_config))

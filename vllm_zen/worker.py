"""The worker process: vLLM's own, plus the start-up line once its weights are in place."""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_zen import report
from vllm_zen.activation import logger


class ZenWorker(CPUWorker):  # type: ignore[misc]
    """CPUWorker that says what it runs on."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads the model, then logs what serves it."""
        super().load_model(*args, **kwargs)
        logger.info(report.startup_line())

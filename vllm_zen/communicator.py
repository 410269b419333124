"""Between ranks: shared memory where they share it, torch's gloo where they do not."""

import os
from pathlib import Path
from typing import Any

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

IDENTITY = "VLLM_DIST_IDENT"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108


class ZenCommunicator(CpuCommunicator):  # type: ignore[misc]
    """CpuCommunicator that does not take another machine's rank for a neighbour.

    vLLM compares the names that the ranks of a group would give their shared memory. Over TCP that name is
    made of the port, which is the same on every machine, so two machines each wait in a memory of their own
    (vllm/v1/worker/cpu_worker.py, init_device). With the memory itself in the name they fall back to gloo.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        name, ours = os.environ[IDENTITY], f"@{shared_memory_identity()}"
        if not name.endswith(ours):
            os.environ[IDENTITY] = name + ours
        super().__init__(*args, **kwargs)


def shared_memory_identity(boot_id: Path = BOOT_ID, memory: Path = SHARED_MEMORY) -> str:
    """The same text in two processes only if a segment that one makes can be opened by the other.

    The kernel's boot names the machine, the device number the mount: containers have their own. Where
    either cannot be read, the process shares memory with none but itself.
    """
    try:
        return f"{boot_id.read_text().strip()}-{memory.stat().st_dev}"
    except OSError:
        return f"process-{os.getpid()}"

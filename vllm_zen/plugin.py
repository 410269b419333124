"""The two entry points vLLM calls, in every process, possibly more than once."""

import functools
import logging
import multiprocessing

from vllm_zen import activation, envs, zentorch
from vllm_zen.activation import Decision, logger
from vllm_zen.errors import BrokenComponentError, UnsupportedError


def platform() -> str | None:
    """vllm.platform_plugins: the platform class to use, or None to leave vLLM's own in place.

    vLLM swallows what is raised here and has not set up its logging yet: what else there is to say, strict
    mode and bad variables are register()'s.
    """
    try:
        active = activation.decide().active
    except ValueError:
        return None
    if active:
        zentorch.load()
        # Another active platform: vLLM raises next, before its logging is set up and before register(), so
        # this goes out through Python's own last resort, on stderr.
        for problem in activation.selection_problems():
            logger.warning("vllm-zen: %s. Way out: %s.", problem.what, problem.fix)
    return activation.PLATFORM_CLASS if active else None


def register() -> None:
    """vllm.general_plugins: says why the platform is not used, or checks its parts and wires them in.

    Raises EnvironmentVariableError for a wrong VLLM_ZEN_* value, UnsupportedError for a table of kernels
    this CPU lacks, BrokenComponentError in strict mode.
    """
    envs.check_all()
    decision = activation.decide()
    if not decision.active:
        if envs.isa() != envs.ISA.default:
            _check_native()  # forcing a table the CPU lacks is an error here too
        _say(f"vllm-zen steps aside: {decision.reason}. vLLM's own platform serves.")
        return
    from vllm.platforms import current_platform

    from vllm_zen.platform import ZenCpuPlatform

    if isinstance(current_platform, ZenCpuPlatform):
        _wire_in(decision)
    for problem in activation.selection_problems():
        _warn(f"vllm-zen may not be used: {problem.what}. Way out: {problem.fix}.")


def _wire_in(decision: Decision) -> None:
    from vllm_zen import compat

    if decision.forced:
        _warn(f"vllm-zen is active on a CPU it is not made for: {decision.reason}.")
    _check_zentorch()
    _check_native()
    for line in compat.apply():
        _say(f"vllm-zen: {line}.")
    _name_attention_backend()
    _name_quantization_methods()


def _name_attention_backend() -> None:
    """Layers look their backend up by its name; CUSTOM is the one vLLM keeps for plugins."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from vllm_zen.attention import choice

    register_backend(AttentionBackendEnum.CUSTOM, choice.BACKEND_CLASS)


def _name_quantization_methods() -> None:
    from vllm_zen.quantization import config

    config.register()


def _check_zentorch() -> None:
    status = zentorch.load()
    agrees, reason = zentorch.prepack_agrees()
    if status.usable and envs.weight_prepack() and not agrees:
        _warn(f"linear weights are not packed: {reason}.")
    if status.state == "absent":
        _say(f"zentorch is not installed: vLLM's own path serves linear layers. To use it: {status.remedy}.")
    elif status.state == "broken":
        _degrade(
            f"zentorch {status.version} is not used ({status.reason}; torch is {status.torch}): vLLM's "
            f"own path serves linear layers. Way out: {status.remedy}."
        )


def _check_native() -> None:
    from vllm_zen import ops

    native = ops.load()
    if not native.ok:
        _degrade(f"vllm-zen's native kernels are not used ({native.reason}). Way out: {native.remedy}.")
        return
    try:
        ops.isa()
    except RuntimeError as error:
        raise UnsupportedError(str(error)) from None


def _degrade(message: str) -> None:
    if envs.strict():
        raise BrokenComponentError(f"{message} (an error because {envs.STRICT.name}=1)")
    _warn(message)


def _say(message: str) -> None:
    _log_once(logging.INFO, message)


def _warn(message: str) -> None:
    _log_once(logging.WARNING, message)


@functools.cache
def _log_once(level: int, message: str) -> None:
    """Logs in the first process only: vLLM's engine and worker processes would repeat it."""
    if multiprocessing.parent_process() is not None:
        return
    if not logging.getLogger("vllm").handlers:  # LLM() loads plugins before it sets up logging
        from vllm.config.logging import LoggingConfig
        from vllm.logger import configure_logging_if_needed

        configure_logging_if_needed(LoggingConfig())
    logger.log(level, message)

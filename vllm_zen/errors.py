"""The exceptions vllm-zen raises for people to read.

    ZenError                        everything below
    ├── EnvironmentVariableError    a VLLM_ZEN_* value outside its rule (also a ValueError)
    ├── UnsupportedError            a request this CPU or build cannot serve (also a ValueError)
    ├── BrokenComponentError        a part is installed but unusable, under VLLM_ZEN_STRICT=1
    ├── DemoModelError              the demo model cannot be prepared
    ├── ModelError                  what was named is not a model that can be read here (also a ValueError)
    ├── PlanError                   no plan serves this model on this host
    ├── BenchmarkError              a benchmark cannot be run, or a server under test failed
    └── EvaluationError             quality cannot be measured: no text, no such scheme, an engine that failed

Every message names the value, the rule and the way out.
"""


class ZenError(Exception):
    """Root of the tree."""


class EnvironmentVariableError(ZenError, ValueError):
    """An environment variable holds a value that its rule does not allow."""


class UnsupportedError(ZenError, ValueError):
    """The user asked for something this CPU, dtype or build cannot do."""


class BrokenComponentError(ZenError, RuntimeError):
    """An installed component does not work and strict mode forbids the safe path."""


class DemoModelError(ZenError, RuntimeError):
    """The demo model's source is missing or its conversion cannot proceed."""


class ModelError(ZenError, ValueError):
    """A model's folder, config or weight headers are missing, damaged or of an unknown kind."""


class PlanError(ZenError, RuntimeError):
    """A model does not fit a host, or its plan cannot be measured."""


class BenchmarkError(ZenError, RuntimeError):
    """A benchmark's request cannot be met, or a server under test did not answer."""


class EvaluationError(ZenError, RuntimeError):
    """Quality cannot be measured."""

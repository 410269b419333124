"""The AMD Zen backend for vLLM. Importing it has no effect; see plugin.py for the entry points."""

__version__ = "0.1.0"

"""The one way to matplotlib, which is an extra."""

from typing import Any

from vllm_zen.errors import ZenError


def load_pyplot(error: type[ZenError]) -> Any:
    """matplotlib.pyplot, drawing to files only. Raises `error` where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise error("--plot needs matplotlib: pip install 'vllm-zen[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot

"""The logic of `vllm-zen bench`: servers of both sides, load, statistics, reports."""

"""One engine, timed from inside: started by compare.py, once per measurement.

    python engine_child.py '{"engine": {...}, "prompt_tokens": 512, "batch": 1, "steps": 64, "output": "F"}'

Writes to the output file, as JSON: seconds to build the engine, to prefill, the median decode step, memory.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path


def worker_resident_bytes() -> int:
    """The largest resident set of the processes below this one: the worker, which holds the weights."""
    import psutil

    children = psutil.Process(os.getpid()).children(recursive=True)
    return max((child.memory_info().rss for child in children), default=0)


def main() -> None:
    request = json.loads(sys.argv[1])
    began = time.perf_counter()
    from vllm import LLM, SamplingParams

    imported = time.perf_counter()
    llm = LLM(**request["engine"])
    built = time.perf_counter()

    prompt = {"prompt_token_ids": [1] + [5 + i % 1000 for i in range(request["prompt_tokens"] - 1)]}
    for index in range(request["batch"]):
        sampling = SamplingParams(temperature=0, max_tokens=request["steps"] + 1, ignore_eos=True)
        llm.llm_engine.add_request(str(index), prompt, sampling)
    # One engine step at a time: the difference of two whole runs would bury a step in prefill's drift.
    steps = []
    while llm.llm_engine.has_unfinished_requests():
        start = time.perf_counter()
        llm.llm_engine.step()
        steps.append(time.perf_counter() - start)
    decode = steps[-request["steps"] :]
    result = {
        "import_s": imported - began,
        "build_s": built - imported,
        "prefill_s": sum(steps[: -request["steps"]]),
        "decode_step_s": statistics.median(decode),
        "worker_rss_bytes": worker_resident_bytes(),
    }
    Path(request["output"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()

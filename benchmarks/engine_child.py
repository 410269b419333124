"""One engine, timed from inside: started by compare.py, once per measurement.

    python engine_child.py '{"engine": {...}, "works": [[BATCH, PROMPT_TOKENS, STEPS], ...], "output": "F"}'

Writes to the output file, as JSON: seconds to build the engine, to prefill each work and of its median decode
step; bytes of memory.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any


def worker_resident_bytes() -> int:
    """The largest resident set of the processes below this one: the worker, which holds the weights."""
    import psutil

    children = psutil.Process(os.getpid()).children(recursive=True)
    return max((child.memory_info().rss for child in children), default=0)


def run(
    llm: Any, sampling_params: Any, batch: int, prompt_tokens: int, steps: int
) -> tuple[list[float], list[float]]:
    """Seconds of the engine steps up to the last prompt's first token, and of the `steps` after it.

    One step at a time: the difference of two whole runs would bury a step in prefill's drift.
    """
    prompt = {"prompt_token_ids": [1] + [5 + i % 1000 for i in range(prompt_tokens - 1)]}
    for index in range(batch):
        sampling = sampling_params(temperature=0, max_tokens=steps + 1, ignore_eos=True)
        llm.llm_engine.add_request(f"{batch}x{prompt_tokens}-{index}", prompt, sampling)
    seconds = []
    while llm.llm_engine.has_unfinished_requests():
        start = time.perf_counter()
        llm.llm_engine.step()
        seconds.append(time.perf_counter() - start)
    return seconds[:-steps], seconds[-steps:]


def main() -> None:
    request = json.loads(sys.argv[1])
    began = time.perf_counter()
    from vllm import LLM, SamplingParams

    imported = time.perf_counter()
    llm = LLM(**request["engine"])
    built = time.perf_counter()

    result = {"import_s": imported - began, "build_s": built - imported}
    for batch, prompt_tokens, steps in request["works"]:
        prefill, decode = run(llm, SamplingParams, batch, prompt_tokens, steps)
        name = f"{batch}x{prompt_tokens}"
        result |= {f"prefill {name}": sum(prefill), f"decode {name}": statistics.median(decode)}
    result["worker_rss_bytes"] = worker_resident_bytes()
    Path(request["output"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()

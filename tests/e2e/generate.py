"""Runs vLLM offline in a process of its own: a JSON list of requests in, a JSON list of answers out.

python generate.py '[{"engine": {...}, "prompts": [...], "max_tokens": 8, "passes": 1}]' OUTPUT.json

Each request gets an engine, one after the other.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any


def answer(request: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.platforms import current_platform

    llm = LLM(**{"kv_cache_memory_bytes": 2**28, "max_model_len": 512, "seed": 0, **request["engine"]})
    sampling = SamplingParams(
        temperature=0,
        max_tokens=request["max_tokens"],
        ignore_eos=True,
        logprobs=2,
        prompt_logprobs=request.get("prompt_logprobs"),
    )
    adapter = LoRARequest("adapter", 1, request["adapter"]) if "adapter" in request else None
    passes = [
        llm.generate(request["prompts"], sampling, use_tqdm=False, lora_request=adapter)
        for _ in range(request["passes"])
    ]
    completions = [output.outputs[0] for output in passes[-1]]
    preemptions = None
    if request["engine"].get("disable_log_stats") is False:
        preemptions = sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    result = {
        "platform": f"{type(current_platform).__module__}.{type(current_platform).__qualname__}",
        "dtype": str(llm.llm_engine.model_config.dtype),
        "tokens": [list(completion.token_ids) for completion in completions],
        # The two best log-probabilities of each step: a tie shows as equal ones.
        "logprobs": [
            [
                sorted((entry.logprob for entry in step.values()), reverse=True)[:2]
                for step in completion.logprobs
            ]
            for completion in completions
        ],
        "perplexity": [perplexity(output) for output in passes[-1]]
        if sampling.prompt_logprobs == 0
        else None,
        "passes": [[list(output.outputs[0].token_ids) for output in outputs] for outputs in passes],
        "cached": [[output.num_cached_tokens for output in outputs] for outputs in passes],
        "preemptions": preemptions,
    }
    llm.llm_engine.engine_core.shutdown()
    return result


def perplexity(output: Any) -> float | None:
    """Of a prompt, from the log-probabilities of its tokens but the first, where they were asked for."""
    if output.prompt_logprobs is None:
        return None
    steps = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    logprobs = [entry[token].logprob for token, entry in steps]
    return math.exp(-sum(logprobs) / len(logprobs))


def main() -> None:
    answers = [answer(request) for request in json.loads(sys.argv[1])]
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()

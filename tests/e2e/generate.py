"""Runs vLLM offline in a process of its own: JSON with engine arguments and prompts in, JSON out.

python generate.py '{"engine": {...}, "prompts": [...], "max_tokens": 8}' OUTPUT.json
"""

import json
import sys
from pathlib import Path


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    request = json.loads(sys.argv[1])
    llm = LLM(**{"kv_cache_memory_bytes": 2**28, "max_model_len": 512, "seed": 0, **request["engine"]})
    sampling = SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True, logprobs=2)
    passes = [
        llm.generate(request["prompts"], sampling, use_tqdm=False) for _ in range(request.get("passes", 1))
    ]
    completions = [output.outputs[0] for output in passes[-1]]
    answer = {
        "platform": f"{type(current_platform).__module__}.{type(current_platform).__qualname__}",
        "dtype": str(llm.llm_engine.model_config.dtype),
        "tokens": [list(completion.token_ids) for completion in completions],
        "passes": [[list(output.outputs[0].token_ids) for output in outputs] for outputs in passes],
        "cached": [[output.num_cached_tokens for output in outputs] for outputs in passes],
        "preemptions": sum(
            metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"
        )
        if request["engine"].get("disable_log_stats") is False
        else None,
        # The two best log-probabilities of each step: a tie shows as equal ones.
        "logprobs": [
            [
                sorted((entry.logprob for entry in step.values()), reverse=True)[:2]
                for step in completion.logprobs
            ]
            for completion in completions
        ],
    }
    Path(sys.argv[2]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()

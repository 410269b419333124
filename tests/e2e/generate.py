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
    completions = [output.outputs[0] for output in llm.generate(request["prompts"], sampling, use_tqdm=False)]
    answer = {
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
    }
    Path(sys.argv[2]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()

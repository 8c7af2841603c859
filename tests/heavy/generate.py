"""Load a checkpoint with vLLM on the CPU and print how it goes on, greedily.

Run: python generate.py CHECKPOINT COUNT PROMPT...
Prompts and answers are JSON lists of token numbers.
"""

from __future__ import annotations

import json
import sys

from vllm import LLM, SamplingParams, TokensPrompt

KV_CACHE_BYTES = 128 << 20


def main(checkpoint: str, count: str, *prompts: str) -> None:
    """Generate ``count`` tokens for every prompt."""
    engine = LLM(
        model=checkpoint,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        disable_log_stats=True,
    )
    tokens = [TokensPrompt(prompt_token_ids=json.loads(prompt)) for prompt in prompts]
    sampling = SamplingParams(temperature=0, max_tokens=int(count), detokenize=False)
    for answer in engine.generate(tokens, sampling, use_tqdm=False):
        print(json.dumps(list(answer.outputs[0].token_ids)))  # noqa: T201 - the result


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Prompt log-probs of fresh vLLM engines, each loaded from weights on disk. Run as a program: JSON in, JSON out.

Independent of the package: plain `vllm.LLM`, no weight transfer. Several engines share one process to save imports.
"""

import json
import sys


def main() -> None:
    from vllm import LLM, SamplingParams

    work = json.loads(sys.stdin.readline())
    parameters = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    results = []
    for folder, dtype in work["models"]:
        llm = LLM(
            folder, dtype=dtype, seed=0, skip_tokenizer_init=True, enforce_eager=True, block_size=32, max_model_len=256,
            max_num_batched_tokens=8192, enable_chunked_prefill=False, kv_cache_memory_bytes=64 << 20, max_num_seqs=32,
        )  # fmt: skip
        outputs = llm.generate([{"prompt_token_ids": r} for r in work["rows"]], parameters, use_tqdm=False)
        results.append(
            [[d[t].logprob for d, t in zip(o.prompt_logprobs[1:], row[1:])] for o, row in zip(outputs, work["rows"])]
        )
        llm.llm_engine.engine_core.shutdown()
    print("RESULT " + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()

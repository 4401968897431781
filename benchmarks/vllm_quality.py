"""Compares what vLLM makes of an artifact with a calibrated attention cache with what tilepress does: perplexity, HellaSwag.

    tilepress compress kv SMOLLM2 -o packed --dataset TEXT
    TILEPRESS_VLLM_KV=packed python benchmarks/vllm_quality.py packed --text wikitext2_test.jsonl --items hellaswag.jsonl

vLLM's perplexity is that of its prompt log-probabilities, tilepress's that of `eval perplexity --kv decode`, over the same
windows. Endings are scored by vLLM's prompt log-probabilities, and by `eval tasks`.
"""

import argparse
import json
import math
import os
from pathlib import Path
from unittest.mock import patch

import tilepress
from tilepress.eval import tasks as scorer
from tilepress.eval.protocol import Protocol
from tilepress.text import load_tokenizer, token_ids


def told(llm, windows: list[list[int]]) -> list[list[float]]:
    """Return the log-probability of every token but the first of each window."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    asked = [{"prompt_token_ids": ids} for ids in windows]
    found = llm.generate(asked, sampling, use_tqdm=False)
    return [
        [place[token].logprob for place, token in zip(request.prompt_logprobs[1:], ids[1:], strict=True)]
        for request, ids in zip(found, windows, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact")
    parser.add_argument("--text", required=True)
    parser.add_argument("--items", help="rows of HellaSwag")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--limit", type=int, default=400, help="items")
    parser.add_argument("--engine-only", action="store_true", help="leave out what tilepress makes of it")
    parser.add_argument("--eager", action="store_true", help="without torch.compile and CUDA graphs")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--output", type=Path, default=Path("vllm_quality.json"))
    asked = parser.parse_args()
    tokenizer, shared = load_tokenizer(Path(asked.artifact), False), {"dtype": asked.dtype}
    protocol = Protocol(asked.text, seqlen=asked.seqlen, limit=asked.windows)
    start = protocol.start(tokenizer)
    ids = token_ids(tokenizer, asked.text, (asked.windows + 1) * asked.seqlen, special_tokens=not start)
    windows = [start + ids[first:end] for first, end, _ in protocol.windows(len(ids), len(start))]

    from vllm import LLM

    room = {
        "max_model_len": asked.seqlen + 8,
        "max_num_batched_tokens": 2 * asked.seqlen,
        "gpu_memory_utilization": 0.1,
    }
    llm = LLM(
        model=asked.artifact,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=1 << 30,
        enforce_eager=asked.eager,
        **shared | room,
    )
    backends = {
        layer.impl.__class__.__name__
        for layer in llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    }
    per_token = [value for window in told(llm, windows) for value in window]
    found = {"backends": sorted(backends), "windows": len(windows), "tokens": len(per_token)}
    found["vllm"] = {"perplexity": math.exp(-sum(per_token) / len(per_token))}
    if asked.items:
        found["vllm"] |= endings(llm, tokenizer, asked, start)
    asked.output.write_text(json.dumps(found, indent=1) + "\n")
    if asked.engine_only:
        os._exit(0)
    of_text = {"seqlen": asked.seqlen, "limit": asked.windows, "kv": "decode"}
    mine = tilepress.perplexity(asked.artifact, asked.text, **of_text | shared)
    found["tilepress"] = {"perplexity": mine.perplexity}
    if asked.items:
        result = tilepress.tasks(asked.artifact, dataset=asked.items, limit=asked.limit, **shared).results[0]
        found["tilepress"] |= {name: getattr(result, name) for name in scorer.METRICS}
    found["ratio"] = {name: found["vllm"][name] / value for name, value in found["tilepress"].items()}
    asked.output.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
    os._exit(0)  # an engine's own end takes long and says much


def endings(llm, tokenizer, asked, start: list[int]) -> dict:
    """Return how many items vLLM answers rightly, by each metric of `eval tasks`, whose windows these are."""

    def likelihoods(_model, windows: list[tuple[list[int], int]], _progress) -> list[float]:
        values = told(llm, [ids for ids, _ in windows])
        return [sum(value[-ending:]) for value, (_, ending) in zip(values, windows, strict=True)]

    model, items = llm.llm_engine.model_config.hf_config, scorer._items("hellaswag", asked.items, asked.limit)
    with patch.multiple(scorer, _log_likelihoods=likelihoods, check_vocabulary=lambda *_: None):
        right = scorer.answers(argparse.Namespace(config=model), tokenizer, items, start)
    return dict(zip(scorer.METRICS, right.mean(0).tolist(), strict=True))


if __name__ == "__main__":
    main()

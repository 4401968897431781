"""vLLM's engine in tests, and transformers' forward pass beside it."""

from pathlib import Path

import pytest
import torch

vllm = pytest.importorskip("vllm")

PROMPTS = [[3 + 7 * i % 250 for i in range(length)] for length in (5, 33, 70)]
CARD = torch.cuda.is_available()  # its attention takes no float32
DTYPE = "bfloat16" if CARD else "float32"
TOLERANCE = 0.1 if CARD else 1e-3  # of log-probabilities, against float32: roundings and the orders of sums differ
ROOM = {"kv_cache_memory_bytes": 1 << 28, "gpu_memory_utilization": 0.05} if CARD else {}  # engines side by side


def engine(path: Path, **options) -> "vllm.LLM":
    settings = {"dtype": DTYPE, "max_model_len": 128, "max_num_seqs": 8, "enforce_eager": True, "seed": 0}
    return vllm.LLM(model=str(path), **settings | ROOM | options)


def sampled(tokens: int, **options) -> "vllm.SamplingParams":
    settings = {"temperature": 0, "max_tokens": tokens, "logprobs": 3, "ignore_eos": True, "detokenize": False}
    return vllm.SamplingParams(**settings | options)


def generate(llm, prompts: list[list[int]], tokens: int = 6, lora=None, **options) -> list:
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    found = llm.generate(asked, sampled(tokens, **options), use_tqdm=False, lora_request=lora)
    return [output for request in found for output in request.outputs]


def model_of(llm) -> torch.nn.Module:
    return llm.llm_engine.model_executor.driver_worker.get_model()


def differences(model, prompts: list[list[int]], outputs: list, greedy: float | None = None) -> torch.Tensor:
    """Return by how much each log-probability that the engine tells differs from the model's own.

    With `greedy` a token may be worse than the model's best by so much at most."""
    found = []
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(output.token_ids)
        with torch.no_grad():
            expected = model(torch.tensor([prompt + tokens])).logits[0].float().log_softmax(-1)
        for i, (token, told) in enumerate(zip(tokens, output.logprobs, strict=True)):
            row = expected[len(prompt) - 1 + i]
            assert greedy is None or row.max() - row[token] < greedy
            found += [abs(row[candidate].item() - value.logprob) for candidate, value in told.items()]
    return torch.tensor(found)


def assert_as(
    model, prompts: list[list[int]], outputs: list, tolerance: float = TOLERANCE, greedy: bool = True
) -> None:
    """Every log-probability that the engine tells is the model's own, and its tokens are the model's best where they were to be."""
    assert differences(model, prompts, outputs, tolerance if greedy else None).max() < tolerance

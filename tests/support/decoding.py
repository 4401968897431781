"""Generating with and without the lean pass, for prompts of different lengths in one batch."""

import torch

import tilepress


def padded(prompts: list[list[int]], device="cpu") -> dict[str, torch.Tensor]:
    """The arguments of `generate` for prompts, with padding on the left."""
    most = max(map(len, prompts))
    rows = [[0] * (most - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (most - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(rows, device=device), "attention_mask": torch.tensor(mask, device=device)}


def generated(model, prompts: list[list[int]], count: int, **options) -> list[list[int]]:
    """New tokens of each prompt by transformers' generate; greedy, and to no end but their number, unless `options` say otherwise."""
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": count} | options
    given = padded(prompts, model.device)
    return model.generate(**given, **options)[:, given["input_ids"].shape[1] :].tolist()


def decoded(model, prompts: list[list[int]], count: int, **options) -> list[list[int]]:
    """The same by `custom_generate=tilepress.decode`."""
    return generated(model, prompts, count, custom_generate=tilepress.decode, **options)


def alone(model, prompts: list[list[int]], count: int, **options) -> list[list[int]]:
    """New tokens of each prompt without the others, by transformers' generate."""
    return [generated(model, [prompt], count, **options)[0] for prompt in prompts]

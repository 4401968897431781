"""`model.generate(..., custom_generate=tilepress.decode)`: transformers' generate with the lean pass in place of the model's own forward pass.

    generate -> prompts are prefilled -> [ logits -> processors -> a token each -> stopping criteria, streamer | the next pass ] ... -> tokens

transformers prepares everything, and its own processors, criteria and streamers run on the logits. On a card the next pass is launched before the host looks
at what the criteria say of the tokens before, so that the card does not wait for the host; a pass that nothing needs any more is dropped.
"""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from tilepress.formats import UsageError
from tilepress.runtime.decode.batch import CHUNK, Batch, Prompt
from tilepress.runtime.decode.decoder import most_positions, why_not
from tilepress.runtime.hf import hooks

_KEPT = "_tilepress_batch"  # attribute of a model: the batch that it last decoded with, and what it was made for
_NONE = (None, None)
_ROOM = 256  # a batch has room for a multiple of so many tokens, so that it can serve again
_KNOWN = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position"}


def decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer=None,
    tokenizer=None,
    assistant_model=None,
    cache: str = "auto",
    chunk: int | None = None,
    graphs: bool | None = None,
    **model_kwargs,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Generate greedily or by sampling, as `generate` does without `custom_generate`: the tokens are the same up to the rounding of logits.

    `generate` calls this with everything that it prepares: input_ids int64 [batch, length], padded on the left as `attention_mask` says. It returns int64
    [batch, length and new tokens], or with `return_dict_in_generate` an object with scores and logits. Three arguments of its own can be given to `generate`:

    - `cache`: where keys and values are kept, one of cache.CACHES; by default the calibrated pages that the model has, or lossless ones;
    - `chunk`: how many tokens of a prompt are prefilled at once;
    - `graphs`: False for prefill and steps without CUDA graphs.

    The model keeps its batch, with graphs and pages, for the next call that it has room for, unless ranks share it. A model that the lean pass does not
    know runs by its own, and a warning says why. Raises UsageError for what only `generate` itself does: beams, assistants, filled caches."""
    mask = model_kwargs.get("attention_mask")
    refused = _refused(model, input_ids, generation_config, synced_gpus, assistant_model, model_kwargs)
    if refused is not None:
        raise UsageError(f"tilepress.decode does not serve {refused}", "leave custom_generate out, or this")
    limit = min(x for x in (generation_config.max_length, stopping_criteria.max_length) if x is not None)
    prompts = _prompts(model, input_ids, mask)
    new = max(1, limit - input_ids.shape[1])
    most = max(map(len, prompts)) + new
    if (why := why_not(model, most)) is not None:
        if cache not in ("auto", "calibrated"):
            raise UsageError(f"the cache {cache!r} is not for this model: {why}", "use cache='auto'")
        warnings.warn(f"{type(model).__name__} decodes by transformers' own forward pass: {why}", stacklevel=4)
        given = logits_processor, stopping_criteria, generation_config, synced_gpus, streamer
        return model._sample(input_ids, *given, **model_kwargs)
    options = {"cache": cache, "chunk": chunk or generation_config.prefill_chunk_size or CHUNK, "graphs": graphs}
    batch = _batch_for(model, len(prompts), most, options)
    logits = _prefilled(batch, prompts, new)
    found = _generated(
        batch, logits, input_ids, logits_processor, stopping_criteria, generation_config, limit, streamer
    )
    batch.clear()
    if (
        getattr(model, "tensor_parallel", None) is None
    ):  # a group of ranks cannot be closed while graphs have its collectives
        setattr(model, _KEPT, (batch, (options, _state(model))))
    if streamer is not None:
        streamer.end()
    return found if generation_config.return_dict_in_generate else found.sequences


hooks.hand_over(decode)


def paths(model: PreTrainedModel) -> dict[str, int]:
    """Return which implementation served how many parts of a step when the model last decoded.

    Empty where the lean pass did not run, or ranks share the model."""
    batch, _ = getattr(model, _KEPT, _NONE)
    return {} if batch is None else {str(path): count for path, count in batch.paths().items()}


def _generated(
    batch: Batch,
    logits: Tensor,  # [sequences, vocabulary], behind the prompts
    ids: Tensor,  # int64 [sequences, length]
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    limit: int,  # tokens of a row of `ids` in the end
    streamer,
) -> GenerateDecoderOnlyOutput:
    """Generate until the criteria end every sequence, or `limit`."""
    count, waits = len(ids), batch.device.type != "cuda"
    told = config.return_dict_in_generate
    scores = () if told and config.output_scores else None
    raw = () if told and config.output_logits else None
    greedy = not config.do_sample
    looks = not greedy or len(processors) > 0 or scores is not None or raw is not None
    ends = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    pad = config._pad_token_tensor.to(ids.device) if ends else None
    unfinished = torch.ones(count, dtype=torch.int64, device=ids.device)
    while True:
        if looks:
            own = logits.to(ids.device, torch.float32, copy=True)
            of_step = processors(ids, own)
            scores = scores if scores is None else (*scores, of_step)
            raw = raw if raw is None else (*raw, own)
            tokens = of_step.argmax(-1) if greedy else torch.multinomial(of_step.softmax(-1), 1)[:, 0]
        else:
            tokens = batch.tokens[:count].to(ids.device, copy=True)
        if ends:
            tokens = tokens * unfinished + pad * (1 - unfinished)
        ids = torch.cat([ids, tokens[:, None]], 1)
        unfinished = unfinished & ~criteria(ids, scores)
        on_host, last = _on_its_way(torch.stack([tokens, unfinished])), ids.shape[1] >= limit
        if not waits and not last:
            batch.feed(tokens)
            logits = batch.step(count)
        said, running = on_host()
        if streamer is not None:
            streamer.put(said)
        if last or not bool(running.any()):
            break
        if waits:
            batch.feed(tokens)
            logits = batch.step(count)
    return GenerateDecoderOnlyOutput(sequences=ids, scores=scores, logits=raw)


def _on_its_way(numbers: Tensor) -> Callable[[], Tensor]:
    """Send numbers to the host, and return what waits for them there: work that is launched later does not hold them up."""
    if not numbers.is_cuda:
        return lambda: numbers
    copy, event = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True), torch.cuda.Event()
    copy.copy_(numbers, non_blocking=True)
    event.record()
    return lambda: (event.synchronize(), copy)[1]


def _refused(
    model, input_ids: Tensor, config: GenerationConfig, synced_gpus: bool, assistant, given: dict
) -> str | None:
    """Return what of a call only transformers' own generate does, or None."""
    unknown = sorted(name for name in given.keys() - _KNOWN if given[name] is not None)
    if unknown or not input_ids.numel():
        return ", ".join(unknown) or f"prompts without tokens ({list(input_ids.shape)})"
    mask, cache, mode = given.get("attention_mask"), given.get("past_key_values"), config.get_generation_mode(assistant)
    if mask is not None and mask.shape != input_ids.shape:
        return f"an attention mask of {list(mask.shape)} for tokens of {list(input_ids.shape)}"
    reasons = {
        mode.value.replace("_", " "): mode.value not in ("greedy_search", "sample"),
        "several processes with one model each (synced_gpus)": bool(synced_gpus),
        "output_attentions and output_hidden_states": config.return_dict_in_generate
        and bool(config.output_attentions or config.output_hidden_states),
        f"cache_implementation={config.cache_implementation!r}": config.cache_implementation not in (None, "dynamic"),
        "use_cache=False": given.get("use_cache") is False,
        "a cache that holds something": cache is not None and cache.get_seq_length() > 0,
        "prompts padded on the right": mask is not None and bool((mask[:, -1] == 0).any()),
        "positions of your own": _moved(given.get("position_ids"), mask, input_ids),
        "a cache that is only simulated": getattr(getattr(model, "kv_state", None), "mode", None) == "sim",
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _moved(positions: Tensor | None, mask: Tensor | None, input_ids: Tensor) -> bool:
    """Whether positions are others than those of the tokens that are no padding."""
    if positions is None:
        return False
    real = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device)
    return bool(((positions.to(input_ids.device) != real.cumsum(1) - 1) & (real == 1)).any())


def _prompts(model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Return the tokens int64 [count] of each sequence without padding, on the host. Raises UsageError for tokens that the model does not have."""
    vocabulary = model.config.get_text_config().vocab_size
    rows = input_ids.cpu()
    real = torch.ones_like(rows, dtype=torch.bool) if mask is None else mask.cpu().bool()
    prompts = [row[of_row] for row, of_row in zip(rows, real, strict=True)]
    if any(bool(((prompt < 0) | (prompt >= vocabulary)).any()) for prompt in prompts):
        raise UsageError(f"the prompt has tokens beyond the vocabulary of {vocabulary}", "use the model's tokenizer")
    return prompts


def _prefilled(batch: Batch, prompts: list[Tensor], new: int) -> Tensor:
    """Prefill every prompt, or copy what the same one has given before; return logits [prompts, vocabulary]."""
    first: dict[tuple[int, ...], int] = {}
    before = [first.setdefault(tuple(prompt.tolist()), number) for number, prompt in enumerate(prompts)]
    asked = [Prompt(number, prompts[number], len(prompts[number]) + new) for number in first.values()]
    logits = batch.prefill_all(asked)
    for number, same in enumerate(before):
        if same != number:
            batch.copy(same, number, len(prompts[number]) + new)
    place = {prompt.sequence: i for i, prompt in enumerate(asked)}
    return torch.stack([logits[place[same]] for same in before])


def _state(model: PreTrainedModel) -> tuple:
    """Which modules a model has, where its tensors lie and how often they were changed, and which attention cache it has."""
    cache = getattr(model, "kv_state", None)
    tensors = (*model.parameters(), *model.buffers())
    marks = [(x.data_ptr(), None if x.is_inference() else x._version) for x in tensors]
    return [*map(id, model.modules())], marks, None if cache is None else (id(cache.calibration), cache.mode)


def _batch_for(model: PreTrainedModel, count: int, most: int, options: dict) -> Batch:
    """Return the batch that the model kept, or a new one. The model does not have it while it is in use.

    The kept one serves if the model is as it was, and if its room is enough but not far too much: a step may have to read all of it."""
    batch, made_for = model.__dict__.pop(_KEPT, _NONE)
    fits = batch is not None and count <= batch.sequences and most <= batch.max_len <= max(4 * most, _ROOM)
    if fits and made_for == (options, _state(model)):
        return batch
    del batch  # its memory is free before the next one takes its own
    room = -(-most // _ROOM) * _ROOM
    room = min(room, most_positions(model) or room)
    return Batch(model, count, most if room < most or why_not(model, room) else room, **options)

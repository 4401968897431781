"""A model that answers: `tilepress.generate` for one prompt, `Chat` for a conversation.

    messages -> chat template -> tokens -> generate(custom_generate=tilepress.decode) -> a streamer -> text, as it comes

A model without a chat template, or with `raw`, continues each text as it stands. The prompt is prefilled anew for every answer: what is kept
between the turns of a conversation is the text. Speeds are those of this very call, prefill told apart from the tokens after the first.

This module stands beside sampling.py, above `runtime`: it runs a model and reads nothing else.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from transformers import GenerationConfig, TextStreamer

from tilepress.device import find_device
from tilepress.formats import UsageError, foreign_errors
from tilepress.formats.checkpoint import open_model
from tilepress.runtime.decode.decoder import why_not
from tilepress.runtime.decode.generation import decode
from tilepress.runtime.loader import load, paths
from tilepress.text import check_vocabulary, load_tokenizer, max_positions, window_start

OnText = Callable[[str], None]


@dataclass(frozen=True)
class Answer:
    """What a model answered, and how fast. `tokens_per_s` is that of the tokens after the first, None where there is but one."""

    text: str
    prompt_tokens: int
    tokens: int  # with the end token, if there is one
    ended: bool  # by the model; else `new_tokens` was reached
    first_token_s: float
    seconds: float
    tokens_per_s: float | None
    ids: tuple[int, ...] = field(repr=False)
    prompt_ids: tuple[int, ...] = field(repr=False)

    def to_json(self) -> dict:
        """Return the answer without token ids, as a dictionary of plain values."""
        return {name: value for name, value in asdict(self).items() if not name.endswith("ids")}


@dataclass(frozen=True)
class Generated:
    """The result of `generate`: the answer, and what gave it."""

    model: str
    prompt: str
    templated: bool  # whether the prompt went through the chat template
    answer: Answer
    device: str
    decoded_by: str
    paths: dict[str, int]  # which implementation served how many layers

    def to_json(self) -> dict:
        """Return what `generate --json` prints, as a dictionary of plain values."""
        about = {"model": self.model, "prompt": self.prompt, "templated": self.templated}
        ran = {"device": self.device, "decoded_by": self.decoded_by, "paths": self.paths}
        return about | self.answer.to_json() | ran


def generate(
    model: str | Path,
    prompt: str,
    *,
    new_tokens: int = 256,
    temperature: float | None = None,
    top_p: float | None = None,
    seed: int = 0,
    raw: bool = False,
    system: str | None = None,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    kv: bool = True,
    trust_remote_code: bool = False,
    revision: str | None = None,
    on_text: OnText | None = None,
) -> Generated:
    """Let a model, dense or an artifact, answer one prompt: `tilepress.generate("int8", "Why is the sky blue?").answer.text`.

    The arguments are those of `Chat` and `Chat.say`. Raises UsageError for an empty prompt, or one that the model has no positions for."""
    source = {"trust_remote_code": trust_remote_code, "revision": revision}
    chat = Chat(model, raw=raw, system=system, device=device, dtype=dtype, kv=kv, **source)
    answer = chat.say(prompt, new_tokens=new_tokens, temperature=temperature, top_p=top_p, seed=seed, on_text=on_text)
    about = str(model), prompt, chat.templated, answer, str(chat.model.device)
    return Generated(*about, chat.decoded_by(len(answer.prompt_ids) + new_tokens), paths(chat.model))


class Chat:
    """A loaded model and the conversation so far.

    model    folder or hub id, dense or an artifact; a calibrated attention cache is used unless `kv` is False
    raw      continue each text as it stands, without the chat template
    system   the message that the conversation begins with; it needs a template
    dtype    "auto": the checkpoint's on a card, float32 on a CPU, of which most have no units for bfloat16
    """

    def __init__(
        self,
        model: str | Path,
        *,
        raw: bool = False,
        system: str | None = None,
        device: str = "auto",
        dtype: str | torch.dtype = "auto",
        kv: bool = True,
        trust_remote_code: bool = False,
        revision: str | None = None,
    ):
        checkpoint, where = open_model(model, revision), find_device(device)
        self.tokenizer = load_tokenizer(checkpoint.path, trust_remote_code)
        self.templated = not raw and getattr(self.tokenizer, "chat_template", None) is not None
        if system is not None and not self.templated:
            raise UsageError(
                f"{checkpoint.name} is run without a chat template, so no system message has a place",
                "leave --system out" if raw else "put it before the prompt",
            )
        kind = torch.float32 if dtype in ("auto", None) and where == "cpu" else dtype
        self.model = load(str(checkpoint.path), where, kind, trust_remote_code, kv=kv)
        self._positions = max_positions(checkpoint.text_config)
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = list(self._start)

    def clear(self) -> None:
        """Forget the conversation, but for the system message."""
        self.messages = list(self._start)

    def say(
        self,
        text: str,
        *,
        new_tokens: int = 256,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int = 0,
        on_text: OnText | None = None,
    ) -> Answer:
        """Answer a message, and keep both where there is a template.

        new_tokens   at most; fewer where the model has no positions for more
        temperature  None: as the model's generation_config.json says; 0: the most likely token always
        on_text      called with pieces of the answer as they come

        Raises UsageError for a text that is empty, or too long for the model."""
        if not text.strip():
            raise UsageError("the prompt is empty", "give some text")
        said = [*self.messages, {"role": "user", "content": text}]
        ids = self._ids(said if self.templated else text)
        sampling = {"temperature": temperature, "top_p": top_p, "seed": seed}
        answer = self.continued(ids, new_tokens=new_tokens, **sampling, on_text=on_text)
        if self.templated:
            self.messages = [*said, {"role": "assistant", "content": answer.text}]
        return answer

    def _ids(self, said: str | Sequence[dict]) -> list[int]:
        """Return the tokens of a text, or of messages in the model's template."""
        if isinstance(said, str):
            return [*window_start(self.tokenizer), *self.tokenizer(said, add_special_tokens=False)["input_ids"]]
        with foreign_errors("the chat template does not take this conversation", "add --raw, or begin anew"):
            written = self.tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
        return self.tokenizer(written, add_special_tokens=False)["input_ids"]

    def continued(
        self,
        ids: Sequence[int],
        *,
        new_tokens: int = 256,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int = 0,
        on_text: OnText | None = None,
    ) -> Answer:
        """Return what follows the tokens; the arguments are those of `say`."""
        if new_tokens < 1:
            raise UsageError(f"--new-tokens {new_tokens} leaves nothing to say", "use at least 1")
        check_vocabulary([list(ids)], self.model)
        if self._positions is not None:
            if len(ids) >= self._positions:
                told = f"the conversation has {len(ids)} tokens, the model positions for {self._positions}"
                raise UsageError(told, "shorten it; in a chat /clear begins anew")
            new_tokens = min(new_tokens, self._positions - len(ids))
        config = self._config(new_tokens, temperature, top_p)
        prompt = torch.tensor([list(ids)], device=self.model.device)
        streamer = _Streamer(self.tokenizer, on_text)
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.inference_mode():
            torch.manual_seed(seed)
            given = {"attention_mask": torch.ones_like(prompt), "generation_config": config, "streamer": streamer}
            rows = self.model.generate(prompt, custom_generate=decode, **given)
        made, times = rows[0, len(ids) :].tolist(), streamer.times
        ends = config.eos_token_id
        ends = {ends} if isinstance(ends, int) else set(ends or ())
        rest = times[-1] - times[1]
        return Answer(
            self.tokenizer.decode(made, skip_special_tokens=True),
            len(ids),
            len(made),
            made[-1] in ends,
            times[1] - times[0],
            times[-1] - times[0],
            (len(made) - 1) / rest if len(made) > 1 else None,
            tuple(made),
            tuple(ids),
        )

    def _config(self, new_tokens: int, temperature: float | None, top_p: float | None) -> GenerationConfig:
        """Return the model's own settings with those that are given, and ends and padding from the tokenizer where it has none."""
        config = GenerationConfig(**self.model.generation_config.to_diff_dict())
        config.max_length, config.max_new_tokens = None, new_tokens
        if temperature is not None:
            if not 0 <= temperature < float("inf"):
                raise UsageError(f"--temperature {temperature} cannot be", "use 0 for the most likely token, or 0.7")
            config.do_sample = temperature > 0
            config.temperature = temperature or None
            if not config.do_sample:
                config.top_k = config.top_p = None
        if top_p is not None:
            if not 0 < top_p <= 1 or not config.do_sample:
                raise UsageError(
                    f"--top-p {top_p} needs sampling, and a share above 0", "add --temperature 0.7, use --top-p 0.9"
                )
            config.top_p = top_p
        if config.eos_token_id is None:
            config.eos_token_id = self.tokenizer.eos_token_id
        if config.pad_token_id is None:
            ends = config.eos_token_id
            config.pad_token_id = ends[0] if isinstance(ends, list) else ends if ends is not None else 0
        return config

    def decoded_by(self, most: int = 256) -> str:
        """Return which pass decodes sequences of so many tokens, and why if it is transformers' own."""
        why = why_not(self.model, most)
        return "the lean pass" if why is None else f"transformers' own pass: {why}"


class _Streamer(TextStreamer):
    """Hands pieces of text to a function, and notes when tokens came: `times` begins with the prompt."""

    def __init__(self, tokenizer, on_text: OnText | None):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.times: list[float] = []
        self._on_text = on_text

    def put(self, value) -> None:
        self.times.append(time.monotonic())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self._on_text is not None and text:
            self._on_text(text)

"""Every place where the runtime reaches into transformers and peft: what it registers there, and the functions that it changes.

Modules of one loaded model get other forwards by subclasses.py. Calibration of the attention cache registers an attention function of its own
(compress/kv/attention.py). Nothing of tilepress is imported here. Each function gets what it puts in place, and says for which calls transformers
behaves otherwise.
"""

import importlib.abc
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType

import torch
from transformers import AttentionInterface, PreTrainedModel, modeling_utils
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.quantizers import register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

_placing = threading.Lock()


def add_quantizer(method: str, config: type, quantizer: type) -> None:
    """Make from_pretrained know a `quant_method`. Calling it again does nothing."""
    if method not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(method)(config)
        register_quantizer(method)(quantizer)


def replace_quantization_config(method: str, config: type) -> None:
    """Make from_pretrained read the quantization_config of a known `quant_method` by another class."""
    AUTO_QUANTIZATION_CONFIG_MAPPING[method] = config


def after_from_pretrained(finish: Callable[[PreTrainedModel, dict], None]) -> None:
    """Make from_pretrained call `finish` with each model that it has loaded, and with the arguments that it got."""
    stock = PreTrainedModel.from_pretrained.__func__

    @wraps(stock)
    def from_pretrained(cls, *args, **kwargs):
        loaded = stock(cls, *args, **kwargs)
        finish(loaded[0] if isinstance(loaded, tuple) else loaded, kwargs)
        return loaded

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module when that is imported, once."""

    def __init__(self, name: str, function: Callable[[ModuleType], None]):
        self.name, self.function = name, function

    def find_spec(self, name, path, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self.function(module)

            spec.loader.exec_module = exec_module
        return spec


def after_import(name: str, function: Callable[[ModuleType], None]) -> None:
    """Call a function with a module of an optional package, now or when something imports it."""
    if name in sys.modules:
        function(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, function))


def count_parameters(of: Callable[[torch.nn.Module], int]) -> None:
    """Add to `num_parameters` what `of` counts of each module: weights that are no parameters of torch, and never trainable."""
    stock = PreTrainedModel.num_parameters

    @wraps(stock)
    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        found = stock(self, only_trainable, exclude_embeddings)
        return found if only_trainable else found + sum(map(of, self.modules()))

    PreTrainedModel.num_parameters = num_parameters


def register_attention(name: str, function: Callable) -> None:
    """Add an attention function, with the masks that torch's own attention gets."""
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)


def hand_over(decode: Callable) -> None:
    """Make `generate(custom_generate=decode)` hand over `streamer`, `tokenizer` and `assistant_model`, which transformers keeps from callables: a streamer
    would hear nothing of what is generated, and stop strings could not be read."""
    stock = GenerationMixin._extract_generation_mode_kwargs
    signature = inspect.signature(stock)

    @wraps(stock)
    def extract(self, *args, **named):
        given = signature.bind(self, *args, **named).arguments
        if given.get("custom_generate") is not decode:
            return stock(self, *args, **named)
        passed = {name: given.get(name) for name in ("streamer", "assistant_model")}
        passed["tokenizer"] = given["kwargs"].get("tokenizer")  # which the stock function takes out
        found = stock(self, *args, **named)
        return found | {name: value for name, value in passed.items() if value is not None}

    GenerationMixin._extract_generation_mode_kwargs = extract


@contextmanager
def straight_to(device: torch.device) -> Iterator[dict]:
    """Give arguments with which from_pretrained puts tensors on a device one by one; none for a CPU.

    transformers wants accelerate for that, though one device needs nothing of it. It would also reserve the model's size in one piece first, which nothing
    gives back where layers are merged later."""
    if device.type == "cpu":
        yield {}
        return
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    instead = {"check_and_set_device_map": lambda device_map: device_map, "caching_allocator_warmup": lambda *_: None}
    with _placing:
        before = {name: getattr(modeling_utils, name) for name in instead}
        try:
            for name, function in instead.items():
                setattr(modeling_utils, name, function)
            yield {"device_map": {"": device}}
        finally:
            for name, function in before.items():
                setattr(modeling_utils, name, function)

"""The model of a checkpoint without its weights, and whether the stored tensors are those that it has.

A config.json is believed as far as the stored tensors bear it out: it may not ask for more layers, parameters or buffers than they
can fill. So a wrong one costs neither time nor memory, and a checkpoint that no loader would take is refused before anything is made
of it.
"""

import contextlib
import re
from collections.abc import Iterator

import torch
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from tilepress.formats import UsageError, first_line, lack_of_memory
from tilepress.formats.checkpoint import COMPUTED_BUFFER, Checkpoint, Weight

_COUNTED = re.compile(r"(layers?|labels|experts|heads?|blocks|groups|depth)$")  # keys of a config that say how many
_SPARE_COUNT = 1 << 16  # of what a config counts, beyond the number of stored tensors
_SPARE_PARAMETERS = 1000  # for each stored tensor a model may have several parameters, and some that are tied
_SPARE_BUFFER_BYTES = 1 << 29  # masks and tables of positions that a model computes for itself, beyond the stored bytes
_NOT_TOGETHER = "the checkpoint and its config.json do not belong together"


def build_meta_model(checkpoint: Checkpoint, trust_remote_code: bool = False, device: str = "meta"):
    """The checkpoint's model without weights; on another `device` than meta, with random ones.

    Raises UsageError for an architecture that transformers does not know, and for a config.json that asks for more than is stored."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    _check_counts(checkpoint)
    stored = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    kind = str(stored.get("model_type", "(none)"))[:60]
    try:
        if trust_remote_code and "auto_map" in stored:
            config = AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=True)
            config.__dict__.pop("quantization_config", None)
        else:
            config = AutoConfig.for_model(**stored)
        values = no_init_weights() if device == "meta" else contextlib.nullcontext()
        with torch.device(device), _bounded(checkpoint), values:
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code).eval()
    except UsageError:
        raise
    except Exception as error:  # whatever a config.json can make a model class raise
        if lack_of_memory(error) is not None:
            raise
        raise UsageError(
            f"no causal language model for architecture {kind!r} of {checkpoint.path.name} ({' '.join(str(error).split())[:160]})",
            "upgrade transformers, or add --trust-remote-code if the checkpoint brings code that you have read",
        ) from error


def check_fit(checkpoint: Checkpoint, trust_remote_code: bool = False) -> None:
    """Raise UsageError unless the stored tensors, by name and shape, are those that config.json makes the model have.

    transformers itself says so, on the meta device: it knows old names, tied weights and merged experts. Nothing is compared for an
    architecture that it does not know, and for codes of other tools, whose names are not the model's."""
    from transformers import CONFIG_MAPPING
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    config, method = checkpoint.config, checkpoint.config.get("quantization_config", {}).get("quant_method")
    if not isinstance(method, str | None):
        raise UsageError(f"config.json of {checkpoint.name} names no quantizer: {str(method)[:80]}", _NOT_TOGETHER)
    own_code = trust_remote_code and "auto_map" in config
    if not own_code and not isinstance(config.get("model_type"), str):
        raise UsageError(f"config.json of {checkpoint.name} names no model_type", _NOT_TOGETHER)
    known = own_code or config["model_type"] in CONFIG_MAPPING
    if not known or method not in (None, "tilepress", "compressed-tensors"):
        return
    packed = next((weight.name for weight in checkpoint.weights.values() if weight.stored_as.sparse), None)
    if packed is not None and method != "tilepress":
        raise UsageError(
            f"{packed} of {checkpoint.name} is packed, and config.json has no quantization_config that says so",
            "take config.json from where the artifact was made",
        )
    model = build_meta_model(checkpoint, trust_remote_code)
    _check_routers(model, checkpoint)
    _check_generation(checkpoint)
    stored = {
        name: torch.empty(_shape(checkpoint, weight), dtype=_dtype(checkpoint, weight), device="meta")
        for name, weight in checkpoint.weights.items()
    }
    try:
        mapping = get_model_conversion_mapping(model)
        how = LoadStateDictConfig(device_map={"": "meta"}, weight_mapping=mapping)
        with _without_bar():
            info, _ = convert_and_load_state_dict_in_model(model, stored, how)
        model._adjust_missing_and_unexpected_keys(info)
    except Exception as error:
        raise UsageError(
            f"the tensors of {checkpoint.name} do not become a {type(model).__name__} ({first_line(error)})",
            _NOT_TOGETHER,
        ) from error
    tied = getattr(model, "all_tied_weights_keys", {})
    missing = {name for name in info.missing_keys if not _has_twin(name, tied, info.missing_keys)}
    unexpected = {name for name in info.unexpected_keys if not COMPUTED_BUFFER.search(name)}
    mismatched = {f"{name} is {list(a)}, the model's {list(b)}" for name, a, b in info.mismatched_keys}
    broken = {str(name) for name in info.conversion_errors}
    problems = {"mismatched": mismatched, "unexpected": unexpected, "missing": missing, "unmergeable": broken}
    for what, names in problems.items():
        if names:
            first = ", ".join(sorted(names)[:3])[:300] + (" …" if len(names) > 3 else "")
            raise UsageError(f"{len(names)} {what} tensors in {checkpoint.name}: {first}", _NOT_TOGETHER)


def _check_routers(model: torch.nn.Module, checkpoint: Checkpoint) -> None:
    """Raise UsageError for a router that is to choose more experts than there are: no tensor's shape tells it."""
    for name, module in model.named_modules():
        chosen, experts = (getattr(module, key, None) for key in ("top_k", "num_experts"))
        if isinstance(chosen, int) and isinstance(experts, int) and not 0 < chosen <= experts:
            raise UsageError(
                f"config.json of {checkpoint.name} has {name} choose {chosen} of {experts} experts", _NOT_TOGETHER
            )


def _check_generation(checkpoint: Checkpoint) -> None:
    """Raise UsageError for a generation_config.json that keeps the model from loading."""
    from transformers import GenerationConfig

    try:
        GenerationConfig.from_pretrained(checkpoint.path)
    except OSError:
        pass  # there is none, or none that is JSON: transformers then takes its defaults
    except Exception as error:
        raise UsageError(
            f"generation_config.json of {checkpoint.name} does not load: {first_line(error)}",
            "mend it, or take it away",
        ) from error


def _has_twin(name: str, tied: dict[str, str], missing: set[str]) -> bool:
    """Return whether a tensor that is missing is tied to one that is not."""
    return any(name in pair and not missing.issuperset(pair) for pair in tied.items())


def _shape(checkpoint: Checkpoint, weight: Weight) -> tuple[int, ...]:
    """The shape that a weight has in the model, whatever its layout."""
    if not weight.is_packed:
        return weight.entries[0].shape
    form = checkpoint.form(weight)
    return (form.cols, form.rows) if form.transposed else (form.rows, form.cols)


def _dtype(checkpoint: Checkpoint, weight: Weight) -> torch.dtype:
    return checkpoint.form(weight).dtype if weight.is_packed else weight.entries[0].dtype


def _check_counts(checkpoint: Checkpoint) -> None:
    """Raise UsageError for a config that counts more layers, experts, labels … than the stored tensors could be of."""
    most, rest = len(checkpoint.tensors) + _SPARE_COUNT, [("", checkpoint.config)]
    while rest:
        prefix, config = rest.pop()
        for key, value in config.items():
            if isinstance(value, dict):
                rest.append((f"{prefix}{key}.", value))
            elif isinstance(value, (int, float)) and _COUNTED.search(key) and not value <= most:
                raise UsageError(
                    f"config.json of {checkpoint.name} has {prefix}{key} {value}, the checkpoint {len(checkpoint.tensors)} tensors",
                    _NOT_TOGETHER,
                )


@contextlib.contextmanager
def _bounded(checkpoint: Checkpoint) -> Iterator[None]:
    """Stop the construction of a model that has many more parameters, or larger buffers, than the stored tensors can fill."""
    parameters, buffered = 4 * len(checkpoint.tensors) + _SPARE_PARAMETERS, 0
    most = 2 * sum(entry.nbytes for entry in checkpoint.tensors.values()) + _SPARE_BUFFER_BYTES

    def count(module: torch.nn.Module, name: str, parameter) -> None:
        nonlocal parameters
        parameters -= parameter is not None
        if parameters < 0:
            raise UsageError(
                f"config.json of {checkpoint.name} makes a model of many more tensors than the {len(checkpoint.tensors)} stored",
                _NOT_TOGETHER,
            )

    def measure(module: torch.nn.Module, name: str, buffer) -> None:
        nonlocal buffered
        buffered += 0 if buffer is None else buffer.nbytes
        if buffered > most:
            raise UsageError(
                f"config.json of {checkpoint.name} makes a model that computes {buffered / 1e9:.1f} GB of tables ({name})",
                _NOT_TOGETHER,
            )

    hooks = register_module_parameter_registration_hook(count), register_module_buffer_registration_hook(measure)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _without_bar() -> Iterator[None]:
    """Hide transformers' progress bar: nothing is read."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()

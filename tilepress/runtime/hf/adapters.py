"""LoRA adapters of peft over packed linears: `get_peft_model`, `model.add_adapter`, and with them transformers' Trainer.

peft wraps the layer classes that it knows, and takes others from a mapping of its configuration. The mapping gets ours where an
adapter is put in. Decoder layers of INT8 whose projections were merged are taken apart first, so that there is a q_proj to adapt.
The base stays packed and frozen: an adapter cannot be merged into it, and what starts from its numbers (DoRA, PiSSA) is refused.
Gradients pass sparse layers and those of INT8 weights alone; layers of INT8 activations run adapters that were trained elsewhere.
"""

from functools import wraps
from types import ModuleType

from torch import nn

from tilepress.formats import TilepressError
from tilepress.runtime.hf import hooks
from tilepress.runtime.hf.int8_layers import take_apart
from tilepress.runtime.linear.packed import PackedLinear

_WITHOUT_WEIGHTS = (True, False, "gaussian", "eva")  # values of `init_lora_weights` that do not read the weight
_HINT = "adapt the dense model, or what `tilepress convert DIR -o DENSE --to dense` makes of the artifact"


def register() -> None:
    """Make peft know packed linears, now or when it is imported."""
    hooks.after_import("peft.tuners.lora.model", _install)


def _install(lora: ModuleType) -> None:
    stock, kind = lora.LoraModel._prepare_model, _adapted(lora)

    @wraps(stock)
    def prepare(self, peft_config, model: nn.Module):
        if any(isinstance(module, PackedLinear) for module in model.modules()):
            take_apart(model)
            peft_config._register_custom_module({PackedLinear: kind})
        return stock(self, peft_config, model)

    lora.LoraModel._prepare_model = prepare


def _adapted(lora: ModuleType) -> type:
    """Return the class of a packed linear with adapters."""
    from peft.tuners.lora.layer import Linear

    class PackedLora(Linear):
        """A packed linear with LoRA adapters beside it."""

        def _get_in_out_features(self, module: PackedLinear) -> tuple[int, int]:
            return module.in_features, module.out_features

        def update_layer(self, adapter_name, *args, **kwargs) -> None:
            def asked(name: str):  # newer versions of peft pass the configuration, older ones its values
                return kwargs[name] if name in kwargs else getattr(kwargs.get("config"), name, None)

            if asked("use_dora") or asked("init_lora_weights") not in (*_WITHOUT_WEIGHTS, None):
                what = "DoRA" if asked("use_dora") else f"init_lora_weights={asked('init_lora_weights')!r}"
                raise TilepressError(f"{what} reads the weights of the layer, which are packed", _HINT)
            super().update_layer(adapter_name, *args, **kwargs)

        def merge(self, *args, **kwargs) -> None:
            raise TilepressError("an adapter cannot be merged into a packed weight", _HINT)

    return PackedLora

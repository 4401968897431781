"""A model whose decoder layers are in memory one at a time.

The model is built with its parameters on the meta device. What stands before the decoder layers (embeddings) gets its weights once;
each layer gets its own, runs over all inputs, and gives them back. Everything else about a forward pass (masks, rotary embeddings,
which layer slides a window) is the model's own business: for each window it is run with the layers replaced by recorders, which keep the
arguments that each layer would have had. They may depend on the window's length, not on its tokens.
"""

import contextlib
import ctypes
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from tilepress.compress.run.targets import Target
from tilepress.formats import TilepressError, UsageError, foreign_errors
from tilepress.formats.checkpoint import Checkpoint, model_names, module_path
from tilepress.formats.stripes import converted
from tilepress.models.experts import SeparateExperts, place_of
from tilepress.models.meta import build_meta_model

_WITHOUT = "what runs no model still works: prune --method magnitude, quantize --activations token without --smooth"


class LayerByLayer:
    """The decoder layers of a checkpoint's model, each loaded while it is worked on; callers keep the hidden states between layers."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        targets: list[Target],
        device: str,
        dtype: torch.dtype,
        stored_dtype: torch.dtype | None = None,
        trust_remote_code: bool = False,
    ):
        """Compute in `dtype`, with weights rounded to `stored_dtype` first if there is one.

        Raises UsageError for an architecture whose decoder layers are not found."""
        self.checkpoint, self.device = checkpoint, torch.device(device)
        self.dtype, self.stored_dtype = dtype, stored_dtype
        with parameters_on_meta():
            self.model = build_meta_model(checkpoint, trust_remote_code, device="cpu")
        self._separate_experts({target.name for target in targets})
        self.module_of, unplaced = self._place(targets)  # target name -> module path
        self.layers = self._find_layers()  # paths of the decoder layers
        self.targets_of = {
            layer: [t for t in targets if self.module_of.get(t.name, "").startswith(layer + ".")]
            for layer in self.layers
        }
        inside = {t.name for found in self.targets_of.values() for t in found}
        self.outside = [*unplaced, *(t.name for t in targets if t.name in self.module_of and t.name not in inside)]
        self.stored = self._stored_names()  # model name -> stored name of every tensor
        config = self.model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", 1)
        self.head_dim = getattr(config, "head_dim", None) or getattr(config, "hidden_size", heads) // heads
        self._arguments: dict[int, list[tuple[tuple, dict]]] = {}  # of each layer, by sequence length
        self._gives_tuples = False  # whether layers give what the next one gets as the first of several
        self._load_outside()

    def embed(self, ids: Tensor) -> Tensor:
        """Return what the first layer gets for token ids [tokens]: [1, tokens, hidden] on the CPU.

        Keeps what else the layers get, which may depend on the length alone; raises UsageError otherwise."""
        modules, found = [self.model.get_submodule(path) for path in self.layers], []

        def recorder(hidden_states: Tensor, *args, **kwargs):
            found.append((hidden_states, args, kwargs))
            return hidden_states

        why = ""
        try:
            for module in modules:
                module.forward = recorder
            with torch.no_grad():
                self.model.base_model(ids[None].to(self.device), use_cache=False)
        except Exception as error:  # what comes after the layers may stumble over their missing work
            why = f" ({type(error).__name__}: {str(error)[:120]})"
        finally:
            for module in modules:
                del module.forward
        if len(found) != len(modules):
            raise UsageError(
                f"{type(self.model).__name__} cannot be run layer by layer: {len(found)} of {len(modules)} ran{why}",
                _WITHOUT,
            )
        arguments = [(args, kwargs) for _, args, kwargs in found]
        if not _same(self._arguments.setdefault(ids.shape[0], arguments), arguments):
            raise UsageError(
                f"{type(self.model).__name__} hands its layers arguments that depend on the tokens", _WITHOUT
            )
        return found[0][0].cpu()

    def attend_by(self, implementation: str) -> None:
        """Let layers attend by a function that is registered with transformers, and get the masks that go with it. Raises ValueError for a model that takes
        none."""
        self.model.set_attn_implementation(implementation)
        lengths, self._arguments = list(self._arguments), {}
        for length in lengths:
            self.embed(torch.zeros(length, dtype=torch.long))

    def run(self, layer: str, hidden: Tensor, twin: nn.Module | None = None, grad: bool = False) -> Tensor:
        """Return a loaded layer's output for hidden states [1, tokens, hidden] of a length that `embed` has seen; or that of a `twin` of it."""
        args, kwargs = self._arguments[hidden.shape[1]][self.layers.index(layer)]
        with torch.set_grad_enabled(grad), foreign_errors(f"{layer} does not run", _WITHOUT):
            module = self.model.get_submodule(layer) if twin is None else twin
            out = module(hidden.to(self.device, self.dtype), *args, **kwargs)
        self._gives_tuples = isinstance(out, tuple)
        return out[0] if self._gives_tuples else out

    def show_experts_all(self) -> None:
        """Let each expert of a mixture see every token from now on; what the layers give stays that of the router's choice."""
        for module in self.model.modules():
            if isinstance(module, SeparateExperts):
                module.every_token = True

    def argument(self, name: str):
        """Return what the first layer gets by this name beside the hidden states, or None."""
        return next(iter(self._arguments.values()))[0][1].get(name)

    @contextlib.contextmanager
    def loaded(self, layer: str) -> Iterator[nn.Module]:
        """Give the layer its weights for as long as the context lasts."""
        module = self.model.get_submodule(layer)
        try:
            self._load(layer, module)
            yield module
        finally:
            for inner in module.modules():
                for name, parameter in inner._parameters.items():
                    if parameter is not None:
                        inner._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)
            del parameter, inner
            _give_back()

    def load_all(self, loaded: Callable[[str], None] = lambda layer: None) -> nn.Module:
        """Return the whole model with its weights, which it keeps. `loaded` is told of each layer before the next one gets its weights."""
        for layer in self.layers:
            self._load(layer, self.model.get_submodule(layer))
            loaded(layer)
        self._load_head()
        return self.model

    def logits(self, hidden: Tensor, head_hook: Callable[..., Tensor] | None = None) -> Tensor | None:
        """Return the logits [1, tokens, vocabulary] for what the last layer gave [1, tokens, hidden]; None for a model without a head. A forward hook may
        give other ones in the head's place."""
        head, modules = self.model.get_output_embeddings(), [self.model.get_submodule(path) for path in self.layers]
        if head is None:
            return None
        loaded = head.weight.device.type != "meta"
        hidden = hidden.to(self.device, self.dtype)
        try:
            self._load_head()
            for module in modules:
                module.forward = lambda *args, **kwargs: (hidden,) if self._gives_tuples else hidden
            with torch.no_grad(), foreign_errors("what comes after the layers does not run", _WITHOUT):
                ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=self.device)
                hook = head.register_forward_hook(head_hook) if head_hook else contextlib.nullcontext()
                with hook:
                    return self.model(ids, use_cache=False).logits
        finally:
            for module in modules:
                module.__dict__.pop("forward", None)
            if not loaded:
                for name, parameter in head._parameters.items():
                    if parameter is not None:
                        head._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)

    def _load_head(self) -> None:
        tied = getattr(self.model, "all_tied_weights_keys", {})
        head = self.model.get_output_embeddings()
        path = next((path for path, module in self.model.named_modules() if module is head), None)
        if head is not None and f"{path}.weight" not in tied:
            self._load_own(path, head)
        for name, same in tied.items():
            owner, _, kind = name.rpartition(".")
            self.model.get_submodule(owner)._parameters[kind] = self.model.get_parameter(same)

    def _separate_experts(self, targets: set[str]) -> None:
        """Make modules of experts that are stored one by one, targets or not: the model merges them, the checkpoint has them apart."""
        known, found = {path for path, _ in self.model.named_modules()}, {}
        for name, weight in self.checkpoint.weights.items():
            place = place_of(name, known)
            if place and module_path(name, known, self.model.base_model_prefix) is None:
                if place.experts is None and name in targets:
                    raise UsageError(f"{name} has no place in the model", "leave it out with --ignore")
                if place.experts is None:
                    continue
                form = self.checkpoint.form(weight) if weight.is_packed else None
                rows, cols = (form.rows, form.cols) if form else weight.entries[0].shape
                linear = nn.Linear(cols, rows, bias=False, device="meta", dtype=self.dtype)
                found.setdefault(place.experts, {}).setdefault(place.number, {})[place.linear] = linear
        for path, experts in found.items():
            try:
                self.model.set_submodule(path, SeparateExperts(self.model.get_submodule(path), experts))
            except ValueError as error:
                raise UsageError(f"the experts of {path} ({error}) cannot be run one by one", _WITHOUT) from error

    def _place(self, targets: list[Target]) -> tuple[dict[str, str], list[str]]:
        known = {path for path, _ in self.model.named_modules()}
        placed, unplaced = {}, []
        for target in targets:
            path = module_path(target.name, known, self.model.base_model_prefix)
            place = place_of(target.name, known)
            if path is None and place:
                path = f"{place.experts}.{place.number}.{place.linear}"
            if path in known:
                placed[target.name] = path
            else:
                unplaced.append(target.name)
        return placed, unplaced

    def _find_layers(self) -> list[str]:
        """Return the paths in the outermost list of modules that holds most of the targets."""
        counts = {}
        for path, module in self.model.named_modules():
            if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{outer}.") for outer in counts):
                counts[path] = sum(p.startswith(f"{path}.") for p in self.module_of.values())
        best = max(counts, key=counts.get, default=None)
        if best is None or not counts[best]:
            raise UsageError(f"{type(self.model).__name__} has no list of decoder layers", _WITHOUT)
        return [f"{best}.{name}" for name, _ in self.model.get_submodule(best).named_children()]

    def _stored_names(self) -> dict[str, str]:
        """Return the stored name of each tensor of the model, through the renamings that transformers knows."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming

        renamings = [r for r in get_model_conversion_mapping(self.model) or [] if isinstance(r, WeightRenaming)]
        expected, found = set(self.model.state_dict()), {}
        for stored in self.checkpoint.tensors:
            renamed = stored
            for renaming in renamings:
                renamed, _ = renaming.rename_source_key(renamed)
            names = [n for candidate in (stored, renamed) for n in model_names(candidate, self.model.base_model_prefix)]
            path = next((name for name in names if name in expected), None)
            if path is not None:
                found.setdefault(path, stored)
        return found | {f"{path}.weight": name for name, path in self.module_of.items()}

    def _load_outside(self) -> None:
        """Load embeddings and whatever else is in no decoder layer, but not the output head."""
        head = self.model.get_output_embeddings()
        for path, module in self.model.named_modules():
            if module is not head and not any(path == layer or path.startswith(f"{layer}.") for layer in self.layers):
                self._load_own(path, module)
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self.device)

    def _load(self, prefix: str, module: nn.Module) -> None:
        for path, inner in module.named_modules(prefix=prefix):
            self._load_own(path, inner)

    def _load_own(self, path: str, module: nn.Module) -> None:
        for kind in (module._parameters, module._buffers):
            for name, old in kind.items():
                full = f"{path}.{name}" if path else name
                stored = self.stored.get(full)
                if old is None or (stored is None and old.device.type != "meta"):
                    continue
                if stored is None:
                    raise UsageError(f"the model's {full} is not in the checkpoint", _WITHOUT)
                tensor = self.checkpoint.dense(self.checkpoint.weights[stored])
                if tensor.shape != old.shape:
                    raise TilepressError(
                        f"{stored} is {list(tensor.shape)}, the model's is {list(old.shape)}",
                        "the checkpoint and its config.json do not belong together",
                    )
                if tensor.is_floating_point():
                    parts = converted(tensor, self.stored_dtype or tensor.dtype, stored)
                    tensor, first = torch.empty(tensor.shape, dtype=self.dtype, device=self.device), 0
                    for part in parts:  # one at a time: together they would be the tensor once more
                        tensor.view(-1)[first : first + len(part)] = part
                        first += len(part)
                else:
                    tensor = tensor.to(self.device)
                kind[name] = nn.Parameter(tensor, requires_grad=False) if kind is module._parameters else tensor


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules made inside have their parameters on the meta device and their buffers, which they compute themselves, in memory."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and parameter.device.type != "meta":
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _give_back() -> None:
    """Return freed memory to the system: glibc would keep what a layer took, in pieces that the next one does not fit into."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _same(one: list, other: list) -> bool:
    """Return whether two nested values hold nearly equal tensors; tensors that layers share are compared once."""
    seen = set()

    def same(a, b) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if (id(a), id(b)) not in seen:
                seen.add((id(a), id(b)))
                # Not bit for bit: a vectorized cosine may round differently where its memory is aligned otherwise.
                return a.shape == b.shape and torch.allclose(a.float(), b.float(), rtol=0.02, atol=0.02, equal_nan=True)
            return True
        if isinstance(a, dict) and isinstance(b, dict):
            return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
            return len(a) == len(b) and all(map(same, a, b))
        return True

    return one is other or same(one, other)

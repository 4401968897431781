"""The experts of a mixture, each with linear layers of its own, under their on-disk names.

transformers 5 merges all experts of a layer into two 3-D parameters; checkpoints store them one by one, and they are compressed one by one.
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tilepress.models.families import EXPERTS

EXPERT_WEIGHT = re.compile(r"^(?P<path>.*\.experts)\.(?P<number>\d+)\.(?P<linear>\w+)\.weight$")


class SeparateExperts(nn.Module):
    """Takes the place of a `*Experts` module of transformers 5:

    forward(hidden_states [tokens, hidden], top_k_index [tokens, k], top_k_weights [tokens, k]) -> [tokens, hidden].
    """

    def __init__(self, original: nn.Module, experts: dict[str, dict[str, nn.Module]]):
        """`experts`: {"0": {"gate_proj": …, "up_proj": …, "down_proj": …}, …}, all with the same names.

        Raises ValueError for experts that compute something else than down(act(gate) * up), or some of which are missing.
        """
        super().__init__()
        complete = len(experts) == getattr(original, "num_experts", None) and any(
            all(set(names) == set(linears) for linears in experts.values()) for names in EXPERTS
        )
        usual = (
            hasattr(original, "act_fn")
            and getattr(original, "is_concatenated", True)
            and getattr(original, "has_gate", True)
            and not getattr(original, "has_bias", False)
        )
        if not complete or not usual:
            raise ValueError(type(original).__name__)
        self.act_fn = original.act_fn
        self.num_experts = len(experts)
        self.every_token = False  # whether each expert sees all tokens, for statistics; the output has its own alone
        self.gate, self.up, self.down = next(names for names in EXPERTS if set(names) == set(experts["0"]))
        for number, linears in experts.items():
            self.add_module(number, nn.ModuleDict(linears))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        chosen = range(self.num_experts) if self.every_token else torch.unique(top_k_index).tolist()
        for number in chosen:
            if number >= self.num_experts:  # expert parallelism marks tokens of other ranks so
                continue
            token, choice = torch.where(top_k_index == number)
            # A copy for each: what reads one tensor counts as one input.
            x = hidden_states.clone() if self.every_token else hidden_states[token]
            expert = self.get_submodule(str(number))
            y = expert[self.down](self.act_fn(expert[self.gate](x)) * expert[self.up](x))
            y = y[token] if self.every_token else y
            out.index_add_(0, token, (y * top_k_weights[token, choice, None]).to(out.dtype))
        return out


@contextlib.contextmanager
def counting_tokens(modules: dict[str, nn.Module], device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Count the tokens that routers give each expert while the body runs: [experts] by the path of their module."""
    found = {path: module for path, module in modules.items() if isinstance(module, SeparateExperts)}
    counts = {path: torch.zeros(module.num_experts, dtype=torch.long, device=device) for path, module in found.items()}

    def counter(path: str):
        size = found[path].num_experts

        def count(_, args: tuple) -> None:
            counts[path] += torch.bincount(args[1].flatten(), minlength=size)[:size].to(device)

        return count

    handles = [module.register_forward_pre_hook(counter(path)) for path, module in found.items()]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def count_of(linear: str, counts: dict[str, Tensor]) -> int | None:
    """Return what `counting_tokens` counted for the expert of a linear layer, by its path; None for one that is no expert's."""
    experts, _, number = linear.rpartition(".")[0].rpartition(".")
    return int(counts[experts][int(number)]) if experts in counts else None


def expert_tokens(calibration: dict) -> dict[str, list[int]]:
    """Return how many tokens of its text routers gave each expert, as a calibration's facts have it, by the stored path of a layer's experts."""
    items = [(item["name"], item) for item in calibration.get("pruned", [])]
    items += [(name, item) for item in calibration.get("inputs", []) for name in item["weights"]]
    found: dict[str, dict[int, int]] = {}
    for name, item in items:
        if match := EXPERT_WEIGHT.match(name):
            of_layer, number = found.setdefault(match["path"], {}), int(match["number"])
            of_layer[number] = max(of_layer.get(number, 0), item.get("routed", item["tokens"]))
    return {path: [tokens for _, tokens in sorted(of_layer.items())] for path, of_layer in found.items()}


@dataclass(frozen=True)
class Place:
    """The place of an expert's weight: the model's experts module (None if it has none such), which expert, which
    linear layer.
    """

    experts: str | None
    number: str
    linear: str


def place_of(weight: str, known: set[str]) -> Place | None:
    """The place of a weight by its stored name, in a model with the module paths `known`; None if it is no expert's.

    Its experts stand under the same path, or are the only ones of the same layer.
    """
    match = EXPERT_WEIGHT.match(weight)
    if match is None:
        return None
    path, layer = match["path"], re.search(r"\.(\d+)\.", match["path"])
    if path not in known:
        same_layer = [other for other in known if other.endswith(".experts") and layer and f".{layer[1]}." in other]
        path = same_layer[0] if len(same_layer) == 1 else None
    return Place(path, match["number"], match["linear"])

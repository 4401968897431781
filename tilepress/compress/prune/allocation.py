"""The sparsity of each weight, chosen so that all of them together have exactly the zeros that were asked for.

`uniform` prunes all alike. `owl` (Yin et al. 2023, arXiv 2310.05175, section 3) prunes those decoder layers less that have more outliers:
elements whose |weight| times the norm of their input exceeds five times the mean (of the weight; there, of the layer). `auto` measures: of a
few windows it prunes one input's weights at a time, lets the rest of the dense model run, and sees what the last hidden states lose. Weights
then get sparsities at which the next zero costs the same everywhere. Both read the dense model once more before anything is pruned. Outside
of decoder layers a weight gets the sparsity that was asked for.
"""

from dataclasses import asdict, dataclass

import torch

from tilepress.compress.layers.walk import FEW_TOKENS
from tilepress.compress.prune.settings import Settings
from tilepress.compress.prune.survey import CURVE, survey
from tilepress.compress.run.plan import Plan, Progress
from tilepress.compress.run.targets import Target
from tilepress.formats import UsageError
from tilepress.formats.artifact import to_json, write_atomic
from tilepress.formats.files import read_json
from tilepress.ranks import ALONE, Ranks

ALLOCATIONS = ("uniform", "owl", "auto")
FILE = "allocation.json"  # in the work folder
OWL_REACH = 0.08  # half of what lies between the least and the most of layers, as in the paper
AUTO_REACH = 0.12  # how far a weight's sparsity may be from the one that was asked for


@dataclass(frozen=True)
class Allocation:
    """The zeros of each weight by its stored name, how they were chosen, and facts for the manifest."""

    chosen: str
    zeros: dict[str, int]
    facts: dict


def allocate(plan: Plan, settings: Settings, device: str, progress: Progress, ranks: Ranks = ALONE) -> Allocation:
    """Lay out the zeros of a plan's targets, and write them to the work folder for `read_allocation`.

    Raises UsageError for too little text, and where a survey in the work folder was made from other text, weights or another kind of device."""
    targets, sparsity = plan.targets, settings.sparsity
    sparsities, facts = {target.name: sparsity for target in targets}, {}
    if settings.allocation != "uniform":
        weights = survey(plan, settings, device, progress, ranks)
        if not weights:
            raise UsageError(
                f"--allocation {settings.allocation} has too little text to look at: no weight saw {FEW_TOKENS} tokens",
                "give more text, or --allocation uniform",
            )
        lay_out = by_outliers if settings.allocation == "owl" else by_sensitivity
        chosen = lay_out(weights, {t.name: t.elements for t in targets if t.name in weights}, sparsity)
        sparsities |= chosen
        facts = {"sparsity": {name: round(value, 6) for name, value in sorted(chosen.items())}}
    zeros = counts(targets, sparsities, settings.count(sum(target.elements for target in targets)))
    made = Allocation(settings.allocation, zeros, facts)
    if not ranks.rank:
        write_atomic(plan.work / FILE, to_json(asdict(made)), plan.work)
    ranks.wait()
    return made


def read_allocation(plan: Plan) -> Allocation:
    """Return what `allocate` wrote."""
    return Allocation(**read_json(plan.work / FILE))


def by_outliers(weights: dict[str, dict], elements: dict[str, int], sparsity: float) -> dict[str, float]:
    """Return OWL's sparsity of each weight: linear in its layer's share of outliers, two OWL_REACH from the least to the most; the mean is `sparsity`.

    `weights`: {name: {"layer": …, "outliers": …}}."""
    size, outliers = {}, {}
    for name, found in weights.items():
        size[found["layer"]] = size.get(found["layer"], 0) + elements[name]
        outliers[found["layer"]] = outliers.get(found["layer"], 0) + found["outliers"]
    shares = {layer: outliers[layer] / size[layer] for layer in size}
    span = max(shares.values()) - min(shares.values())
    reach = min(OWL_REACH, sparsity, 1 - sparsity)
    moved = {
        layer: -(share - min(shares.values())) / span * 2 * reach if span else 0.0 for layer, share in shares.items()
    }
    mean = sum(moved[layer] * size[layer] for layer in size) / sum(size.values())
    wanted = {name: sparsity + moved[found["layer"]] - mean for name, found in weights.items()}
    return balanced(wanted, elements, sparsity, max(sparsity - 2 * reach, 0.0), min(sparsity + 2 * reach, 1.0))


def by_sensitivity(weights: dict[str, dict], elements: dict[str, int], sparsity: float) -> dict[str, float]:
    """Return the sparsities with the least predicted loss, each at most AUTO_REACH from `sparsity`, which is their mean.

    `weights`: {name: {"curve": what pruning it to each of CURVE loses locally, "cost": the loss of the model for one of that}}."""
    reach = min(AUTO_REACH, (1 - sparsity) / 2, sparsity)
    low, high = sparsity - reach, sparsity + reach
    grid = torch.tensor(CURVE, dtype=torch.float64)
    points, slopes = {}, {}
    for name, found in weights.items():
        curve = torch.tensor(found["curve"], dtype=torch.float64) * found["cost"] / elements[name]
        slopes[name] = ((curve[1:] - curve[:-1]) / (grid[1:] - grid[:-1])).cummax(0).values  # of a convex curve
        points[name] = (grid[1:] + grid[:-1]) / 2

    def at(price: float) -> dict[str, float]:
        """Return the sparsities at which each weight's next zero costs `price`."""
        found = {}
        for name, slope in slopes.items():
            i = int(torch.searchsorted(slope, price))
            if 0 < i < len(slope):
                rise = float(slope[i] - slope[i - 1])
                part = (price - float(slope[i - 1])) / rise if rise > 0 else 0.5
                value = float(points[name][i - 1] + part * (points[name][i] - points[name][i - 1]))
            else:
                value = 0.0 if i == 0 else 1.0
            found[name] = min(max(value, low), high)
        return found

    lower, upper = 0.0, max(float(slope[-1]) for slope in slopes.values()) or 1.0
    for _ in range(200):
        price = (lower + upper) / 2
        chosen = at(price)
        mean = sum(chosen[name] * elements[name] for name in chosen) / sum(elements.values())
        lower, upper = (price, upper) if mean < sparsity else (lower, price)
    return balanced(chosen, elements, sparsity, low, high)


def balanced(
    wanted: dict[str, float], elements: dict[str, int], sparsity: float, low: float, high: float
) -> dict[str, float]:
    """Return the wanted sparsities in [low, high], all moved alike until their mean over elements is `sparsity`."""
    below, above = -1.0, 1.0
    for _ in range(100):
        shift = (below + above) / 2
        found = {name: min(max(value + shift, low), high) for name, value in wanted.items()}
        mean = sum(found[name] * elements[name] for name in found) / sum(elements.values())
        below, above = (shift, above) if mean < sparsity else (below, shift)
    return found


def counts(targets: list[Target], sparsities: dict[str, float], zeros: int) -> dict[str, int]:
    """Return the zeros of each weight by name: sparsity times elements, rounded so that their sum is `zeros` (largest remainders first, then by name)."""
    exact = {target.name: sparsities[target.name] * target.elements for target in targets}
    found = {name: int(value) for name, value in exact.items()}
    order = sorted(exact, key=lambda name: (found[name] - exact[name], name))
    missing = zeros - sum(found.values())
    for i in range(abs(missing)):
        found[order[i % len(order)]] += 1 if missing > 0 else -1
    return found

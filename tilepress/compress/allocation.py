"""How much each weight is pruned, so that all of them together have exactly the zeros that were asked for.

`uniform` prunes all alike.
"""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from tilepress.compress.plan import Plan, Progress
from tilepress.compress.targets import Target
from tilepress.formats.artifact import to_json, write_atomic
from tilepress.formats.checkpoint import read_json

if TYPE_CHECKING:
    from tilepress.compress.prune import PruneRecipe

ALLOCATIONS = ("uniform", "owl", "auto")
FILE = "allocation.json"  # in the work folder


@dataclass(frozen=True)
class Allocation:
    """The zeros of each weight by its stored name, and how they were chosen."""

    chosen: str
    zeros: dict[str, int]
    facts: dict


def allocate(plan: Plan, recipe: "PruneRecipe", device: str, progress: Progress) -> Allocation:
    """Lays out the zeros of a plan's targets; the result is a file in the work folder, which a resumed run finds."""
    path = plan.work / FILE
    if not path.exists():
        targets = plan.targets
        total = recipe.count(sum(target.elements for target in targets))
        zeros = counts(targets, {target.name: recipe.sparsity for target in targets}, total)
        write_atomic(path, to_json(asdict(Allocation("uniform", zeros, {}))), plan.work)
    return read_allocation(plan)


def read_allocation(plan: Plan) -> Allocation:
    return Allocation(**read_json(plan.work / FILE))


def counts(targets: list[Target], sparsities: dict[str, float], zeros: int) -> dict[str, int]:
    """Zeros of each weight by name: sparsity times elements, rounded so that their sum is `zeros` (largest remainders first, then by name)."""
    exact = {target.name: sparsities[target.name] * target.elements for target in targets}
    found = {name: int(value) for name, value in exact.items()}
    order = sorted(exact, key=lambda name: (found[name] - exact[name], name))
    for name in order[: max(zeros - sum(found.values()), 0)]:
        found[name] += 1
    return found

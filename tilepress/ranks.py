"""The processes that torchrun started, and what they do together: the one place that speaks to torch.distributed.

Every rank calls the same methods in the same order. `ALONE` stands for a process by itself: each method gives back what it got, so that
code for several ranks is the code for one, and gives one's bytes. Sums over ranks have one order for one number of ranks: all ranks hold
the same bits, and a second run does.

A rank that ends leaves the others with a broken connection, which they tell as `RankLost`. Which of them speaks to the user is settled by
`first_to_tell`, through the store that torchrun's agent keeps: one message, whoever failed first.
"""

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tilepress.formats import TilepressError, UsageError

T = TypeVar("T")
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
_TOGETHER = 1 << 24  # elements of tensors that travel together
_TOLD = "tilepress/told"  # of the store: how many ranks had something to say of their end
_store: dist.Store | None = None  # of the group that was started


class RankLost(TilepressError):
    """Another rank of the run has ended, so that this one cannot go on."""


def _of_connection(error: RuntimeError) -> bool:
    """Return whether torch raised this because another process is gone: gloo has no type of its own for it."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


def _answered(method: Callable) -> Callable:
    """Turn what torch raises of a broken connection into RankLost."""

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        try:
            return method(self, *args, **kwargs)
        except TilepressError:
            raise
        except RuntimeError as error:
            if not _of_connection(error):
                raise
            raise RankLost(
                f"a rank of this run has ended, and rank {self.rank} of {self.size} cannot go on without it",
                "if it said nothing it was killed: look at the machines' memory; then the same command with --resume",
            ) from error

    return call


@dataclass(frozen=True)
class Ranks:
    """This process's place among those that work together, and what they do together."""

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = field(default=None, repr=False)

    patience: ClassVar[timedelta] = timedelta(hours=12)  # a rank may write a large shard while the others wait

    @classmethod
    def start(cls, device: str | torch.device = "auto") -> Self | None:
        """The group that torchrun's variables describe, over NCCL on cards (of each host the rank's own) or gloo on a CPU; None outside of torchrun, or
        for one process. Raises UsageError where there are fewer cards than ranks."""
        global _store
        size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        if size < 2 or "LOCAL_RANK" not in os.environ:
            return None
        cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
        kind = torch.device(("cuda" if cards else "cpu") if device == "auto" else device).type
        here = torch.device("cpu")
        options: dict[str, Any] = {}
        if kind == "cuda":
            local = int(os.environ["LOCAL_RANK"])
            if local >= cards:
                raise UsageError(f"process {local} of torchrun has no card: torch sees {cards}", "start fewer")
            options["device_id"] = here = torch.device("cuda", local)
            torch.cuda.set_device(here)
        _store = next(dist.rendezvous("env://"))[0]
        backend = "nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, store=_store, rank=rank, world_size=size, timeout=cls.patience, **options)
        return cls(rank, size, here, dist.group.WORLD)

    def close(self) -> None:
        dist.destroy_process_group(self.group)

    @property
    def name(self) -> str:
        return f"{self.size} ranks, {dist.get_backend(self.group)}"

    @_answered
    def sum(self, x: Tensor) -> Tensor:
        """x, with the sum over the ranks in it."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    @_answered
    def sum_each(self, tensors: Sequence[Tensor]) -> None:
        """Put the sum over the ranks in each of some tensors of one dtype. Small ones travel together."""
        waiting: list[Tensor] = []
        for number, x in enumerate(tensors if self.size > 1 else (), 1):
            waiting.append(x)
            if number == len(tensors) or sum(each.numel() for each in waiting) >= _TOGETHER:
                whole = torch.cat([each.reshape(-1) for each in waiting])
                dist.all_reduce(whole, group=self.group)
                for each, found in zip(waiting, whole.split([each.numel() for each in waiting]), strict=True):
                    each.copy_(found.view_as(each))
                waiting = []

    @_answered
    def sum_for(self, x: Tensor, owner: int) -> Tensor:
        """x, with the sum over the ranks in it on the rank `owner`, and nothing to be used on the others."""
        if self.size > 1:
            dist.reduce(x, owner, group=self.group)
        return x

    @_answered
    def largest(self, x: Tensor) -> Tensor:
        """x, with each element's largest value on any rank in it."""
        if self.size > 1:
            dist.all_reduce(x, dist.ReduceOp.MAX, self.group)
        return x

    @_answered
    def gather(self, x: Tensor) -> Tensor:
        """[...] of each rank -> [ranks, ...]."""
        if self.size == 1:
            return x[None]
        found = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        _gather(found, x.contiguous(), group=self.group)
        return found.unflatten(0, (self.size, x.shape[0]))

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers. Waits for the card."""
        found = torch.tensor(-number, device=self.device)
        return -int(self.largest(found))

    @_answered
    def share(self, x: Tensor, owner: int) -> Tensor:
        """x of the rank `owner`, in the place of each other rank's x, which is of its shape and dtype and contiguous."""
        if self.size > 1:
            dist.broadcast(x.view(-1).view(torch.uint8), owner, group=self.group)  # gloo does not know every dtype
        return x

    @_answered
    def tell(self, what: T) -> list[T]:
        """What each rank tells, by rank: anything that can be pickled, tensors on the CPU."""
        if self.size == 1:
            return [what]
        found: list = [None] * self.size
        dist.all_gather_object(found, what, group=self.group)
        return found

    def wait(self) -> None:
        """Wait until every rank has come here."""
        self.tell(None)

    def first(self, make: Callable[[], T]) -> T:
        """What the first rank makes. What it raises as TilepressError every rank raises."""
        if self.size == 1:
            return make()
        found: T | None = None
        error = None
        if not self.rank:
            try:
                found = make()
            except TilepressError as raised:
                error = raised
        found, failed = self.tell((found, error and (type(error), error.message, error.hint)))[0]
        if failed:
            kind, message, hint = failed
            raise error or kind(message, hint)
        return found

    def agree(self, facts: dict[str, Any], hint: str) -> None:
        """Raise UsageError on every rank where one has other facts than the first; `facts` are by the words that name them."""
        every = self.tell(facts)
        for rank, found in enumerate(every):
            if other := [what for what in facts if found[what] != every[0][what]]:
                raise UsageError(f"rank {rank} has {' and '.join(other)} other than rank 0's", hint)

    def mine(self, items: Sequence[T]) -> list[T]:
        """This rank's share of items, which are dealt one after the other."""
        return list(items[self.rank :: self.size])


ALONE = Ranks(0, 1, torch.device("cpu"))


def dealt(costs: Sequence[float], size: int) -> list[int]:
    """Return the rank of each of some pieces of work: the dearest first, each to the rank that has least to do."""
    load, owners = [0.0] * size, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[i] = min(range(size), key=load.__getitem__)
        load[owners[i]] += costs[i]
    return owners


def first_to_tell() -> bool:
    """Return whether this process is the one that tells the user how a run ended: the first that asks, of those that torchrun started."""
    rank = int(os.environ.get("RANK", 0)) if "LOCAL_RANK" in os.environ else 0
    if "LOCAL_RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", 1)) < 2:
        return True
    try:
        store = _store
        if store is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = dist.TCPStore(
                os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=5)
            )
        if store is not None:
            return store.add(f"{_TOLD}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", 1) == 1
        return rank == 0
    except (RuntimeError, KeyError, ValueError):  # the store was the first rank's, which is gone
        return rank <= 1

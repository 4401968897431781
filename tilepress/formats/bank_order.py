"""Ahead-of-time order of a tile's items, so that scattering them into shared memory meets as few bank conflicts as possible.

The kernel stores 32 items a step (one a lane) as 16-bit writes into a window of shared memory. Shared memory has 32 banks of
32-bit words; a step takes as many wavefronts as the fullest bank has *distinct words* in it. Two items that are the two
halves of one word therefore cost one wavefront together. The order decides which items share a step:

    bank  0  1  2  3 ...            a *single* step: every bank gives one word. A bank with too many items gives a word with
    step  .  .  P  .                both halves (P), and one with too few gives nothing (a hole): as many P as holes, so
          .  o  .  .                the step still has 32 items, in one wavefront.
          P  .  .  o                a *double* step: up to two words a bank, two wavefronts.

Flash-LLM (VLDB 2024, section 4.3) orders greedily, item by item. Here the numbers of single and double steps follow from the
banks' counts in closed form, and every item computes its own place from its rank in its bank: no loop over items, so the
same tensor code runs on CPU and GPU. Dealing a list of at most `n` entries round-robin to `n` steps never gives a step two
of them; that one fact places words, holes, the items of double steps (twice) and the tail.

Steps come in fours because a lane loads four items at once (16 bytes): item `v` of lane `l` of load `q` is the word
`128 q + 4 l + v`. A tile's last load holds fewer lanes when the number of items is no multiple of 128: the *tail*, four
steps of 8, 16 or 24 items.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BANKS = 32
_SWEEPS = 3  # over a tile's warps: each gets its banks anew, given the others'


@dataclass(frozen=True)
class BankPlan:
    """The places of the items of each (tile, bank). Every field but the first three is int32 [T, 32]."""

    full_steps: Tensor  # [T] steps of 32 items
    single: Tensor  # [T] of them in one wavefront; the others are double
    lanes: Tensor  # [T] lanes of the tail: 0, 8, 16 or 24
    count: Tensor  # items of the bank, padding included
    in_single: Tensor  # of them in single steps
    kept: Tensor  # pairs that stay together in single steps
    in_tail: Tensor  # items in the tail, the last of the bank's list
    pads: Tensor  # items of padding, at the end of the bank's list


def _exclusive(x: Tensor) -> Tensor:
    return torch.cumsum(x, -1, dtype=torch.int32) - x


def _take_highest(level: Tensor, cap: Tensor, total: Tensor) -> Tensor:
    """Takes `total` [T] units from the banks that stand highest, at most `cap` [T, 32] from each, levelling them from above.

    `total` may not exceed the sum of the caps. Returns int32 [T, 32].
    """
    low, high = level.amin(1) - cap.amax(1) - 1, level.amax(1)
    for _ in range(18):  # the smallest water line that takes no more than total
        line = (low + high) // 2
        over = torch.clamp(level - line[:, None], min=0).minimum(cap).sum(1) > total
        low, high = torch.where(over, line + 1, low), torch.where(over, high, line)
    taken = torch.clamp(level - high[:, None], min=0).minimum(cap)
    one_more = torch.clamp(level - high[:, None] + 1, min=0).minimum(cap) - taken
    rest = (total - taken.sum(1)).to(torch.int32)
    return (taken + one_more * (_exclusive(one_more) < rest[:, None])).to(torch.int32)


def plan(singles: Tensor, pairs: Tensor) -> BankPlan:
    """Splits every bank's items over single steps, double steps and the tail.

    `singles`, `pairs`: int32 [T, 32], the bank's words with one and with both halves non-zero. A bank's items are listed
    pairs first, then singles, then padding (words of their own behind the window).
    """
    count = singles + 2 * pairs
    items = count.sum(1, dtype=torch.int32)
    missing = (-items) % BANKS
    pads = _take_highest(-count, torch.full_like(count, BANKS), missing)
    count = count + pads
    items = items + missing

    full_steps = items // 128 * 4
    lanes = items % 128 // 4
    four = count.clamp(max=4)
    cap = torch.where((four.sum(1) >= 4 * lanes)[:, None], four, count)
    in_tail = _take_highest(count - pairs, cap, 4 * lanes)

    body = count - in_tail
    pairs = torch.minimum(pairs, body // 2)  # the tail may have broken some

    def bounds(double: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        single = full_steps - double
        most = torch.minimum(body, single[:, None] + torch.minimum(pairs, single[:, None]))
        least = torch.minimum((body - 2 * double[:, None]).clamp(min=0), most)
        fits = (body <= most + 2 * double[:, None]).all(1)
        return least, most, fits & (least.sum(1) <= 32 * single) & (most.sum(1) >= 32 * single)

    low, high = torch.zeros_like(full_steps), full_steps.clone()
    for _ in range(int(full_steps.max()).bit_length() if full_steps.numel() else 0):
        middle = (low + high) // 2
        fits = bounds(middle)[2]
        low, high = torch.where(fits, low, torch.minimum(middle + 1, high)), torch.where(fits, middle, high)
    # Where none fits, a few banks are crowded: everything is dealt as double.
    single = torch.where(bounds(high)[2], full_steps - high, 0)
    least, most, _ = bounds(full_steps - single)
    least = torch.where(single[:, None] > 0, least, 0)
    room = torch.where(single[:, None] > 0, most - least, 0)
    rest = (32 * single - least.sum(1))[:, None].to(torch.int32)
    in_single = (least + (rest - _exclusive(room)).clamp(min=0).minimum(room)).to(torch.int32)
    kept = (in_single - single[:, None]).clamp(min=0)
    return BankPlan(full_steps, single, lanes, count, in_single, kept, in_tail, pads)


class Placement:
    """Answers for any items of a chunk of tiles at which word of their tile they stand."""

    def __init__(self, plan: BankPlan):
        self.plan = plan
        double = plan.full_steps - plan.single
        holes = (plan.single[:, None] - plan.in_single).clamp(min=0)
        in_double = plan.count - plan.in_tail - plan.in_single
        flat = BANKS * plan.count.shape[0]

        def per_bank(x: Tensor) -> Tensor:
            return (x if x.dim() == 2 else x[:, None].expand(-1, BANKS)).reshape(flat)

        # Where a bank's first single-step word is dealt: after its pairs, or after its holes. No bank has both.
        first_pair, first_hole = _exclusive(plan.kept), _exclusive(holes)
        start = torch.where(plan.kept > 0, first_pair + plan.kept, first_hole + holes) - 2 * plan.kept
        self._first_pair = per_bank(first_pair)
        self._start = per_bank(start)
        self._single = per_bank(plan.single)
        self._double = per_bank(double)
        self._in_single = per_bank(plan.in_single)
        self._twice_kept = per_bank(2 * plan.kept)
        self._body = per_bank(plan.count - plan.in_tail)
        self._double_start = per_bank(_exclusive(in_double) - plan.in_single)
        self._tail_start = per_bank(_exclusive(plan.in_tail) - (plan.count - plan.in_tail))
        self._tail_step = per_bank(plan.full_steps)
        banks = torch.arange(BANKS, dtype=torch.int32, device=plan.count.device)
        # Kept pairs and holes, both listed tile by tile and bank by bank, match one to one: a pair's second half takes
        # the lane of the bank that leaves the hole.
        self._hole_lane = banks.repeat(plan.count.shape[0]).repeat_interleave(holes.reshape(flat))

    def words(self, tile_bank: Tensor, rank: Tensor) -> tuple[Tensor, Tensor]:
        """Word within the tile and step of the items number `rank` of bank `tile_bank` (= 32 * tile + bank), all int32 [n]."""

        def of(x: Tensor) -> Tensor:
            return x.index_select(0, tile_bank)

        single = of(self._single)
        in_double = rank >= of(self._in_single)
        in_tail = rank >= of(self._body)
        deal = torch.where(in_double, of(self._double_start), of(self._start))
        deal = torch.where(in_tail, of(self._tail_start), deal) + rank
        modulus = torch.where(in_double, of(self._double), single)
        modulus = torch.where(in_tail, 4, modulus)
        turn = torch.div(deal, modulus, rounding_mode="trunc")
        step = deal - turn * modulus
        lane = torch.where(in_double, turn, tile_bank & (BANKS - 1))
        step += torch.where(in_tail, of(self._tail_step), torch.where(in_double, single, 0))
        return self._word(step, lane), step

    def pair_words(self, tile_bank: Tensor, number: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The same for both halves of pair `number` of its bank: (low word, low step, high word, high step).

        Must be given all pairs of the chunk, tile by tile and bank by bank.
        """
        low, low_step = self.words(tile_bank, 2 * number)
        high, high_step = self.words(tile_bank, 2 * number + 1)
        kept = (2 * number < self._twice_kept[tile_bank]).nonzero().squeeze(1)
        at = tile_bank[kept]
        step = (self._first_pair[at] + number[kept]) % self._single[at]
        low[kept] = self._word(step, at & (BANKS - 1))
        high[kept] = self._word(step, self._hole_lane)
        low_step[kept] = high_step[kept] = step
        return low, low_step, high, high_step

    @staticmethod
    def _word(step: Tensor, lane: Tensor) -> Tensor:
        return (step >> 2) * 128 + lane * 4 + (step & 3)


def assign(counts: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the column of values of each run of a tiled bitmap, the line where it begins, and the lines of each tile.

    `counts` are the groups of each run, int32 [tiles, warps, 32]; columns and lines are [tiles, runs]. Warp after warp, the
    fullest run takes the bank with the lowest column; in further sweeps each warp's runs are taken out and placed again.
    """
    (tiles, warps, lanes), device = counts.shape, counts.device
    heights = torch.zeros(tiles, BANKS, columns // BANKS, dtype=torch.int32, device=device)
    flat = heights.view(tiles, columns)
    column = torch.empty(tiles, warps, lanes, dtype=torch.int64, device=device)
    order = counts.argsort(dim=2, descending=True, stable=True)
    for sweep in range(_SWEEPS):
        for warp in range(warps):
            if sweep:
                flat.scatter_add_(1, column[:, warp], -counts[:, warp])
            low, which = heights.min(2)
            bank = low.argsort(dim=1, stable=True)
            column[:, warp].scatter_(1, order[:, warp], bank * (columns // BANKS) + which.gather(1, bank))
            flat.scatter_add_(1, column[:, warp], counts[:, warp])
    lines = flat.amax(1)
    flat.zero_()
    line = torch.empty_like(counts)
    for warp in range(warps):
        line[:, warp] = flat.gather(1, column[:, warp])
        flat.scatter_add_(1, column[:, warp], counts[:, warp])
    return column.view(tiles, -1).int(), line.view(tiles, -1), lines

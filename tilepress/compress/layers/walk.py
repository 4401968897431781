"""One walk through a model's decoder layers over calibration text, with one layer in memory at a time.

A `Visitor` says what is done with a layer. The `Walk` owns the rest: windows of text, hidden states between layers (`streams`), progress,
and files in the work folder. Each visited layer becomes a pair of files, its facts and its tensors. A stopped run finds them and takes the
hidden states through finished layers again (`skip`), or, where that costs as much as a visit (`keeps_streams`), reads the states that the
walk writes every minute. At the end all facts become one file, which names what they were made from: its `identity`. `Found` reads it.

Several ranks (ranks.py) walk together: the windows are dealt to them one after the other, a visit says what it adds up over them, and each
writes the tensors that it has. The files of a layer serve any number of ranks that goes on.
"""

import errno
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tilepress.compress.layers.groups import Group, find_groups
from tilepress.compress.layers.layerwise import LayerByLayer
from tilepress.compress.layers.windows import run_together, together
from tilepress.compress.run.plan import Plan, Progress, source_mtime
from tilepress.compress.run.targets import Target
from tilepress.formats import TilepressError, UsageError, dtype_name
from tilepress.formats.artifact import disk_errors, temporary_name, to_json, write_atomic
from tilepress.formats.checkpoint import MANIFEST_NAME, Checkpoint
from tilepress.formats.files import read_json
from tilepress.ranks import ALONE, Ranks
from tilepress.text import check_vocabulary, load_tokenizer
from tilepress.version import __version__

CALIBRATION = "calibration"  # the walk whose facts the manifest keeps under this name
HIDDEN = "hidden"  # the stream that every walk has
PROBE_TOKENS = 32  # length of the short runs that find groups and try folds
FEW_TOKENS = 128  # an input that saw fewer tokens says little
KEEP_EVERY_S = 60.0  # at most so often are streams written, at the end of a layer


@dataclass(frozen=True)
class Layer:
    """A decoder layer that a walk has come to, with the hidden states that reach it."""

    model: LayerByLayer
    path: str  # of its module
    number: int
    streams: dict[str, list[Tensor]]  # the walk's: [1, tokens, hidden] for each window
    progress: Progress
    scratch: Path  # a file for the state of a long visit; the walk removes it when the layer is done
    ranks: Ranks = ALONE  # that walk together: the streams hold this one's windows
    lengths: Sequence[int] = ()  # tokens of all windows of the text, the other ranks' too

    @property
    def hidden(self) -> list[Tensor]:
        """The inputs, which a visit replaces by the layer's outputs."""
        return self.streams[HIDDEN]

    @property
    def names(self) -> dict[str, str]:
        """Stored names of the layer's targets by their module paths."""
        return {self.model.module_of[target.name]: target.name for target in self.model.targets_of[self.path]}

    @property
    def elements(self) -> int:
        """Elements of the layer's targets."""
        return sum(target.elements for target in self.model.targets_of[self.path])

    def number_of(self, window: int) -> int:
        """Return which window of the whole text one of the streams' is."""
        return window * self.ranks.size + self.ranks.rank

    @property
    def probe(self) -> Tensor:
        """The first tokens of the shortest window, [1, up to PROBE_TOKENS, hidden]."""
        return min(self.hidden, key=lambda h: h.shape[1])[:1, :PROBE_TOKENS]

    def groups(self, module: nn.Module, fold: bool = False) -> list[Group]:
        """Return the groups of the loaded layer's targets, as the first rank sees them.

        Raises TilepressError for a target that the model does not run."""
        return self.ranks.first(lambda: self._groups(module, fold))

    def _groups(self, module: nn.Module, fold: bool) -> list[Group]:
        paths, probe = set(self.names), self.probe
        run = lambda: self.model.run(self.path, probe)  # noqa: E731
        groups = find_groups(module, self.path, paths, self.model.head_dim, run, fold)
        unused = sorted(paths - {path for group in groups for path in group.linears})
        if unused:
            raise TilepressError(f"the model does not run {unused[0]}", f"leave it alone: --ignore {unused[0]}")
        return groups

    def outputs(self, stream: str = HIDDEN, at_once: int = 0) -> Iterator[Tensor]:
        """Yield the loaded layer's output for each window of a stream, in the stream's dtype and where the stream is.

        Windows run together, as many as `at_once` tokens hold, where the layer takes them so."""
        hidden = self.streams[stream]
        room = at_once if at_once and self._runs_together else 0
        for part in together([h.shape[1] for h in hidden], room):
            h = torch.cat([hidden[i] for i in part]) if len(part) > 1 else hidden[part[0]]
            out = self.model.run(self.path, h).to(h.device, h.dtype)
            yield from out.split(1) if len(part) > 1 else (out,)

    @cached_property
    def _runs_together(self) -> bool:
        return run_together(self.model, self.path, self.probe)

    def advance(self, stream: str = HIDDEN, at_once: int = 0) -> None:
        """Replace each window of a stream by the loaded layer's output for it."""
        for i, h in enumerate(self.outputs(stream, at_once)):
            self.streams[stream][i] = h


class Visitor:
    """The work on each layer of a walk. Between layers a visitor keeps nothing but streams, which the walk knows of."""

    dtype: torch.dtype  # of hidden states between layers
    doing = "calibrating"  # what progress says before the layer's name
    reports = False  # whether `visit` reports the layer's units itself
    all_experts = False  # whether experts of a mixture see every token, not only those that the router gives them
    keeps_streams = False  # whether the walk writes streams: for visitors that cannot skip a layer cheaply
    targets: list[Target] | None = None  # whose layers are walked through; None: the plan's

    def choose(self, windows: list[list[int]], dataset: str, ranks: int = 1) -> list[list[int]]:
        """Return the windows of the text that so many ranks look at. Raises UsageError where they are too few."""
        return windows

    def compute_dtype(self, device: str) -> torch.dtype:
        """The dtype that the model computes in."""
        return compute_dtype(self.dtype, device)

    def model(self, plan: Plan, device: str) -> LayerByLayer:
        """Return the model to walk through, by default the plan's source."""
        targets, compute, stored = self.targets or plan.targets, self.compute_dtype(device), plan.recipe.dtype
        model = LayerByLayer(Checkpoint(plan.source), targets, device, compute, stored, plan.trust_remote_code)
        if self.all_experts:
            model.show_experts_all()
        return model

    def start(self, model: LayerByLayer, windows: list[list[int]], streams: dict[str, list[Tensor]]) -> None:
        """Look at the model before its first layer, and add streams of one's own to the embedded windows."""

    def visit(self, layer: Layer) -> tuple[dict[str, list], dict[str, Tensor]]:
        """Return the layer's facts, each a list that the walk appends to that of the layers before, and its tensors.

        Leaves the layer's outputs in all streams. Facts are the first rank's, tensors of all of them: each has other names."""
        raise NotImplementedError

    def skip(self, layer: Layer, tensors: dict[str, Tensor]) -> None:
        """Take all streams through a layer whose visit, before the run was stopped, gave these tensors; by default as it is stored."""
        with layer.model.loaded(layer.path):
            for stream in layer.streams:
                layer.advance(stream)

    def finish(self, facts: dict, streams: dict[str, list[Tensor]]) -> dict:
        """Return the facts of the whole walk, given those of all its layers. Streams are complete where the walk keeps them.

        Every rank is asked, and the first one's answer counts."""
        return facts

    def units(self, layer: Layer) -> int:
        """Return what the layer counts in progress."""
        return layer.elements


class Found:
    """The files that a finished walk left in a folder; tensors are read when they are asked for. Picklable."""

    def __init__(self, folder: Path, name: str = CALIBRATION):
        self.folder, self.name = folder, name

    def __reduce__(self):
        return type(self), (self.folder, self.name)

    @cached_property
    def facts(self) -> dict:
        """Facts for the manifest; the identity holds times of files, so no artifact does."""
        return {key: value for key, value in self._all.items() if key not in ("identity", "files")}

    @cached_property
    def _all(self) -> dict:
        return read_json(self.folder / f"{self.name}.json")

    @cached_property
    def _files(self) -> dict[str, "safe_open"]:
        files = [safe_open(self.folder / name, framework="pt") for name in self._all["files"]]
        return {key: file for file in files for key in file.keys()}  # noqa: SIM118

    def get(self, key: str) -> Tensor | None:
        """Return a tensor on the CPU, or None where there is none of that name."""
        return self._files[key].get_tensor(key) if key in self._files else None


@dataclass
class Walk:
    """Takes a visitor through all layers of a model; `run` is all that there is to do with it."""

    plan: Plan
    name: str  # of its files in the work folder
    visitor: Visitor
    dataset: str  # for messages
    windows: list[list[int]]  # token ids
    device: str
    progress: Progress
    identity: str
    facts: dict  # that come before those of the layers
    ranks: Ranks = ALONE

    @classmethod
    def over_text(
        cls, plan: Plan, name: str, visitor: Visitor, device: str, progress: Progress, ranks: Ranks = ALONE
    ) -> "Walk":
        """Make a walk over the windows of the plan's text, which ranks share.

        Raises UsageError for a text without tokens or with fewer windows than ranks, and for ranks that would not do the same."""
        text, tokenizer = plan.text, load_tokenizer(plan.source, plan.trust_remote_code)
        every = text.windows(tokenizer)
        windows = visitor.choose(every, text.dataset, ranks.size)
        compute = visitor.compute_dtype(device)
        tokens, wanted = sum(map(len, windows)), text.nsamples * text.seqlen
        few = [f"{text.dataset} gave {tokens:,} tokens of the {wanted:,} asked for"] if tokens < wanted else []
        facts = {"windows": len(windows), "tokens": tokens, "warnings": few, "computed_in": dtype_name(compute)}
        facts["device"] = torch.device(device).type
        identity = identity_of(plan, visitor.choose(every, text.dataset), device, compute)  # for any number of ranks
        if ranks.size > 1:
            facts["ranks"] = ranks.size
            check_alike(plan, windows, f"{facts['device']}, {facts['computed_in']}", ranks)
        if len(windows) < ranks.size:
            raise UsageError(
                f"{text.dataset} gave {len(windows)} windows for {ranks.size} ranks: each needs one",
                "start fewer ranks, or give more text (--nsamples, a shorter --seqlen)",
            )
        return cls(plan, name, visitor, text.dataset, windows, device, progress, identity, facts, ranks)

    def run(self) -> Found:
        """Walk through the layers, but for those that are in the work folder already, and return what was found.

        Raises UsageError where the work folder holds what was made from something else, and for an architecture that cannot be run
        layer by layer."""
        ranks, plan = self.ranks, self.plan
        if ranks.first(lambda: finished(plan, self.name, self.identity, self.dataset) is not None):
            return Found(plan.work, self.name)
        visitor, work, windows = self.visitor, plan.work, ranks.mine(self.windows)
        model = visitor.model(plan, self.device)
        check_vocabulary(self.windows, model.model)
        streams = {HIDDEN: [model.embed(torch.tensor(window)).to(visitor.dtype) for window in windows]}
        lengths = [len(window) for window in self.windows]
        # Masks of these lengths are needed by the probes, and by other ranks' windows that all look at.
        for length in {min(PROBE_TOKENS, *map(len, windows)), *(lengths if ranks.size > 1 else ())}:
            model.embed(torch.zeros(length, dtype=torch.long))
        visitor.start(model, windows, streams)
        stem = f"{self.name}-{self.identity[:16]}"
        files = [work / f"{stem}-{number:04d}" for number in range(len(model.layers))]
        kept = _KeptStreams(work, stem, ranks, len(self.windows))
        first = kept.restore(streams) if visitor.keeps_streams else 0
        done = ranks.first(lambda: {i for i, file in enumerate(files) if file.with_suffix(".json").exists()})
        # A layer after the streams that were kept is visited again: its visit makes streams.
        fresh = range(first, len(files)) if visitor.keeps_streams else sorted(set(range(len(files))) - done)
        written = time.monotonic()
        for number, (path, file) in enumerate(zip(model.layers, files, strict=True)):
            scratch = work / f"unfinished-{file.name}.safetensors"
            layer = Layer(model, path, number, streams, self.progress, scratch, ranks, lengths)
            self.progress(f"{visitor.doing} {path}", 0)
            if number in fresh:
                facts, tensors = visitor.visit(layer)
                self._write(file, facts, tensors)
                scratch.unlink(missing_ok=True)
                del tensors
                if visitor.keeps_streams and ranks.tell(time.monotonic() - written >= KEEP_EVERY_S)[0]:
                    kept.keep(streams, number + 1)
                    written = time.monotonic()
            elif first <= number < max(fresh, default=0):
                found = [load_file(work / name) for name in _tensor_files(file, read_json(file.with_suffix(".json")))]
                visitor.skip(layer, {name: tensor for tensors in found for name, tensor in tensors.items()})
            told = visitor.reports and number in fresh
            self.progress(f"{visitor.doing} {path}", 0 if told else visitor.units(layer))
        facts, names = self.facts, []
        for file in files:
            told = read_json(file.with_suffix(".json"))
            names += _tensor_files(file, told)
            for key, values in told.items():
                if key != _FILES:
                    facts.setdefault(key, []).extend(values)
        facts = visitor.finish(facts, streams)
        if not ranks.rank:
            keep(work, self.name, self.identity, facts, names)
        ranks.wait()
        kept.remove()
        return Found(work, self.name)

    def _write(self, file: Path, facts: dict[str, list], tensors: dict[str, Tensor]) -> None:
        """Write the pair of files of a layer; of several ranks each writes its tensors, and the first names all of these files."""
        ranks, facts_file = self.ranks, file.with_suffix(".json")
        own = (
            file.with_suffix(".safetensors")
            if not ranks.rank
            else file.parent / f"{file.name}-{ranks.rank}.safetensors"
        )
        if tensors or not ranks.rank:
            write_tensors(own, tensors)
        if ranks.size > 1:
            facts = facts | {
                _FILES: [name for name in ranks.tell(own.name if tensors or not ranks.rank else "") if name]
            }
        if not ranks.rank:
            write_atomic(facts_file, to_json(facts), self.plan.work)
        ranks.wait()


_FILES = "files"  # the key of a layer's facts that names its files of tensors, where several ranks wrote them


def _tensor_files(file: Path, facts: dict) -> list[str]:
    return facts.get(_FILES, [f"{file.name}.safetensors"])


def check_alike(plan: Plan, windows: list[list[int]], computing: str, ranks: Ranks) -> None:
    """Raise UsageError where ranks see other files, text, settings or versions, or compute in another way."""
    digest = hashlib.sha256(json.dumps(windows).encode()).hexdigest()
    packages = ("torch", "transformers", "tokenizers", "safetensors")
    seen = {
        "versions of packages": [__version__, *(version(name) for name in packages)],
        "settings or a model": plan.fingerprint,
        "files of the model": [[shard.source, source_mtime(plan, shard)] for shard in plan.shards],
        "text": digest,
        "a device or dtype": computing,
    }
    ranks.agree(seen, "all ranks need the same command and packages, and one disk with the model and the text")


@dataclass
class _KeptStreams:
    """The streams that a walk writes now and then: of each rank a file, which any number of ranks reads again."""

    work: Path
    stem: str
    ranks: Ranks
    windows: int  # of all ranks together

    def keep(self, streams: dict[str, list[Tensor]], layers: int) -> None:
        """Write the streams as they are after so many layers, then remove what was written before."""
        rank, size = self.ranks.rank, self.ranks.size
        tensors = {f"{name}.{i * size + rank}": h for name, of in streams.items() for i, h in enumerate(of)}
        file = self.work / f"{self.stem}-streams-{layers:04d}-{rank}.safetensors"
        write_tensors(file, tensors, {"layers": str(layers)})
        self.ranks.wait()
        self._remove_but(layers)

    def restore(self, streams: dict[str, list[Tensor]]) -> int:
        """Put the newest streams that are there whole in place of the embedded windows; return how many layers they have passed."""
        layers, files = self.ranks.first(self._newest)
        for i in range(len(streams[HIDDEN])) if layers else ():
            window = i * self.ranks.size + self.ranks.rank
            for file in files:
                with safe_open(self.work / file, framework="pt") as kept:
                    for key in kept.keys():  # noqa: SIM118
                        name, _, number = key.rpartition(".")
                        if int(number) == window:
                            of = streams.setdefault(name, [])
                            of[i:] = [kept.get_tensor(key), *of[i + 1 :]]
        return layers

    def remove(self) -> None:
        """Remove all files."""
        self._remove_but(None)

    def _newest(self) -> tuple[int, list[str]]:
        found: dict[int, list[str]] = {}
        for file in sorted(self.work.glob(f"{self.stem}-streams-*.safetensors")):
            found.setdefault(int(metadata_of(file).get("layers", 0)), []).append(file.name)
        for layers in sorted(found, reverse=True):
            numbers = set()
            for name in found[layers]:
                with safe_open(self.work / name, framework="pt") as kept:
                    numbers |= {int(key.rpartition(".")[2]) for key in kept.keys()}  # noqa: SIM118
            if layers and len(numbers) == self.windows:
                return layers, found[layers]
        return 0, []

    def _remove_but(self, layers: int | None) -> None:
        for file in self.work.glob(f"{self.stem}-streams-*.safetensors") if not self.ranks.rank else ():
            if layers is None or f"-streams-{layers:04d}-" not in file.name:
                file.unlink(missing_ok=True)


def keep(work: Path, name: str, identity: str, facts: dict, files: list[str]) -> None:
    """Write what a finished walk found: its facts, and the names of the files with its tensors."""
    write_atomic(work / f"{name}.json", to_json(facts | {"identity": identity, "files": files}), work)


def finished(plan: Plan, name: str, identity: str, dataset: str) -> Found | None:
    """Return what a finished walk found, or None. Raises UsageError if it was made from something else."""
    found = Found(plan.work, name) if (plan.work / f"{name}.json").exists() else None
    if found is not None and found._all["identity"] != identity:
        raise UsageError(
            f"the weights, the text of {dataset} or the kind of device have changed since the run in {plan.output} began",
            "start again with --overwrite",
        )
    return found


def identity_of(
    plan: Plan, windows: list[list[int]], device: str, compute: torch.dtype, base: Checkpoint | None = None
) -> str:
    """Hash what a walk depends on: weights (also those of a second model), settings, tokens, and what computes."""
    sources = [[shard.source, source_mtime(plan, shard)] for shard in plan.shards]
    sources += [[name, (base.path / name).stat().st_mtime_ns] for name in base.shards] if base else []
    digest = hashlib.sha256()
    for window in windows:
        digest.update(torch.tensor([len(window), *window]).numpy().tobytes())
    made_from = [plan.fingerprint, digest.hexdigest(), sources, torch.device(device).type, dtype_name(compute)]
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file that is there whole or not at all, by one process at a time. Tensors may share memory."""
    for stale in path.parent.glob(f"{path.name}.*.tmp"):  # of a killed run
        stale.unlink(missing_ok=True)
    temporary, seen, apart = temporary_name(path.parent, path), set(), {}
    for name, tensor in tensors.items():
        here = tensor.detach().cpu().contiguous()
        apart[name] = here.clone() if here.data_ptr() in seen else here
        seen.add(here.data_ptr())
    with disk_errors(path):
        try:
            save_file(apart, temporary, metadata)
        except SafetensorError as error:  # of what it could not write it tells in words only
            number = re.search(r"os error (\d+)", str(error))
            raise OSError(int(number[1]) if number else errno.EIO, str(error)) from error
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)


def metadata_of(path: Path) -> dict[str, str]:
    """Return what `write_tensors` was given with the tensors; nothing for a file that is not there or not whole."""
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError):
        return {}


def check_inside(model: LayerByLayer) -> None:
    """Raise UsageError for targets that are in no decoder layer."""
    if model.outside:
        names = [name.removesuffix(".weight") for name in model.outside]
        raise UsageError(
            f"{', '.join(names[:3])} stand in no decoder layer and cannot be calibrated",
            "leave them alone: " + " ".join(f"--ignore {name}" for name in names[:3]),
        )


def wait_for_walk(work: Path, progress: Progress, patience_s: float = 1800.0, every_s: float = 1.0) -> bool:
    """Wait, as another rank, until rank 0 has calibrated; return False if the whole artifact is complete by then.

    Raises TilepressError when nothing has happened for so long."""
    changed, seen = time.monotonic(), None
    while not (work / f"{CALIBRATION}.json").exists():
        if (work.parent / MANIFEST_NAME).exists():
            return False
        progress("waiting for the calibration of rank 0", 0)
        files = sorted(path.name for path in work.glob("*"))
        if files != seen:
            changed, seen = time.monotonic(), files
        if time.monotonic() - changed > patience_s:
            raise TilepressError(
                f"rank 0 has written nothing to {work} for {patience_s / 60:.0f} minutes",
                "look at rank 0, then start again",
            )
        time.sleep(every_s)
    return True


def compute_dtype(dtype: torch.dtype, device: str) -> torch.dtype:
    """Return the model's own dtype on a card and on CPUs with bfloat16 matrix units; else float32, which is many times faster there."""
    native = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)() and dtype == torch.bfloat16
    return dtype if device != "cpu" or native else torch.float32

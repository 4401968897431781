"""A run whose model or output is in an object store: shard by shard through a scratch folder on this machine.

The model is planned from a mirror of its headers (`formats/storage.py`); a shard is fetched when it is its turn, and removed after. The
output has a stand-in, too: what the store holds of it, with shards as empty files of their size. So a run looks at it, refuses and
resumes as it does with folders. Each shard goes to the store before its done-record does; `config.json` and the manifest go last.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

from tilepress.compress.run.plan import Plan, Recipe, Remote, Shard, is_weight_file
from tilepress.formats import UsageError, is_address
from tilepress.formats.artifact import WORK_FOLDER, to_json, write_atomic
from tilepress.formats.checkpoint import MANIFEST_NAME, Checkpoint, read_manifest
from tilepress.formats.kv_calibration import FOLDER as KV_FOLDER
from tilepress.formats.storage import Mirror, Store, is_shard
from tilepress.text import Text

_LAST = ("config.json", MANIFEST_NAME)  # without which no loader takes the folder
_READ = (*_LAST, "plan.json")  # of what stands in an output, with done-records


class Scratch:
    """A folder for the shards at hand, in TMPDIR, which goes with the process."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory(prefix="tilepress-", ignore_cleanup_errors=True)
        self.path = Path(self._folder.name)


def _wanted(name: str) -> bool:
    """Tell whether a file of a model in a store belongs to it: as `other_files` has it, and shards."""
    parts = Path(name).parts
    hidden = any(part.startswith(".") for part in parts)
    return not hidden and (is_shard(name) or parts[0] == KV_FOLDER or not is_weight_file(name))


def remote_of(model: str | os.PathLike, output: str | os.PathLike, revision: str | None) -> Remote | None:
    """Return the addresses among a run's model and output; None where both are folders or hub ids."""
    source, target = (str(place).rstrip("/") if is_address(place) else None for place in (model, output))
    if source and revision is not None:
        if not source.startswith("hf://"):
            raise UsageError(f"--revision is of the hub's models, not of {source}", "leave it out")
        source = f"{source}@{revision}"
    return Remote(source, target) if source or target else None


def bring_model(address: str, scratch: Path) -> Checkpoint:
    """Return a model in a store as a checkpoint whose shards are not there yet. Raises UsageError where there is none."""
    store, folder = Store(address), scratch / "model"
    Mirror.make(store, folder, _wanted)
    return Checkpoint(folder, name=store.name)


def check_remote(remote: Remote, recipe: Recipe, text: Text | None) -> None:
    """Raise UsageError for what cannot be done shard by shard, and for an output that is or holds the model."""
    if text is not None or recipe.passes(text) > 1 or recipe.links or recipe.alone:
        raise UsageError(
            f"`{recipe.command}` with these settings looks at the whole model first, and {remote.source or remote.output} is read shard by shard",
            "download the model first and give folders: `hf download`, `aws s3 cp --recursive`",
        )
    source, output = ((address or "").rstrip("/") + "/" for address in (remote.source, remote.output))
    if remote.source and remote.output and source.startswith(output):
        raise UsageError(f"the output {remote.output} is or holds the input {remote.source}", "choose another with -o")


@contextmanager
def fetched(plan: Plan, shard: Shard) -> Iterator[None]:
    """Have what a shard is made from in the model's folder during the body."""
    if plan.remote is None or plan.remote.source is None:
        yield
        return
    mirror = _model(plan.remote.source, plan.source)
    names = {shard.source, *(entry.file for job in shard.jobs for entry in job.weight.entries)}
    with ExitStack() as stack:
        for name in sorted(names):
            stack.enter_context(mirror.fetched(name))
        yield


@cache
def _model(address: str, folder: Path) -> Mirror:
    """Return the mirror in a folder, as this process sees it."""
    store = Store(address)
    return Mirror(store, folder, store.files())


def source_hash(plan: Plan, shard: Shard) -> str:
    """Return the hash of a model's shard in a store: as the store tells it, else of all of its bytes."""
    mirror = _model(plan.remote.source, plan.source)
    return mirror.files[shard.source].sha256 or mirror.store.sha256(shard.source)


def send_shard(plan: Plan, shard: Shard) -> None:
    """Send a finished shard, then its done-record with what the store calls it; an empty file of its size stays here."""
    if plan.remote is None or plan.remote.output is None:
        return
    store, path, record = Store(plan.remote.output), plan.output / shard.output, plan.work / _record(shard.output)
    key = store.send(path, shard.output).key
    write_atomic(record, to_json(json.loads(record.read_text()) | {"key": key}), plan.work)
    store.send(record, f"{WORK_FOLDER}/{record.name}")
    _stand_in(path, path.stat().st_size)


def _record(shard: str) -> str:
    return f"{shard}.done.json"


def _stand_in(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.truncate(size)


class Output:
    """A run's output in a store, and the folder that stands for it here."""

    def __init__(self, plan: Plan):
        self.plan, self.store = plan, Store(plan.remote.output)
        self._names: set[str] = set()

    def look(self) -> None:
        """Let the folder show what the store has. Of a shard that is another than its done-record says, the record is left out."""
        plan, files = self.plan, self.store.files()
        self._names = set(files)
        shutil.rmtree(plan.output, ignore_errors=True)
        for name, stored in files.items():
            path = plan.output / name
            if path.name.endswith(".done.json") or path.name in _READ:
                self.store.fetch(name, path, stored)
            else:
                _stand_in(path, stored.size)
        for path in plan.work.glob("*.done.json"):
            stored = files.get(path.name.removesuffix(".done.json"))
            if stored is None or _key(path) != stored.key:
                path.unlink()

    def begin(self) -> None:
        """Remove from the store what was removed here, the config first, and say there what is being made."""
        for name in sorted(self._names, key=lambda name: (name not in _LAST, name)):
            if not (self.plan.output / name).exists() and not name.endswith(".done.json"):
                self.store.remove(name)
        self.store.send(self.plan.work / "plan.json", f"{WORK_FOLDER}/plan.json")

    def end(self) -> None:
        """Send what makes the folder an artifact, and remove the records of the run."""
        manifest = read_manifest(self.plan.output)
        shards = {shard.output for shard in self.plan.shards}
        names = [file["name"] for file in manifest["files"] if file["name"] not in shards]
        for name in sorted({*names, MANIFEST_NAME}, key=lambda name: (name in _LAST, name)):
            self.store.send(self.plan.output / name, name)
        for name in self.store.files():
            if name.startswith(f"{WORK_FOLDER}/"):
                self.store.remove(name)


def _key(record: Path) -> str | None:
    try:
        return json.loads(record.read_text()).get("key")
    except (ValueError, AttributeError):
        return None


@cache
def _scratch_of(fingerprint: str) -> Scratch:
    """Return the scratch of a run on a machine that did not plan it, for as long as this process lives."""
    return Scratch()


def at_home(plan: Plan) -> Plan:
    """Return a plan that came from another machine with folders of this one in place of that one's scratch."""
    if plan.remote is None:
        return plan
    scratch = _scratch_of(plan.fingerprint).path
    if plan.remote.source:
        if not (scratch / "model").exists():
            bring_model(plan.remote.source, scratch)
        plan = replace(plan, source=scratch / "model")
    if plan.remote.output:
        plan = replace(plan, output=scratch / "output")
        os.makedirs(plan.work, exist_ok=True)
    return plan

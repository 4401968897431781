"""`tilepress.push`: an artifact goes to the hub, by huggingface_hub, after its files are compared with its manifest."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tilepress.eval.verify import verify
from tilepress.formats import TilepressError, UsageError, first_line
from tilepress.formats.checkpoint import MANIFEST_NAME, read_manifest

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Pushed:
    """What went to the hub, or would go: `url` is None for a dry run."""

    repo: str
    files: dict[str, int]  # bytes by name
    url: str | None

    @property
    def bytes(self) -> int:
        return sum(self.files.values())

    def to_json(self) -> dict:
        """Return what `push --json` prints, as a dictionary of plain values."""
        return asdict(self) | {"bytes": self.bytes}


def push(
    artifact: str | Path,
    repo: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
    dry_run: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> Pushed:
    """Send an artifact's own files to a repository of the hub, which is made if it is not there: `tilepress.push("int8", "me/model-int8")`.

    revision  branch; unless given main
    dry_run   only tell what would go

    The token is huggingface_hub's (`hf auth login`, HF_TOKEN). Files that the manifest does not list stay here. Raises UsageError for a folder that
    is no artifact and a name that is none, TilepressError for one that does not verify, and for what the hub refuses."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    folder = Path(artifact)
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UsageError(f"{repo!r} is no name of a repository ({first_line(error)})", "write NAME/MODEL") from error
    if not (folder / MANIFEST_NAME).exists():
        raise UsageError(f"{folder} is no finished artifact", "give a folder that a tilepress command finished")
    names = [*(file["name"] for file in read_manifest(folder)["files"]), MANIFEST_NAME]
    checked = verify(folder, reload=False, progress=progress)
    if not checked.passed:
        hint = f"`tilepress verify {folder}` lists what is wrong"
        raise TilepressError(f"{folder} does not verify, so it does not go to the hub", hint)
    files = {name: (folder / name).stat().st_size for name in sorted(names)}
    if dry_run:
        return Pushed(repo, files, None)
    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        done = api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            allow_patterns=sorted(names),
            revision=revision,
            commit_message=message or f"{folder.resolve().name}, compressed with tilepress",
        )
    except Exception as error:
        told = first_line(error)
        raise TilepressError(
            f"the hub did not take {repo} ({told})", "check the name, `hf auth login`, and the network"
        ) from error
    return Pushed(repo, files, str(done.commit_url))

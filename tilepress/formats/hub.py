"""The Hugging Face hub: a model's folder by its id, and look-ups that fail at once where the hub cannot be reached."""

import functools
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from tilepress.formats import UsageError, is_address

_PATIENCE_S = 3.0  # for a connection; the hub's own client tries for 40 s


def locate(model: str, revision: str | None = None, **options) -> Path:
    """A local folder as it is, or a hub id as its downloaded snapshot (`options` are those of huggingface_hub). Raises UsageError if there is neither."""
    if is_address(model):
        raise UsageError(
            f"{model} is an address, and this reads folders and hub ids",
            "one recipe without calibration, or `convert`, reads it shard by shard; for all else download it first",
        )
    path = Path(model).expanduser()
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        return path
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.md", "*.py", "LICENSE*", "kv_cache/*"]
    try:
        with hub_lookups() as reached:
            return Path(snapshot_download(model, revision=revision, allow_patterns=patterns, **options))
    except Exception as error:
        why = type(error).__name__ if reached else "it cannot be reached, and no copy is cached"
        raise UsageError(
            f"{model!r} is neither a folder nor a model that the hub answers for ({why})",
            "check the path; for a hub id check the name, the network and HF_TOKEN",
        ) from error


@contextmanager
def hub_lookups() -> Iterator[bool]:
    """Give whether the hub can be reached. Where not, look-ups in the body find what is cached and try nothing else."""
    from huggingface_hub import constants

    modules, reached = [constants], not constants.is_offline_mode() and _answers(constants.ENDPOINT)
    if not reached:
        try:
            from datasets import config

            modules.append(config)
        except ImportError:  # text from files needs no such package
            pass
    before = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module in modules:
            module.HF_HUB_OFFLINE = module.HF_HUB_OFFLINE or not reached
        yield reached
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value


@functools.cache
def _answers(endpoint: str) -> bool:
    """Return whether the endpoint, or the proxy that leads to it, takes a connection."""
    url = urlsplit(endpoint)
    proxy = getproxies().get(url.scheme) if url.hostname and not proxy_bypass(url.hostname) else None
    url = urlsplit(proxy if proxy is None or "//" in proxy else f"//{proxy}") if proxy else url
    found = []

    def connect() -> None:
        try:
            socket.create_connection((url.hostname, url.port or 443), _PATIENCE_S).close()
            found.append(True)
        except (OSError, ValueError):
            pass

    trial = threading.Thread(target=connect, daemon=True)  # names are looked up without a limit of time
    trial.start()
    trial.join(_PATIENCE_S)
    return bool(found)

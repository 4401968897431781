"""Processes that share models by tensor parallelism, over gloo on a CPU or NCCL on cards, and what is asked of them."""

import contextlib
import io
import multiprocessing
import os
import socket
import subprocess
import sys
import traceback
from dataclasses import dataclass
from unittest import mock

import torch

from tilepress.kernels.arch import Path

TIMEOUT_S = 300


@dataclass(frozen=True)
class Answer:
    """What a model gave: tokens of `tilepress.decode`, logits behind the first prompt by the lean pass and by its own, bytes that it holds."""

    tokens: list[list[int]]
    logits: torch.Tensor
    own_logits: torch.Tensor | None
    bytes: int
    layer_bytes: int
    kv_bytes_per_token: int
    paths: dict[Path | str, int]


def ask(
    path: str, group, prompts: list[list[int]], count: int, dtype=torch.float32, own=True, device="cpu", **options
) -> Answer:
    """Answers of the model there: this rank's part, or for no group the whole on a device; `options` go to `generate`."""
    from support.decoding import decoded

    import tilepress
    from tilepress.bench.speed import stored_bytes
    from tilepress.bench.steps import pass_of

    model = tilepress.load(path, device, dtype, group=group)
    held = stored_bytes(model)
    layers = stored_bytes(getattr(model.model, "decoder", model.model).layers)
    prompt = torch.tensor(prompts[0], device=model.device)
    with torch.inference_mode():
        own_logits = model(prompt[None], use_cache=False).logits[0].cpu() if own else None
        tokens = decoded(model, prompts, count, **options)
        timed = pass_of(model, 1, 64, "auto", 64)
        logits = timed.prefill(0, prompt, len(prompt) + 1).cpu()
    cache = getattr(timed.cache, "bytes_per_token", 0)
    return Answer(tokens, logits, own_logits, held, layers, cache, timed.paths())


def command(words: list, group) -> tuple[int, str, str]:
    """A command of this rank, as if torchrun had started it: exit code, stdout, stderr."""
    from tilepress.cli.app import _explain, app
    from tilepress.runtime.parallel.group import TensorParallel

    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(TensorParallel, "start", return_value=group),
        mock.patch.object(TensorParallel, "close"),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            code = app([str(word) for word in [*words, "--device", "cpu"]], standalone_mode=False) or 0
        except Exception as error:
            code = _explain(error)
    return code, out.getvalue(), err.getvalue()


def _serve(rank: int, size: int, port: int, device: str, pipe) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "HF_HUB_OFFLINE": "1"}
    from tilepress.formats import TilepressError
    from tilepress.runtime.parallel.group import TensorParallel

    group = TensorParallel.start(device)
    while (work := pipe.recv()) is not None:
        function, args, options = work
        try:
            pipe.send(function(args[0], group, *args[1:], **options))
        except TilepressError as error:
            pipe.send((type(error).__name__, error.message))
        except Exception:
            pipe.send(traceback.format_exc())
    group.close()


def torchrun(*words, size: int = 2) -> subprocess.CompletedProcess:
    """Runs a command as that many ranks on a CPU; its output is theirs together."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", size, "-m", "tilepress"]
    command = [str(word) for word in [*start, *words, "--device", "cpu"]]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def of_torchrun(size: int) -> list[dict[str, str]]:
    """Return what torchrun sets for each of some processes, but for its agent's store."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        alike = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1])}
    return [alike | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def forking():
    """Return a context whose processes are forks of one that has imported what takes long, once for all of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers.models.llama.modeling_llama"])
    return context


class Ranks:
    """`size` processes; calling it has each of them call `function(first, group, *rest, **options)`, and gives what they return."""

    def __init__(self, size: int, device: str = "cpu"):
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        context = multiprocessing.get_context("spawn") if device == "cuda" else forking()
        ends = [context.Pipe() for _ in range(size)]
        self._pipes = [ours for ours, _ in ends]
        args = [(rank, size, port, device, theirs) for rank, (_, theirs) in enumerate(ends)]
        self._processes = [context.Process(target=_serve, args=each, daemon=True) for each in args]
        for process in self._processes:
            process.start()

    def __call__(self, function, *args, **options) -> list:
        for pipe in self._pipes:
            pipe.send((function, args, options))
        answers = []
        for pipe in self._pipes:
            assert pipe.poll(TIMEOUT_S), "a rank does not answer"
            answers.append(pipe.recv())
            assert not isinstance(answers[-1], str), answers[-1]
        return answers

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(30)
            process.kill()

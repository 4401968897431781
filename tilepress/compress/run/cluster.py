"""The shards of a run as tasks of a Ray cluster.

Ray decides where a task runs and starts it again when its machine dies; a task does what every worker does, so that the bytes are those
of one process. Each asks for the memory that the plan foresees. Before the first one every machine is looked at: it must have this
version of the package, see the output folder, and have room for a shard where shards come from and go to a store.
"""

import contextlib
import io
import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import torch

from tilepress.compress.run.plan import Plan, Progress, Shard, done_record
from tilepress.compress.run.remote import at_home
from tilepress.compress.run.shards import write_alone
from tilepress.compress.run.shared import HINT, leave_token
from tilepress.compress.run.stages import Stages, add
from tilepress.device import usable_cores
from tilepress.formats import TilepressError, UsageError, first_line, installing
from tilepress.version import __version__

LOCAL = "local"
_TORCH_BYTES = 512 << 20  # of memory that torch and transformers take in each process
_RETRIES = 3  # of a task whose process or machine died; an error of ours is not tried again
_PATIENCE_S = 3.0  # for a connection; Ray's own client tries for a minute
_LOOK_S = 60.0  # for a machine to start a process and look
_WAIT_S = 10.0


@contextlib.contextmanager
def connected(address: str, workers: int = 1) -> Iterator[None]:
    """Be connected to a Ray cluster in the body: `local` starts one on this machine, for so many tasks at a time or one for each core.

    Raises UsageError where Ray is not installed, TilepressError where the cluster cannot be reached."""
    try:
        import ray
    except ImportError as error:
        raise UsageError("--ray needs ray, which is not installed", installing("ray")) from error
    how = {"log_to_driver": False, "configure_logging": False, "logging_level": "ERROR"}
    if address == LOCAL:
        # Ray's workers give way to everything else on a machine, unless told otherwise: the ones of this run are the run.
        os.environ.setdefault("RAY_worker_niceness", "0")
        how |= {"num_cpus": workers if workers > 1 else usable_cores(), "include_dashboard": False}
    elif address != "auto":
        _check_reached(address)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            ray.init(address=address, **how)
    except Exception as error:
        raise TilepressError(
            f"the Ray cluster at {address} did not take this run ({first_line(error)})",
            "check the address (`ray status` on a machine of the cluster) and that all have the same version of Ray",
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_reached(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise UsageError(f"--ray {address} is no address of a cluster", "give HOST:PORT, auto, or local")
    try:
        socket.create_connection((host, int(port)), _PATIENCE_S).close()
    except (OSError, OverflowError) as error:
        raise TilepressError(
            f"no Ray cluster answers at {address} ({first_line(error)})",
            "start one with `ray start --head`, or --ray local for this machine alone",
        ) from error


@dataclass(frozen=True)
class _Machine:
    """A node of the cluster, with what a task asks of it."""

    node: str  # Ray's name for it
    host: str
    cores: int
    memory: int
    free_bytes: int  # of scratch


def run_on_cluster(
    plan: Plan, workers: int, device: str, progress: Progress = lambda what, count: None
) -> dict[str, float]:
    """Write all shards as tasks of the connected cluster, at most `workers` at a time where that is more than one.

    Returns the seconds of each stage, those of all tasks. Raises TilepressError for machines that cannot do their part, and what a task
    raises; what is done by then stays for --resume."""
    import ray

    stages = Stages(device)
    with stages.of("prepare"):
        state = plan.recipe.prepare(plan, 0, device, progress)
    if state is None:
        return stages.seconds
    on_card = device.startswith("cuda")
    memory = plan.peak_bytes + _TORCH_BYTES
    usable, cores = _usable(plan, memory, on_card)
    task = ray.remote(_shard).options(
        num_cpus=cores,
        num_gpus=int(on_card),
        memory=memory,
        max_retries=_RETRIES,
        label_selector={"ray.io/node-id": f"in({','.join(machine.node for machine in usable)})"},
    )
    shared = ray.put((plan, state, "cuda" if on_card else "cpu"))
    left, running = list(reversed(plan.shards)), {}
    if plan.remote is not None and plan.remote.output is not None:  # other machines do not look what is there
        for shard in (shard for shard in plan.shards if done_record(plan, shard)):
            left.remove(shard)
            progress(shard.output, shard.elements)
    at_once = workers if workers > 1 else len(left)
    try:
        while left or running:
            while left and len(running) < at_once:
                shard = left.pop()
                running[task.remote(shared, shard)] = shard
            done, _ = ray.wait(list(running), num_returns=1, timeout=_WAIT_S)
            for ref in done:
                add(stages.seconds, _result(ref))
                shard = running.pop(ref)
                progress(shard.output, shard.elements)
            if not done:
                _check_alive({machine.node for machine in usable})
    finally:
        for ref in running:
            ray.cancel(ref, force=True)
    return stages.seconds


def _shard(shared: tuple, shard: Shard) -> dict[str, float]:
    """Write a shard as a task: where it is done already by now, it is left as it is."""
    import ray

    plan, state, device = shared
    plan = at_home(plan)
    torch.set_num_threads(max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1))))
    return write_alone(plan, shard, state, device)


def _result(ref) -> object:
    """Return what a task made. Raises TilepressError with what it raised, or why Ray gave it up."""
    import ray

    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, TilepressError):
            raise error.cause from None
        told = first_line(error.cause) if error.cause else first_line(error)
        raise TilepressError(
            f"a task of the Ray cluster failed ({told})", "go on with --resume, or try --ray local"
        ) from error
    except ray.exceptions.RayError as error:
        raise TilepressError(
            f"Ray gave up on a task after {_RETRIES + 1} tries ({first_line(error)})",
            "look at `ray status` for memory and machines that died, then go on with --resume",
        ) from error


def _look(token: Path | None) -> tuple[str, str, bool, int]:
    """Return what a machine is called, its version of the package, whether it sees a token, and its free scratch in bytes."""
    free = shutil.disk_usage(tempfile.gettempdir()).free
    return socket.gethostname(), __version__, token is None or token.exists(), free


def _usable(plan: Plan, memory: int, on_card: bool) -> tuple[list[_Machine], int]:
    """Return the machines that tasks may run on, and the cores of each task: so many that a machine's scratch holds all of its tasks.

    Raises TilepressError where a machine does not see the output folder or has another version, and where no machine has room."""
    import ray

    in_store = plan.remote is not None and plan.remote.output is not None  # no folder is shared
    token = None if in_store else leave_token(plan, uuid.uuid4().hex)
    try:
        machines = _machines(token)
    finally:
        if token is not None:
            token.unlink(missing_ok=True)
    if not machines:
        raise TilepressError(
            "no machine of the Ray cluster answers",
            "start some with `ray start --address HOST:PORT`, and see `ray status`",
        )
    room = plan.shard_room_bytes if plan.remote is not None else 0
    usable = [machine for machine in machines if machine.memory >= memory]
    if not usable:
        most = max(machines, key=lambda machine: machine.memory)
        raise TilepressError(
            f"a task takes {memory / 1e9:.2f} GB, and no machine of the Ray cluster has more than the {most.memory / 1e9:.2f} GB of {most.host}",
            "add a larger one, or tell Ray what it has: `ray start --memory BYTES`",
        )
    usable = [machine for machine in usable if machine.free_bytes >= room]
    if not usable:
        most = max(machines, key=lambda machine: machine.free_bytes)
        raise TilepressError(
            f"a shard takes {room / 1e9:.2f} GB of scratch, and no machine has more than the {most.free_bytes / 1e9:.2f} GB of {most.host}",
            "point TMPDIR of Ray's processes to a larger disk",
        )
    if on_card and not ray.cluster_resources().get("GPU"):
        raise TilepressError("no machine of the Ray cluster has a card", "leave out --device cuda")
    at_once = [(machine.cores, machine.free_bytes // room if room else machine.cores) for machine in usable]
    return usable, max(ceil(cores / min(cores, shards)) for cores, shards in at_once)


def _machines(token: Path | None) -> list[_Machine]:
    """Look at every machine that has cores for tasks."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look, asked, found = ray.remote(_look), {}, []
    here = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():
        if not (node["Alive"] and node["Resources"].get("CPU")):
            continue
        if node["NodeID"] == here:  # no process has to start for it
            host, _, _, free = _look(token)
            found.append(_machine(node, host, free))
        else:
            where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            asked[look.options(num_cpus=0, scheduling_strategy=where, max_retries=0).remote(token)] = node
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_LOOK_S) if asked else ([], [])
    for ref in answered:
        node = asked[ref]
        try:
            host, version, sees, free = _result(ref)
        except TilepressError as error:
            if isinstance(error.__cause__, ray.exceptions.RayTaskError):  # it is there, and cannot import us
                raise TilepressError(
                    f"{node['NodeManagerHostname']} cannot run tasks of tilepress: {error.message}",
                    f"install tilepress {__version__} on every machine of the cluster",
                ) from error
            continue  # it died
        if version != __version__:
            raise TilepressError(
                f"{host} has tilepress {version}, this machine {__version__}", "install one version on all machines"
            )
        if not sees:
            raise TilepressError(f"{host} does not see what this machine writes to {token.parent.parent}", HINT)
        found.append(_machine(node, host, free))
    return found


def _machine(node: dict, host: str, free: int) -> _Machine:
    resources = node["Resources"]
    return _Machine(node["NodeID"], host, int(resources["CPU"]), int(resources.get("memory", 0)), free)


def _check_alive(nodes: set[str]) -> None:
    """Raise TilepressError when no machine is left that a waiting task could run on."""
    import ray

    if not any(node["Alive"] for node in ray.nodes() if node["NodeID"] in nodes):
        raise TilepressError(
            "every machine of the Ray cluster that ran this is gone", "start others, then go on with --resume"
        )

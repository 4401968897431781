"""Models of well-known shapes with random weights, made and compressed on the device, to time decoding where there is no checkpoint.

    config -> the model without memory -> weight after weight: drawn, pruned and packed (or quantized), put in its place

Nothing is read or written, and beside what is already made there is one weight: a model whose dense weights do not fit is made compressed. A weight
is drawn from a seed of its own, so that every artifact of a shape compresses the same numbers. Speed follows from shapes, sparsity and layout; a random
model says nothing of perplexity.

Ranks that share a model (runtime/parallel/) each draw and compress every weight whole, and keep their part of it: the model is that of one card, and
nothing is sent while it is made.
"""

import re
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from tilepress.bench.speed import FILLED, Protocol, Subject, compare
from tilepress.compress.prune.magnitude import layer_threshold, prune
from tilepress.compress.run.stages import Stages
from tilepress.formats import UsageError, int8
from tilepress.formats.kv_calibration import uncalibrated
from tilepress.formats.kv_int4 import KVFormat
from tilepress.formats.layout import layouts
from tilepress.models.families import ADDED
from tilepress.runtime.hf import paged_cache as kv_cache
from tilepress.runtime.hf.int8_layers import fuse
from tilepress.runtime.linear.cut import Whole
from tilepress.runtime.linear.int8 import Int8Linear
from tilepress.runtime.linear.packed import packed_linear
from tilepress.runtime.parallel.group import TensorParallel
from tilepress.runtime.parallel.partition import Partition

DTYPE = torch.bfloat16
DENSE = "dense"
RECIPES = "tiled-csl-80+kv4,tiled-bitmap-50+kv4,w8a8+kv4"
_DEVIATION = 0.02
_ROWS = 8192  # of a weight quantized together
_FORM = re.compile(
    r"(?P<layout>dense|w8a8|w8a16|(?P<sparse>tiled-csl|tiled-bitmap)-(?P<zeros>\d+))(\+kv(?P<bits>[48]))?"
)


def _llama(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocabulary: int, theta: float
) -> dict:
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
    }
    attention = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "rms_norm_eps": 1e-5}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    return {"model_type": "llama", "max_position_embeddings": 8192} | sizes | attention | rope


def _opt(hidden: int, layers: int, heads: int, vocabulary: int = 50272) -> dict:
    sizes = {"hidden_size": hidden, "word_embed_proj_dim": hidden, "ffn_dim": 4 * hidden, "vocab_size": vocabulary}
    return {
        "model_type": "opt",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 2048,
    } | sizes


SHAPES = {  # as their config.json has them; the tiny ones try the command on a CPU
    "llama-3-8b": _llama(4096, 14336, 32, 32, 8, 128256, 5e5),
    "llama-2-70b": _llama(8192, 28672, 80, 64, 8, 32000, 1e4),
    "opt-30b": _opt(7168, 48, 56),
    "opt-66b": _opt(9216, 64, 72),
    "llama-tiny": _llama(256, 512, 2, 4, 2, 512, 1e4),
    "opt-tiny": _opt(256, 2, 4, 512),
}


@dataclass(frozen=True)
class Artifact:
    """The treatment of a model's linear weights, all but the output head, and of its attention cache."""

    name: str
    layout: str  # dense | w8a8 | w8a16 | tiled-csl | tiled-bitmap
    sparsity: float = 0.0
    kv_bits: int | None = None  # None: bfloat16

    @classmethod
    def parse(cls, name: str) -> "Artifact":
        """Read `tiled-csl-80+kv4`: its layout, percent of zeros, bits of keys and values. Raises UsageError for anything else."""
        found = _FORM.fullmatch(name)
        zeros = int(found["zeros"] or 0) if found else 0
        if not found or zeros > 99:
            raise UsageError(
                f"--recipe {name} is unknown",
                "use dense, w8a8, w8a16, tiled-csl-80 or tiled-bitmap-50 (percent of zeros), each alone or with +kv4 or +kv8",
            )
        bits = found["bits"] and int(found["bits"])
        return cls(name, found["sparse"] or found["layout"], zeros / 100, bits)


def config_of(shape: str, positions: int = 0):
    """Return the transformers config of a shape, with room for so many positions. Raises UsageError for an unknown shape."""
    from transformers import AutoConfig

    if shape not in SHAPES:
        raise UsageError(f"--shape {shape} is unknown", f"choose one of {', '.join(SHAPES)}")
    settings = SHAPES[shape]
    longest = max(settings["max_position_embeddings"], positions)
    return AutoConfig.for_model(**settings | {"max_position_embeddings": longest, "dtype": DTYPE})


def random_model(
    config, artifact: Artifact, device: torch.device | str, seed: int = 0, group: TensorParallel | None = None
) -> tuple[nn.Module, Stages]:
    """Return a bfloat16 model of a config with random weights on `device`, or a rank's part of it, compressed there, ready to decode; and what took how
    long. Ranks do not wait for one another.

    Matrices are normal with a deviation of 0.02, less by sqrt(2 layers) where outputs add up, norms 1, biases 0: activations stay finite at any depth.
    """
    from transformers import AutoModelForCausalLM

    stages = Stages(device)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval()
    own = None if group is None else Partition.of(model, group, config.model_type)
    head = model.get_output_embeddings()
    for path, module in list(model.named_modules()):
        residual = path.rpartition(".")[2] in ADDED
        deviation = _DEVIATION * (2 * config.num_hidden_layers) ** -0.5 if residual else _DEVIATION
        for name, parameter in list(module.named_parameters(recurse=False)):
            with stages.of("draw"):
                drawn = _drawn(parameter.shape, f"{path}.{name}", deviation, stages.device, seed)
            setattr(module, name, nn.Parameter(drawn, requires_grad=False))
            del drawn
        if type(module) is nn.Linear:
            made = module if module is head or artifact.layout == DENSE else _compressed(path, module, artifact, stages)
            if own is not None:
                with stages.of("cut"):
                    made = own.cut(path, Whole.of(path, made), DTYPE)
            if made is not module:
                model.set_submodule(path, made)
                module.weight = None  # the next one is drawn into its memory
        elif any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            # Angles of RoPE follow from the config.
            model.set_submodule(path, type(module)(config).to(stages.device))
    if own is None:
        model.tie_weights()
        fuse(model)
    else:
        own.finish(model)
    if artifact.kv_bits is not None:
        heads = config.num_attention_heads
        kv_heads, head_dim = getattr(config, "num_key_value_heads", heads), config.hidden_size // heads
        calibration = uncalibrated(KVFormat(head_dim, artifact.kv_bits), kv_heads, config.num_hidden_layers)
        kv_cache.install(model, calibration if own is None else own.of_cache(calibration))
    return model, stages


def _drawn(shape: tuple[int, ...], name: str, deviation: float, device: torch.device, seed: int) -> Tensor:
    if len(shape) == 1:
        return torch.full(shape, 0.0 if name.endswith("bias") else 1.0, dtype=DTYPE, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode(), seed))
    return torch.empty(shape, dtype=DTYPE, device=device).normal_(0.0, deviation, generator=generator)


def _compressed(path: str, linear: nn.Linear, artifact: Artifact, stages: Stages) -> nn.Module:
    """Return the packed layer in place of a dense one."""
    weight = linear.weight.detach()
    if artifact.layout in layouts():
        with stages.of("prune"):
            threshold = layer_threshold(weight, round(artifact.sparsity * weight.numel()), path)
            weight, _ = prune(weight, threshold)
        with stages.of("pack"):
            packed = layouts()[artifact.layout].module.pack(weight, name=path)
        made = packed_linear(packed, None if linear.bias is None else DTYPE)
    else:
        scheme = int8.Int8Scheme("channel", "token" if artifact.layout == "w8a8" else "none")
        made = Int8Linear(*weight.shape, scheme, DTYPE, linear.bias is not None)
        with stages.of("quantize"):
            made.weight_scale = int8.weight_scale(weight, scheme.weights, DTYPE)
            rows = zip(weight.split(_ROWS), made.weight_scale.split(_ROWS), strict=True)
            made.weight = torch.cat([int8.quantize(x, scale) for x, scale in rows])
    if linear.bias is not None:
        made.bias = linear.bias
    return made


def protocols(batches: list[int | str], contexts: list[int], **settings) -> list[Protocol]:
    """Return one protocol for each context: a context for every batch, or one for all of them. Raises UsageError for other counts."""
    if len(contexts) not in (1, len(batches)):
        raise UsageError(
            f"{len(contexts)} contexts for {len(batches)} batches", "give one --context, or one for each of --batch"
        )
    found: dict[int, list[int | str]] = {}
    for batch, context in zip(batches, contexts if len(contexts) > 1 else contexts * len(batches), strict=True):
        found.setdefault(context, []).append(batch)
    return [Protocol(tuple(of_one), context, **settings) for context, of_one in found.items()]


def run(
    shape: str,
    recipes: list[str],
    plans: list[Protocol],
    device: str | torch.device,
    progress: Callable[[str], None] = lambda at: None,
    base: str | None = DENSE,
    group: TensorParallel | None = None,
) -> dict:
    """Time a shape with a base recipe, if any, and with each other one: the object that `demo --shape --json` prints.

    `rows` are those of `eval speed`, with `model` the shape and `artifact` the recipe; `builds` say of each artifact how long it took to make. The ranks of a
    `group` share every model. Raises UsageError for an unknown shape or recipe, or heads that cannot be shared.
    """
    artifacts = {name: Artifact.parse(name) for name in dict.fromkeys([*([] if base is None else [base]), *recipes])}
    config, builds = config_of(shape, max(plan.most for plan in plans)), []

    def load(artifact: Artifact) -> nn.Module:
        started = time.perf_counter()
        model, stages = random_model(config, artifact, device, plans[0].seed, group)
        stages = {f"{name}_s": seconds for name, seconds in stages.seconds.items()}
        builds.append({"artifact": artifact.name, "seconds": time.perf_counter() - started} | stages)
        return model

    subjects = [Subject(name, lambda made=artifact: load(made)) for name, artifact in artifacts.items()]
    compared, others = (None, subjects) if base is None else (subjects[0], subjects[1:])
    found = compare(others, compared, plans, progress, group)
    found["rows"] = [{"model": shape, "artifact": row["model"]} | row | {"model": shape} for row in found["rows"]]
    cases = [{"batches": list(plan.batches), "context": plan.context} for plan in plans]
    same = {k: v for k, v in asdict(plans[0]).items() if k not in ("batches", "context")}
    facts = {"model": shape, "weights": f"random, seed {plans[0].seed}", "cases": cases, "filled": FILLED}
    return {
        "env": found["env"],
        "read_gbps": found["read_gbps"],
        "protocol": same | facts,
        "builds": builds,
        "rows": found["rows"],
    }

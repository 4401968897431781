"""The last step of a run: config, index, model card and manifest, once every shard is done."""

import collections
import shutil
from importlib.metadata import version
from math import prod
from pathlib import Path

import yaml

from tilepress.compress.kv.recipe import KVCache
from tilepress.compress.prune.recipe import Prune
from tilepress.compress.quantize.recipe import Quantize
from tilepress.compress.recover.recipe import Recover
from tilepress.compress.run.plan import OURS, Plan, done_record, other_files
from tilepress.formats import TilepressError, installing
from tilepress.formats.artifact import disk_errors, encoded, sha256_file, to_json, write_atomic
from tilepress.formats.checkpoint import FORMAT_VERSION, INDEX_NAME, MANIFEST_NAME, Checkpoint, read_manifest
from tilepress.formats.files import read_yaml
from tilepress.formats.int8 import FORMAT, PACKED_FORMAT
from tilepress.formats.layout import layout_named
from tilepress.version import __version__

GENERAL = (  # the manifest's keys that every artifact has; all others are the recipe's
    *("format_version", "tilepress", "command", "fingerprint", "versions", "source", "left_alone", "tensors", "files"),
)
_OF_THE_SOURCE = ("license", "license_name", "license_link", "language")  # in the head of its card
_HOW_TO_LOAD = f"""## How to load it

```
{installing()}
```

```python
import tilepress
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("DIR")
model = tilepress.load("DIR", device="cuda")
prompt = tokenizer("The capital of France is", return_tensors="pt").to("cuda")
tokens = model.generate(**prompt, max_new_tokens=100, custom_generate=tilepress.decode)
```

With transformers' own loader:

```python
import tilepress.hf  # it learns our layouts and cache
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("DIR")
```

With vLLM:
"""
IN_MODEL_CARD = (Quantize, KVCache, Prune, Recover)  # the recipes that add to a model card, in that order


def finish(plan: Plan) -> dict | None:
    """Write what makes the folder an artifact once every shard is done, and return its manifest; None while any is missing.

    Of several ranks that come last at once, each writes the same bytes; one that finds the work folder gone was not needed.
    """
    try:
        manifest = _finish(plan)
    except TilepressError:
        if not (plan.output / MANIFEST_NAME).exists() or plan.work.exists():
            raise
        manifest = None
    if manifest is None and (plan.output / MANIFEST_NAME).exists():
        manifest = read_manifest(plan.output)
    return manifest


def _finish(plan: Plan) -> dict | None:
    records = [done_record(plan, shard) for shard in plan.shards]
    if not all(records):
        return None
    checkpoint = Checkpoint(plan.source)
    copied = _copy_other_files(plan)
    tensors = [tensor for record in records for tensor in record["tensors"]]
    manifest = {
        "format_version": FORMAT_VERSION,
        "tilepress": __version__,
        "command": plan.recipe.command,
        "settings": plan.settings,
        "fingerprint": plan.fingerprint,
        "versions": {name: version(name) for name in ("torch", "transformers", "safetensors")},
        "source": {"name": plan.name, "files": [r["source"] for r in records]}
        | (
            {"recipe": {k: checkpoint.manifest[k] for k in ("command", "settings", "source")}}
            if checkpoint.manifest
            else {}
        ),
        "left_alone": [{"name": item.name, "reason": item.reason} for item in plan.left_alone],
        "tensors": sorted(tensors, key=lambda t: t["name"]),
    } | plan.recipe.describe(plan, tensors)
    write_atomic(plan.output / "README.md", encoded(model_card(manifest, source_head(plan.output))), plan.work)
    total = sum(tensor["bytes"] for tensor in tensors)
    weight_map = {name: file for record in records for name, file in record["weight_map"].items()}
    write_atomic(
        plan.output / INDEX_NAME,
        to_json({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}),
        plan.work,
    )
    extra = plan.recipe.extra_files(plan)
    for name, content in extra.items():
        with disk_errors(plan.output / name):
            (plan.output / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(plan.output / name, content, plan.work)
    config = plan.recipe.result_config(checkpoint.config, tensors, list(plan.left_alone))
    write_atomic(plan.output / "config.json", to_json(config), plan.work)
    files = [record["file"] for record in records]
    for name in sorted([*copied, *extra, "README.md", INDEX_NAME, "config.json"]):
        files.append(
            {"name": name, "bytes": (plan.output / name).stat().st_size, "sha256": sha256_file(plan.output / name)}
        )
    manifest["files"] = files
    write_atomic(plan.output / MANIFEST_NAME, to_json(manifest), plan.work)
    shutil.rmtree(plan.work, ignore_errors=True)
    return manifest


def _copy_other_files(plan: Plan) -> list[str]:
    """Tokenizer, licence and whatever else the source has beside its weights; its README as SOURCE_README.md."""
    copied = []
    for name in other_files(plan.source):
        copy = Path("SOURCE_README.md") if str(name) == "README.md" else name
        with disk_errors(plan.output / copy):
            (plan.output / copy).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(plan.output / copy, plan.source / name, plan.work)
        copied.append(str(copy))
    return copied


def history(manifest: dict) -> list[dict]:
    """Return the steps that made an artifact, the newest first, each with `command`, `settings` and `source`."""
    steps = [manifest]
    while "recipe" in steps[-1]["source"]:
        steps.append(steps[-1]["source"]["recipe"])
    return steps


def origin(manifest: dict) -> str:
    """Return the name of what the first step started from: the hub's, or that of a folder."""
    return str(history(manifest)[-1]["source"].get("name", "a model"))


def source_head(folder: Path) -> dict:
    """Return what the card of an artifact's source tells the hub of its licence and languages."""
    source = folder / "SOURCE_README.md"
    text = source.read_text(encoding="utf-8", errors="replace") if source.exists() else ""
    if not text.startswith("---\n") or text.count("---\n") < 2:
        return {}
    try:
        found = read_yaml(text.split("---\n", 2)[1])
    except ValueError:  # a card of anyone's; the hub would not read it either
        return {}
    return {key: found[key] for key in _OF_THE_SOURCE if key in found} if isinstance(found, dict) else {}


def model_card(manifest: dict, of_source: dict | None = None) -> str:
    """Return Markdown with the hub's metadata, from the manifest and what the source's card told alone (no clock, no machine: the same run gives
    the same bytes)."""
    steps = history(manifest)
    cards = [kind.model_card(manifest, steps) for kind in IN_MODEL_CARD if any(map(kind.made, steps))]
    base = origin(manifest)
    packed = [t for t in manifest["tensors"] if layout_named(t["layout"]).sparse]
    int8 = [t for t in manifest["tensors"] if layout_named(t["layout"]).matrix_of_codes]
    total = sum(t["bytes"] for t in manifest["tensors"])
    changed = [t for t in manifest["tensors"] if "zeros" in t]
    tags = ["tilepress", *(["sparse"] if packed or changed else []), *(["int8", "compressed-tensors"] if int8 else [])]
    head: dict = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": tags}
    head |= {"base_model": base, "base_model_relation": "quantized"} if "/" in base else {}
    lines = [
        f"---\n{yaml.safe_dump(head | (of_source or {}), sort_keys=False, allow_unicode=True)}---",
        "",
        f"# {base}, compressed with tilepress",
        "",
        "| | |",
        "|---|---|",
        f"| made by | `tilepress {manifest['command']}` {_settings(manifest['settings'])} |",
    ]
    lines += [f"| from | `tilepress {step['command']}` {_settings(step['settings'])} |" for step in steps[1:]]
    lines.append(f"| weights | {total / 1e6:.1f} MB |")
    if changed:
        zeros, elements = sum(t["zeros"] for t in changed), sum(prod(t["shape"]) for t in changed)
        lines.append(
            f"| sparsity | {zeros / elements:.2%} of {len(changed)} linear weights ({zeros:,} of {elements:,} are zero) |"
        )
    lines += [row for card in cards for row in card.rows]
    if manifest["left_alone"]:
        lines.append(
            f"| left alone | {len(manifest['left_alone'])} tensors, each with its reason in `tilepress.json` |"
        )
    lines.append("")
    if packed:
        lines += [_how_packed(packed), ""]
    if int8:
        lines += [
            f"{len(int8)} linear weights are INT8. {_int8_loaders(manifest['tensors'], steps)} {OURS} runs it.",
            "",
        ]
    for card in cards:
        for paragraph in card.paragraphs:
            lines += [paragraph, ""]
    lines += _loading(packed, int8, steps)
    lines += ["What it costs has to be measured on your text: `tilepress eval perplexity DIR --base BASE`.", ""]
    return "\n".join(lines)


def _loading(packed: list[dict], int8: list[dict], steps: list[dict]) -> list[str]:
    """Return how the folder is loaded, by us, transformers and vLLM."""
    lines = [_HOW_TO_LOAD, *_vllm(packed, int8, steps), ""]
    if packed:
        exact = " (INT8: rounded)" if any(t.get("value_dtype") == "int8" for t in packed) else ""
        lines += [
            "Without the import transformers stops at the shapes of the packed weights. Do not silence it there: with "
            "`ignore_mismatched_sizes=True` it would fill these layers with random numbers.",
            "",
            "Other runtimes: `tilepress convert DIR -o DENSE --to dense` writes an ordinary checkpoint, "
            f"bit for bit the same weights{exact}.",
            "",
        ]
    return lines


def _vllm(packed: list[dict], int8: list[dict], steps: list[dict]) -> list[str]:
    """Return the command that serves the folder, or why there is none."""
    dense = "`tilepress convert DIR -o DENSE --to dense` makes what it serves."
    if packed and (int8 or any(".experts." in tensor["name"] for tensor in packed)):
        return [f"it has nothing for {'INT8 layers beside sparse ones' if int8 else 'packed experts'}; {dense}"]
    if int8 and "vLLM" not in _others(int8, steps):
        return [f"it has no kernel for this kind of INT8; {dense}"]
    install = installing("vllm") if packed else "pip install vllm"
    return ["```", install, "vllm serve DIR", "```"]


def _how_packed(packed: list[dict]) -> str:
    counts = collections.Counter((t["layout"], t.get("value_dtype") == "int8") for t in packed)
    told = [
        f"{n} as {layout_named(layout).title}{' with INT8 values' if int8 else ''}"
        for (layout, int8), n in counts.items()
    ]
    return f"Linear weights are stored sparsely: {', '.join(told)}."


def _int8_loaders(tensors: list[dict], steps: list[dict]) -> str:
    """Return who else loads an INT8 artifact."""
    int8 = [tensor for tensor in tensors if layout_named(tensor["layout"]).matrix_of_codes]
    if any(tensor.get("transposed") for tensor in int8):
        return "They are Conv1D layers, which compressed-tensors does not know: other loaders refuse the folder."
    layout = f"The layout is that of compressed-tensors (`{_stored_as(int8)}`)"
    return (
        f"{layout}; by its rules these load the folder as it is: {', '.join(_others(tensors, steps)) or 'none other'}."
    )


def _stored_as(tensors: list[dict]) -> str:
    """Return what compressed-tensors calls the format of INT8 weights among these."""
    known = [layout_named(tensor["layout"]) for tensor in tensors]
    return next((layout.stored_as for layout in known if layout.matrix_of_codes), FORMAT)


def _others(tensors: list[dict], steps: list[dict]) -> list[str]:
    """Return who loads an INT8 artifact without us."""
    activations = next((step["settings"]["activations"] for step in steps if "activations" in step["settings"]), None)
    if any(tensor.get("transposed") for tensor in tensors):
        return []
    experts = any(".experts." in tensor["name"] for tensor in tensors)
    runs = _stored_as(tensors) == PACKED_FORMAT or activations in ("token", "tensor", "tensor-asym", "channel")
    runs = runs and (activations == "token" or not experts)
    return [*(["vLLM", "SGLang"] if runs else []), *([] if experts else ["transformers with the package"])]


def _settings(settings: dict) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items() if value not in (None, []))

"""The model card of an artifact: what it is, how it was made, how to run it, and what nobody has measured yet."""


def model_card(manifest: dict) -> str:
    """Markdown with the hub's metadata, from the manifest alone (no clock, no machine: the same run gives the same bytes)."""
    base = manifest["source"]["name"]
    packed = [t for t in manifest["tensors"] if t["layout"] != "dense"]
    total = sum(t["bytes"] for t in manifest["tensors"])
    changed = [t for t in manifest["tensors"] if "zeros" in t]
    lines = [
        "---",
        "library_name: transformers",
        "tags: [tilepress" + (", sparse" if packed or changed else "") + "]",
    ]
    if "/" in base:
        lines += [f"base_model: {base}", "base_model_relation: quantized"]
    lines += [
        "---",
        "",
        f"# {base}, compressed with tilepress",
        "",
        "| | |",
        "|---|---|",
        f"| made by | `tilepress {manifest['command']}` {_settings(manifest['settings'])} |",
        f"| weights | {total / 1e6:.1f} MB |",
    ]
    if changed:
        zeros, elements = sum(t["zeros"] for t in changed), sum(_elements(t) for t in changed)
        lines.append(
            f"| sparsity | {zeros / elements:.2%} of {len(changed)} linear weights ({zeros:,} of {elements:,} are zero) |"
        )
    lines += [
        f"| left alone | {len(manifest['left_alone'])} tensors, each with its reason in `tilepress.json` |",
        "",
    ]
    if packed:
        lines += [
            "The linear weights are stored as Tiled-CSL. transformers loads them after `import tilepress.hf`:",
            "",
            "```python",
            "import tilepress.hf",
            "from transformers import AutoModelForCausalLM",
            "",
            'model = AutoModelForCausalLM.from_pretrained("DIR")',
            "```",
            "",
            "Other runtimes: `tilepress convert DIR -o DENSE --to dense` writes an ordinary checkpoint, bit for bit the same weights.",
            "",
        ]
    lines += ["What it costs has to be measured on your text: `tilepress eval perplexity DIR --base BASE`.", ""]
    return "\n".join(lines)


def _settings(settings: dict) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items() if value not in (None, []))


def _elements(tensor: dict) -> int:
    count = 1
    for n in tensor["shape"]:
        count *= n
    return count

"""How words reach the terminal: progress, tables, errors. Only cli.py uses it. Words go to stderr, results to stdout."""

import sys
import time

_PLAIN_EVERY_S = 10.0
_KERNELS_SHOWN = 6


class Bar:
    """A progress bar with the item at hand and the time left; plain lines every few seconds where stderr is no terminal."""

    def __init__(self, title: str, total: int, quiet: bool):
        self.title, self.total, self.quiet = title, max(total, 1), quiet
        self.done, self._started, self._printed, self._live = 0, time.monotonic(), time.monotonic(), None

    def __enter__(self) -> "Bar":
        if not self.quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

            self._live = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:3.0f}%"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[item]}"),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._live.add_task(self.title, total=self.total, item="")
            self._live.start()
        return self

    def __exit__(self, *error) -> None:
        if self._live:
            self._live.stop()
        elif not self.quiet and not any(error):
            say(f"{self.title}: done in {time.monotonic() - self._started:.1f} s")

    def step(self, item: str, amount: int) -> None:
        self.at(item, self.done + amount)

    def at(self, item: str, done: int, total: int | None = None) -> None:
        self.done, self.total = done, total or self.total
        now = time.monotonic()
        if self._live:
            self._live.update(self._task, completed=self.done, total=self.total, item=item)
        elif not self.quiet and now - self._printed > _PLAIN_EVERY_S:
            self._printed = now
            left = (now - self._started) / self.done * (self.total - self.done) if self.done else None
            say(
                f"{self.title}: {100 * self.done // self.total} %  {item}"
                + (f"  about {left:.0f} s left" if left is not None else "")
            )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(title: str, columns: list[str], rows: list[list[str]]) -> str:
    """Aligned plain text: the first column to the left, the others to the right. The same in a terminal, a pipe and a README."""
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    lines = [title, ""] if title else []
    for row in [columns, *rows]:
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"


def quiet_libraries() -> None:
    """transformers and datasets draw bars and warn on their own: one voice is enough."""
    import logging
    import os
    import warnings

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("datasets").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def left_alone(reasons: dict[str, str]) -> str:
    """One line a reason, with the first names."""
    lines = []
    for reason in sorted(set(reasons.values())):
        names = [name for name, why in reasons.items() if why == reason]
        lines.append(f"  left alone {len(names)} x {reason}: {', '.join(names[:2])}{' …' if len(names) > 2 else ''}")
    return "\n".join(lines)


def plan_text(facts: dict) -> str:
    """What `--dry-run` prints."""
    layers = [[t["name"], f"{t['rows']} x {t['cols']}", size(t["bytes"])] for t in facts["layers"]]
    if "kv_cache" in facts:
        head = ["  attention cache: " + facts["kv_cache"]["format"], *kv_sizes(facts["kv_cache"], 1.0)]
        what = "The weights stay as they are,"
    else:
        head = [table("", ["weight", "rows x cols", "stored now"], layers), left_alone(facts["left_alone"])]
        what = f"{len(layers)} weights"
    return "\n".join(
        [
            *head,
            f"  {what} in {facts['shards']} shards; {size(facts['source_bytes'])} now, about "
            f"{size(facts['disk_bytes'])} of disk; memory about {size(facts['peak_memory_bytes'])} beside torch itself",
            *recovery_memory(facts.get("recovery")),
            "  nothing was written",
        ]
    )


def result_text(facts: dict) -> str:
    """What a command that wrote an artifact prints."""
    share = facts["bytes"] / facts["source_bytes"]
    if "kv_cache" in facts:
        return "\n".join(
            [
                kv_text(facts["kv_cache"], facts["memory_gib"]),
                f"  wrote {facts['output']} in {facts['seconds']:.1f} s; the weights are the source's own files, linked where the disk allows",
            ]
        )
    lines = [f"  weights    {size(facts['source_bytes'])} -> {size(facts['bytes'])}  ({share:.1%})"]
    if "report" in facts:
        per_channel = facts["settings"]["activations"] == "channel"
        lines += ["", quantization_text(facts["report"], facts.get("calibration"), per_channel), ""]
    else:
        lines.append(f"  zeros      {facts['sparsity']:.2%} of {facts['targets']} linear weights")
        if "allocation" in facts:
            lines.append(pruning_text(facts))
    if "recovery" in facts:
        lines.append(recovery_text(facts["recovery"]))
    lines += [left_alone(facts["left_alone"]), f"  wrote      {facts['output']} in {facts['seconds']:.1f} s"]
    if facts["stages"]:
        lines.append(f"  time       {_stages(facts['stages'])}")
    return "\n".join(lines)


def recovery_memory(told: dict | None) -> list[str]:
    """What each way of recovery needs, of a dry run."""
    if told is None:
        return []
    names = {"model": "the whole model", "blocks": "block by block (--blocks)"}
    rows = [
        [names[way] + (" <- chosen" if way == told["way"] else ""), size(sizes["cuda"]), size(sizes["cpu"])]
        for way, sizes in told["memory_bytes"].items()
    ]
    return ["", table("", ["memory of recovery", "on a card", "on the CPU"], rows), ""]


def recovery_text(told: dict) -> str:
    """What training brought on text that was held out."""
    if told["way"] == "blocks":
        last = told["layers"][-1]
        what = f"error of the last layer's output {last['error_before']:.4f} -> {last['error_after']:.4f}"
    else:
        what = f"KL divergence {told['kl_before']:.4f} -> {told['kl_after']:.4f}"
    return f"  recovered  {told['tokens']:,} tokens trained on, {told['trained_parameters']:,} weights; held-out {what}"


def pruning_text(facts: dict) -> str:
    """What a calibrated pruning saw, and its worst weights."""
    seen = facts["calibration"]
    worst = sorted(seen["pruned"], key=lambda item: -item.get("output_error", 0.0))[:5]
    rows = [
        [item["name"], f"{item['sparsity']:.2%}", item["method"], f"{item.get('output_error', float('nan')):.2%}"]
        for item in worst
    ]
    return "\n".join(
        [
            f"  calibrated {seen['tokens']:,} tokens in {seen['windows']} windows, allocation {facts['allocation']['chosen']}; the worst:\n",
            table("", ["weight", "zeros", "method", "output error"], rows),
            "",
        ]
    )


def _stages(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name.removesuffix('_s')} {value:.1f} s" for name, value in seconds.items())


def kv_sizes(told: dict, memory_gib: float) -> list[str]:
    before, after = (int(memory_gib * told[name]) for name in ("tokens_per_gib_bfloat16", "tokens_per_gib"))
    return [
        f"  a token     {told['bytes_per_token_bfloat16']:,} -> {told['bytes_per_token']:,} bytes "
        f"({told['bytes_per_token'] / told['bytes_per_token_bfloat16']:.1%} of bfloat16)",
        f"  {memory_gib:g} GiB     {before:,} -> {after:,} tokens",
    ]


def kv_text(told: dict, memory_gib: float) -> str:
    """What a calibrated cache takes, and its layers with the greatest output error."""
    worst = sorted(told["report"], key=lambda layer: -layer["output_error"])[:5]
    rows = [
        [
            str(layer["layer"]),
            f"{layer['key_error']:.2%}",
            f"{layer['value_error']:.2%}",
            f"{layer['output_error']:.2%}",
            *(f"{layer[name]:.2f}" for name in ("key_alpha", "key_clip", "value_alpha", "value_clip")),
            *(f"{max(layer['key_overflow'], layer['value_overflow']):.3%}" for _ in range("key_overflow" in layer)),
        ]
        for layer in worst
    ]
    head = ["layer", "key error", "value error", "output error", "alpha K", "clip K", "alpha V", "clip V"]
    head += ["beyond the range"] if rows and len(rows[0]) > len(head) else []
    few = "" if len(worst) == len(told["report"]) else f"; the worst layers of {len(told['report'])}:"
    rotated = ", keys rotated" if told["rotation"] == "hadamard" else ""
    return "\n".join(
        [
            table(f"  attention cache: {told['format']}{rotated}{few}", head, rows),
            "",
            f"  calibrated on {told['tokens']:,} tokens in {told['windows']} windows",
            *kv_sizes(told, memory_gib),
        ]
    )


def quantization_text(report: dict, calibration: dict | None, per_channel: bool) -> str:
    """The five worst layers, and what calibration saw and left alone; `per_channel` is what the folded factors are called."""
    layers = report["layers"]

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.4%}"

    rows = [
        [layer["name"], f"{layer['snr_db'] or 0:.1f} dB", share(layer["clip_share"]), share(layer["output_error"])]
        for layer in layers[:5]
    ]
    title = f"  {len(layers)} linear weights in INT8; the worst:"
    lines = [table(title, ["weight", "weight SNR", "inputs clipped", "output error"], rows)]
    if calibration is None:
        lines.append("\n  output errors were not measured: no --dataset")
        return "\n".join(lines)
    lines.append(f"\n  calibrated on {calibration['tokens']:,} tokens in {calibration['windows']} windows")
    smoothed = [item for item in calibration["inputs"] if item.get("folded_into")]
    alone = [item for item in calibration["inputs"] if "left_alone" in item]
    done, not_done = ("per channel", "left per tensor") if per_channel else ("smoothed   ", "not smoothed")
    if smoothed:
        lines.append(
            f"  {done} {len(smoothed)} of {len(smoothed) + len(alone)} inputs, the factors folded into what makes them"
        )
    for reason in sorted({item["left_alone"] for item in alone}):
        names = [item["weights"][0] for item in alone if item["left_alone"] == reason]
        lines.append(f"  {not_done} {len(names)} x {reason}: {', '.join(names[:2])}{' …' if len(names) > 2 else ''}")
    return "\n".join(lines)


def perplexity_text(result: dict) -> str:
    """The protocol, a row a model, and what ran."""
    protocol = result["protocol"]
    title = f"{protocol['dataset']}: recipe {protocol['recipe']}, {result['windows']} windows of {protocol['seqlen']} tokens"
    if protocol["recipe"] == "strided":
        title += f", stride {protocol['stride']}"
    title += f", {result['tokens']:,} scored, {protocol['dtype']} on {protocol['device']}"
    if protocol["ranks"] > 1:
        title += f", {protocol['ranks']} ranks"
    if protocol["limit"]:
        title += f" (quick: at most {protocol['limit']} windows)"

    def first_cells(name: str, scores: dict) -> list[str]:
        return [name, with_error(scores["perplexity"], scores["perplexity_stderr"]), f"{scores['bits_per_byte']:.4f}"]

    head, rows = ["model", "perplexity", "bits/byte"], []
    row = first_cells(result["model"], result)
    if "base" in result:
        head += ["nll change", "KL divergence", "same top token"]
        rows.append([*first_cells(f"{result['base']['model']} (base)", result["base"]), "", "", ""])
        row += [
            with_error(result["delta_nll"], result["delta_nll_stderr"]),
            with_error(result["kl_divergence"]["mean"], result["kl_divergence"]["stderr"]),
            f"{result['top1_agreement']:.2%}",
        ]
    if "kv_cache" in result:
        cache = result["kv_cache"]
        title += f"\nattention cache {cache['format']}: {cache['measured']}"
        if "sim_perplexity" in cache:
            title += (
                f"\n  simulated: {cache['sim_perplexity']:.4f}, the cache is {cache['decode_over_sim']:+.3%} from that"
            )
    ran = "; ".join(f"{count} layer{'s' if count > 1 else ''} by {path}" for path, count in result["paths"].items())
    return table(title, head, [*rows, row]) + f"\n\n  ran {ran}; {result['seconds']:.1f} s"


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def inspection_text(found: dict, memory_gib: float) -> str:
    """A row a weight, then the total; `-` where only a manifest could tell."""
    title = f"{found['path']}: {found['architecture']}, {found['shards']} shard{'s' if found['shards'] > 1 else ''}"
    if found["made_by"]:
        title += f", by {found['made_by']}"
    rows = [
        [
            row["name"],
            " x ".join(map(str, row["shape"])),
            row["layout"],
            row["dtype"] if row["value_dtype"] in (None, row["dtype"]) else f"{row['value_dtype']} x {row['dtype']}",
            _cell(row["sparsity"], ".2%"),
            size(row["bytes"]),
            _cell(row["densest_tile"], ".1%"),
            _cell(row["wavefronts_per_32"], ".3f"),
            _cell(row["filled"], ".1%"),
            *([row["method"] or "-", _cell(row["output_error"], ".2%")] if found["allocation"] else []),
        ]
        for row in found["rows"]
    ]
    head = ["weight", "shape", "layout", "dtype", "zeros", "bytes", "densest tile", "wavefronts/32", "filled"]
    head += ["pruned by", "output error"] if found["allocation"] else []
    bits = 8 * found["bytes"] / max(found["elements"], 1)
    total = f"{found['elements']:,} elements, {size(found['bytes'])}, {bits:.2f} bits per element"
    cache = "\n\n" + kv_text(found["kv_cache"], memory_gib) if found.get("kv_cache") else ""
    return table(title, head, rows) + f"\n\n  {total}" + cache


def _with_spread(row: dict, name: str, form: str) -> str:
    return f"{row[name]:{form}} ± {row[f'{name}_spread'] / 2:.1%}"


def speed_text(found: dict) -> str:
    """A row a model and batch, then what ran and where a step's time went."""
    protocol, env = found["protocol"], found["env"]
    where = env["card"] or f"{env['threads']} threads of a CPU"
    gpus = max(row["gpus"] for row in found["rows"])
    where = where if gpus == 1 else f"{gpus} x {where} (memory of one)"
    title = f"{where}, torch {env['torch']}: context {protocol['context']}, {protocol['new_tokens']} steps, {protocol['runs']} runs (± half of their spread)"
    head = ["model", "batch", "weights GiB", "KV GiB", "peak GiB", "first token ms", "per token ms"]
    head += ["tokens/s", "per GPU-second", "of read bandwidth", "speed-up"]
    rows, notes = [], []
    for row in found["rows"]:
        name = row["model"] + (" (base)" if row["is_base"] else "")
        if not row["fits"]:
            rows.append([name, str(row["asked"]), "does not fit", *[""] * (len(head) - 3)])
            continue
        rows.append(
            [
                name,
                str(row["batch"]),
                f"{row['weights_gib']:.3f}",
                *(_cell(row[part], ".3f") for part in ("kv_gib", "peak_gib")),
                *(_with_spread(row, part, ".2f") for part in ("ttft_ms", "tpot_ms")),
                *(_with_spread(row, part, ".1f") for part in ("tokens_per_s", "tokens_per_gpu_s")),
                _cell(row["share_of_read"], ".0%"),
                _with_spread(row, "speedup", ".2f") if "speedup" in row else "",
            ]
        )
        ran = "; ".join(f"{count} x {path}" for path, count in row["paths"].items())
        notes.append(f"  {name}, batch {row['batch']}: cache {row['cache']}; ran {ran}")
        longest = [f"{part['share']:.0%} {part['kernel'][:60]}" for part in row["step"][:_KERNELS_SHOWN]]
        notes.append(f"    of a step's time: {', '.join(longest)}")
    return table(title, head, rows) + f"\n\n  {protocol['filled']}\n" + "\n".join(notes)


def shape_text(found: dict) -> str:
    """A table for each context, and how long the models took to make."""
    parts = []
    for context in dict.fromkeys(case["context"] for case in found["protocol"]["cases"]):
        rows = [row | {"model": row["artifact"]} for row in found["rows"] if row["context"] == context]
        parts.append(speed_text(found | {"protocol": found["protocol"] | {"context": context}, "rows": rows}))
    made = [
        f"  {build['artifact']} in {build['seconds']:.1f} s ("
        + _stages({name: build[name] for name in build if name.endswith("_s")})
        + ")"
        for build in found["builds"]
    ]
    title = f"{found['protocol']['model']}, {found['protocol']['weights']}; made on the device:"
    return "\n\n".join([*parts, "\n".join([f"  {title}", *made])])


def _times(row: dict) -> list[str]:
    return [f"{row['us']:.1f}", f"{row['us_dense']:.1f}", f"{row['speedup']:.2f}"]


def kernels_text(found: dict) -> str:
    """A row a case, of one kind of kernels."""
    rows = found["rows"]
    title = f"{found['env']['card']}, torch {found['env']['torch']}: reads {found['read_gbps'] / 1000:.2f} TB/s"
    if "HQ" in rows[0]:
        return _attention_text(title, rows)
    if all(row["op"] == "spmm" for row in rows):
        head = [
            "M x K",
            "N",
            "zeros",
            "layout",
            "values",
            "us",
            "cuBLAS us",
            "times as fast",
            "of read bandwidth",
            "error",
        ]
        cells = [
            [
                f"{row['M']} x {row['K']}",
                str(row["N"]),
                f"{row['sparsity']:.0%}",
                row["layout"],
                row["value_dtype"],
                *_times(row),
                f"{row['share_of_read']:.0%}",
                f"{row['rel_err']:.0e}",
            ]
            for row in rows
        ]
    elif "tokens" in rows[0]:
        head = ["op", "tokens x hidden", "dtype", "us", "eager us", "times as fast", "of the floor"]
        cells = [
            [row["op"], f"{row['tokens']} x {row['hidden']}", row["dtype"], *_times(row), f"{row['of_floor']:.2f}"]
            for row in rows
        ]
    else:
        head = ["op", "N x K", "M", "dtype", "us", "cuBLAS us", "times as fast", "TOPS", "of read bandwidth"]
        cells = [
            [
                row["op"],
                f"{row['N']} x {row['K']}",
                str(row["M"]),
                row["dtype"],
                *_times(row),
                f"{row['tops']:.0f}",
                f"{row['share_of_read']:.0%}",
            ]
            for row in rows
        ]
    return table(title, head, cells)


def _attention_text(title: str, rows: list[dict]) -> str:
    """Decode attention, and RoPE with the append."""

    def sizes(row: dict) -> list[str]:
        return [row["kv"], str(row["B"]), f"{row['HQ']}/{row['HKV']}", str(row["D"]), row["dtype"]]

    names = ["cache", "batch", "heads", "of", "dtype"]
    head = [*names, "tokens", "us", "dense us", "times as fast", "of read bandwidth", "of equal lengths", "error"]
    cells = [
        [
            *sizes(row),
            f"1..{2 * row['T']}" if row["variable_lengths"] else str(row["T"]),
            f"{row['us']:.1f}",
            f"{row['us_bf16_best']:.1f}",
            f"{row['speedup']:.2f}",
            f"{row['share_of_read']:.0%}",
            _cell(row.get("over_equal"), ".2f"),
            f"{row['rel_err']:.0e}",
        ]
        for row in rows
        if row["op"] == "decode_attention"
    ]
    fronts = [
        [*sizes(row), *(_cell(row[name], ".2f") for name in ("us", "us_eager", "us_floor", "us_allowed"))]
        for row in rows
        if row["op"] == "rope_append"
    ]
    tables = [table(f"decode attention on {title}", head, cells)]
    if fronts:
        names += ["us", "eager us", "floor us", "allowed us"]
        tables.append(table("RoPE and append, a token of each", names, fronts))
    return "\n\n".join(tables)


def with_error(value: float, stderr: float | None) -> str:
    return f"{value:.4f}" if stderr is None else f"{value:.4f} ± {stderr:.4f}"

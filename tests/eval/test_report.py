"""The page of a report: its figures are those of the files, plotly takes its drawings, and a browser shows it without the network."""

import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from support.artifacts import few_words
from support.families import byte_tokenizer

import tilepress
from tilepress import KVCache, Prune, Quantize, UsageError
from tilepress.eval.report import figures, page as page_module
from tilepress.eval.report.gather import gather, place
from tilepress.formats.checkpoint import read_manifest

go = pytest.importorskip("plotly.graph_objects")
NAME = "<img src=x onerror=alert(1)>&"  # of a folder: a page must show it, not run it
TASK = {"items": 50, "acc_norm": 0.43, "acc_norm_stderr": 0.07, "base": {"acc_norm": 0.47, "acc_norm_stderr": 0.07}}
TASK |= {"recovery": 0.915, "recovery_stderr": 0.04}
PROMPT = "</script><i>Once</i>"


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """Two artifacts, one of a name that tries to leave its place, and what every command tells of them."""
    folder = tmp_path_factory.mktemp("runs")
    pruned, int8 = folder / "pruned", folder / NAME
    tilepress.compress(tiny, pruned, [Prune(0.6, method="wanda"), KVCache()], dataset=few_words(4, 64), device="cpu")
    tilepress.compress(tiny, int8, Quantize(), device="cpu")
    options = {"base": tiny, "seqlen": 64, "limit": 3, "device": "cpu"}
    from tilepress.demo import TEXT

    found = {
        "pruned": tilepress.perplexity(pruned, TEXT, **options).to_json(),
        "int8": tilepress.perplexity(int8, TEXT, noise_floor=True, **options).to_json(),
        "compared": tilepress.compare(tiny, int8, [PROMPT], new_tokens=3, device="cpu").to_json(),
        "speed": _speed(str(int8), str(tiny)),
        "tasks": {"model": str(int8), "base_model": str(tiny), "protocol": {}, "results": {"arc": TASK}},
    }
    for name, result in found.items():
        (folder / f"{name}.json").write_text(json.dumps(result))
    return folder, pruned, int8, found


def _speed(model: str, base: str) -> dict:
    """Return what `eval speed` prints, as far as a page shows it."""
    row = {"asked": 1, "batch": 1, "context": 64, "fits": True, "tokens_per_s": 50.0, "tokens_per_s_spread": 0.1}
    row |= {"tpot_ms": 20.0, "ttft_ms": 90.0, "peak_gib": 3.5, "share_of_read": 0.4}
    faster = row | {"tokens_per_s": 75.0, "tpot_ms": 13.3, "speedup": 1.5}
    rows = [row | {"model": base, "is_base": True}, faster | {"model": model, "is_base": False}]
    rows.append({"model": model, "is_base": False, "asked": 999, "batch": 999, "context": 64, "fits": False, "gpus": 1})
    return {"env": {"card": "H200", "torch": "2"}, "read_gbps": 4000.0, "protocol": {}, "rows": rows}


class Page(HTMLParser):
    """The words of a page by section, its drawings, and whatever it would load."""

    def __init__(self, html: str):
        super().__init__()
        self.sections, self.figures, self.loads, self.drawn = {"": []}, [], [], {}
        self._at, self._script = "", None
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag == "section":
            self._at = given["id"]
            self.sections[self._at] = []
        if given.get("class") == "figure":
            self.figures.append(given["id"])
        self.loads += [given[key] for key in ("src", "href") if key in given and not given[key].startswith("data:")]
        self._script = given.get("id", "code") if tag in ("script", "style") else None

    def handle_endtag(self, tag):
        self._script = None

    def handle_data(self, data):
        if self._script == "figures":
            self.drawn = json.loads(data)
        elif self._script is None:
            self.sections[self._at].append(data)

    def text(self, section: str) -> str:
        return " ".join(self.sections[section])


def test_the_page_shows_what_the_files_hold(runs):
    folder, pruned, int8, found = runs
    results = [folder / f"{name}.json" for name in found]
    made = tilepress.report([pruned, *results], folder / "report.html")
    page = Page((folder / "report.html").read_text())
    assert page.loads == [] and sorted(page.figures) == sorted(page.drawn) and len(page.figures) >= 6
    for figure in page.drawn.values():
        go.Figure(figure)  # plotly's validator: raises for a wrong key or value
    sizes = {path: sum(t["bytes"] for t in read_manifest(path)["tensors"]) for path in (pruned, int8)}
    for result in (found["pruned"], found["int8"]):
        assert f"{result['perplexity']:.4f}" in page.text("quality")
        assert f"{result['kl_divergence']['mean']:.4f}" in page.text("quality")
        assert f"{result['top1_agreement']:.1%}" in page.text("")
    assert all(f"{size / 1e6:.2f} MB" in page.text("size-and-memory") for size in sizes.values())
    assert "noise floor: base in float32" in page.text("quality") and "wanda" in page.text("recipe-and-commands")
    assert "1.50" in page.text("speed") and "does not fit" in page.text("speed") and "4,000 GB/s" in page.text("speed")
    assert "0.4700 ± 0.0700" in page.text("tasks") and "91.5 ± 4.0 %" in page.text("tasks")
    assert PROMPT in page.text("side-by-side") and int8.name in page.text("")
    assert read_manifest(pruned)["versions"]["torch"] in page.text("versions-that-made-it")
    assert json.loads(json.dumps(made.to_json()))["artifacts"][0]["name"] == "pruned"


def test_drawings_have_the_manifests_figures(runs):
    _, pruned, _, found = runs
    drawn = figures.figures(gather([pruned, found["pruned"], found["int8"]]))
    _, errors = drawn["output-error-0"]
    (trace,) = errors["data"]
    records = {item["name"]: item["output_error"] for item in read_manifest(pruned)["calibration"]["pruned"]}
    assert len(records) == sum(value is not None for row in trace["z"] for value in row) == 28
    for name, error in records.items():
        row = trace["z"][trace["y"].index(name.split(".", 3)[3].removesuffix(".weight"))]
        assert row[int(name.split(".")[2])] == pytest.approx(error)
    _, cache = drawn["cache-0"]
    told = read_manifest(pruned)["kv_cache"]["report"]
    assert [bar["name"] for bar in cache["data"]] == ["keys", "values", "outputs of attention"]
    assert list(cache["data"][2]["y"]) == [layer["output_error"] for layer in told]
    _, heads = drawn["cache-error-of-each-KV-head-0"]
    for layer, errors in enumerate(zip(*heads["data"][0]["z"], strict=True)):
        assert math.hypot(*errors) == pytest.approx(told[layer]["output_error"]) and min(errors) > 0
    _, pareto = drawn["pareto"]
    assert sorted(pareto["data"][0]["y"]) == sorted(found[name]["kl_divergence"]["mean"] for name in ("pruned", "int8"))


@pytest.mark.parametrize("recipe", [Prune(0.5, method="wanda"), Quantize()], ids=["prune", "int8"])
def test_experts_are_drawn_with_the_tokens_that_they_saw(recipe, checkpoint_of, tmp_path):
    """Each token goes to two of a layer's four experts, as their router says when the dense model runs; a router behind pruned weights says
    something else for some."""
    source, text = checkpoint_of("mixtral"), few_words(4, 64)
    model = tilepress.load(source, device="cpu", dtype=torch.float32)
    counts = torch.zeros(len(model.model.layers), 4, dtype=torch.long)

    def count(layer: int, output: tuple) -> None:
        counts[layer] += torch.bincount(output[-1].flatten(), minlength=4)

    for number, layer in enumerate(model.model.layers):
        layer.mlp.gate.register_forward_hook(lambda module, args, output, number=number: count(number, output))
    for window in text.windows(byte_tokenizer())[:4]:
        model(torch.tensor([window]))
    tilepress.compress(source, tmp_path / "out", recipe, dataset=text, device="cpu")
    found = gather([tmp_path / "out"])
    _, drawn = figures.figures(found)["expert-coverage-0"]
    seen = torch.tensor(drawn["data"][0]["z"]).T
    assert seen.sum(1).tolist() == counts.sum(1).tolist() and (torch.equal(seen, counts) or isinstance(recipe, Prune))
    few = int((seen < 128).sum())
    told = f"{8 - few} of 8 experts saw 128 tokens of the calibration text or more; {int((seen == 0).sum())} saw none"
    assert told in Page(tilepress.report([tmp_path / "out"]).html).text("layer-by-layer")


def test_the_front_has_what_nothing_beats():
    def point(name: str, mb: float, kl: float, text: str = "a") -> dict:
        return {"name": name, "mb": mb, "kl": kl, "text": text}

    told = [point("best", 2, 0.1), point("worse", 3, 0.2), point("small", 1, 0.5), point("same", 2, 0.1)]
    told += [point("elsewhere", 9, 9, "b")]
    assert [one["name"] for one in figures.on_the_front(told)] == ["small", "best", "same", "elsewhere"]


def test_weights_stand_in_their_layer():
    assert place("model.layers.7.mlp.experts.12.up_proj.weight") == (7, "mlp.experts.*.up_proj")
    assert place("transformer.h.0.attn.c_attn.weight") == (0, "attn.c_attn")
    assert place("lm_head.weight") is None


def test_context_that_fits_is_what_is_left_of_a_card(runs, tiny):
    found = gather([tiny]).artifacts[0]
    per_token = 4 * 2 * 2 * 64 * 2  # layers, keys and values, KV heads, their dimension, bytes
    free = 0.95 * 24 * 2**30 - 2 * 2**30 - found.bytes
    assert found.kv_bytes == per_token and found.context(24) == int(free // per_token)
    assert gather([runs[1]]).artifacts[0].kv_bytes < per_token and found.context(2) == 0


@pytest.mark.parametrize("told,positions", [(4096, 4096), ("x", None), ([1], None), (-5, None), (True, None)])
def test_no_sequence_is_longer_than_the_model_s_positions(tiny, tmp_path, told, positions):
    shutil.copytree(tiny, tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": told}))
    found = gather([tmp_path / "m"]).artifacts[0]
    fits, page = found.context(24), tilepress.report([tmp_path / "m"]).html
    assert found.positions == positions and fits > 10 * 4096
    cut = f"{fits // 4096:,} x 4,096"
    assert (cut in page, f">{fits:,}<" in page) == ((True, False) if positions else (False, True))
    short = replace(found, bytes=int(0.95 * 24 * 2**30) - 2 * 2**30 - 100 * found.kv_bytes)
    assert page_module._context(short, 24) == "100"


def test_a_divergence_near_the_floor_is_called_so(runs):
    _, _, int8, found = runs
    near = json.loads(json.dumps(found["int8"]))
    near["noise_floor"]["kl_divergence"]["mean"] = near["kl_divergence"]["mean"] / 2
    assert "not to be told from rounding" in Page(tilepress.report([near]).html).text("")
    assert "times that of rounding" in Page(tilepress.report([found["int8"]]).html).text("")
    assert "Its cost was not measured" in Page(tilepress.report([int8]).html).text("")


def test_what_is_no_result_is_refused(tiny, runs, tmp_path, cli, monkeypatch):
    _, pruned, _, found = runs
    (tmp_path / "other.json").write_text('{"rows": []}')
    (tmp_path / "broken.json").write_text('{"rows"')
    (tmp_path / "half.json").write_text('{"perplexity": 1, "protocol": {}, "bits_per_byte": 1}')
    for wrong in ("other.json", "missing.json", "broken.json", "half.json", ""):
        ran = cli("report", tmp_path / wrong, "-o", tmp_path / "page.html")
        assert ran.code in (1, 2) and ran.err.count("\n") == 2 and "error: " in ran.err, ran.err
    assert not (tmp_path / "page.html").exists()
    with pytest.raises(UsageError, match="nothing to report"):
        tilepress.report([])
    gone = tilepress.report([found["pruned"] | {"model": str(tmp_path / "gone")}])
    assert gone.found.artifacts == ()
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    ran = cli("report", pruned)
    assert ran.code == 2 and "'./tilepress[report]'" in ran.err and ran.err.count("\n") == 2


def test_commands_write_the_page_of_what_they_did(tiny, text, tmp_path, cli):
    out, page = tmp_path / "pruned", tmp_path / "page.html"
    made = cli("compress", "prune", tiny, "-o", out, "--sparsity", "0.5", "--report", page)
    assert made.code == 0 and f"wrote {page}" in made.err
    assert "50.0%" in Page(page.read_text()).text("size-and-memory")
    words = ("eval", "perplexity", out, "--base", tiny, "--dataset", text, "--seqlen", 64, "--limit", 2)
    ran = cli(*words, "--device", "cpu", "-o", tmp_path / "ppl.json", "--report", page)
    told = json.loads((tmp_path / "ppl.json").read_text())
    assert ran.code == 0 and f"{told['perplexity']:.4f}" in Page(page.read_text()).text("quality")
    again = cli("report", out, tmp_path / "ppl.json", "-o", page, "--title", "Half of <it>")
    assert again.code == 0 and "Half of <it>" in Page(page.read_text()).text("") and "perplexity" in again.out


def test_heads_and_experts_of_a_map_are_in_order():
    cells = [{"layer": layer, "projection": f"head {head}", "value": 0.1} for layer, head in ((0, 10), (0, 2), (1, 1))]
    (trace,) = figures.heat_map(cells, "x")["data"]
    assert trace["y"] == ["head 1", "head 2", "head 10"]


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
LOOK = """
<iframe id="page" src="report.html" style="border:0;width:WIDTHpx;height:9000px"></iframe><pre id="seen"></pre><script>
const page = document.getElementById('page'), errors = [];
page.contentWindow.addEventListener('error', event => errors.push(String(event.message)));
page.onload = () => setTimeout(() => {
  const d = page.contentDocument, drawings = [...d.querySelectorAll('.figure')];
  const room = d.documentElement.clientWidth;
  document.getElementById('seen').textContent = JSON.stringify({
    errors, room, width: d.documentElement.scrollWidth, loaded: page.contentWindow.performance.getEntriesByType('resource').map(e => e.name),
    drawn: drawings.filter(f => f.querySelector('.scatterlayer path, .barlayer path, .heatmaplayer image')).length, asked: drawings.length,
    beyond: drawings.filter(f => f.querySelector('svg').getBoundingClientRect().right > room + 1).map(f => f.id),
    small: [...d.querySelectorAll('p, td, th')].filter(e => parseFloat(getComputedStyle(e).fontSize) < 11).length,
  });
}, 3000);
</script>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_shows_it(runs, width, tmp_path):
    _, pruned, _, found = runs
    tilepress.report([pruned, *found.values()], tmp_path / "report.html")
    (tmp_path / "look.html").write_text(LOOK.replace("WIDTH", str(width)))
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--enable-logging=stderr"]
    words += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,1000", "--virtual-time-budget=20000"]
    ran = subprocess.run(
        [CHROMIUM, *words, "--dump-dom", f"file://{tmp_path / 'look.html'}"],
        capture_output=True,
        text=True,
        timeout=180,
    )
    seen = re.search(r'<pre id="seen">(.+?)</pre>', ran.stdout, re.S)
    assert seen, ran.stderr[-2000:]
    seen = json.loads(seen[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))
    assert seen["errors"] == [] and seen["loaded"] == [] and ":CONSOLE" not in ran.stderr, ran.stderr[-2000:]
    assert seen["drawn"] == seen["asked"] >= 6 and seen["beyond"] == []
    assert seen["room"] <= width and seen["width"] <= seen["room"] and seen["small"] == 0

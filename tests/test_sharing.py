"""Model cards with figures, and artifacts that go to a hub: here a server of a few lines that keeps what it is sent."""

import ast
import base64
import json
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub.constants
import pytest
import yaml
from support.artifacts import few_words

import tilepress
from tilepress import TilepressError, UsageError
from tilepress.formats import installing
from tilepress.formats.checkpoint import read_manifest

PERPLEXITY = {
    "perplexity": 12.5,
    "perplexity_stderr": 0.25,
    "windows": 7,
    "protocol": {"dataset": "/home/me/held-out.jsonl", "seqlen": 64, "recipe": "gptq", "dtype": "bfloat16"},
    "base": {"perplexity": 11.0, "perplexity_stderr": 0.2},
    "kl_divergence": {"mean": 0.125, "stderr": 0.01},
    "top1_agreement": 0.875,
}
TASKS = {
    "results": {"hellaswag": {"items": 100, "acc_norm": 0.42, "acc_norm_stderr": 0.02, "base": {"acc_norm": 0.45}}}
}
SPEED = {
    "env": {"card": "H200"},
    "rows": [
        {"asked": 1, "batch": 1, "context": 64, "fits": True, "is_base": True, "tokens_per_s": 50.0},
        {"asked": 1, "batch": 1, "context": 64, "fits": True, "is_base": False, "tokens_per_s": 75.5},
        {"asked": 9, "batch": 9, "context": 64, "fits": False, "is_base": False},
    ],
}


@pytest.fixture
def mine(artifact, tmp_path):
    """A copy of an artifact whose source had a licence, whatever else stands in its card."""
    folder = tmp_path / "mine"
    shutil.copytree(artifact, folder)
    (folder / "SOURCE_README.md").write_text("---\nlicense: apache-2.0\ntags: [x]\n---\n# Source\n")
    return folder


def test_a_card_has_the_figures_and_the_artifact_stays_sound(mine):
    for result in (PERPLEXITY, TASKS, SPEED):
        assert tilepress.write_card(mine, result) == mine / "README.md"
    text = (mine / "README.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    assert [
        "perplexity",
        "held-out.jsonl, 7 windows of 64 tokens, recipe gptq, bfloat16",
        "12.5000 ± 0.2500",
        "11.0000 ± 0.2000",
    ] in rows
    assert ["hellaswag acc_norm", "100 items", "0.4200 ± 0.0200", "0.4500"] in rows
    assert ["tokens/s", "H200, batch 1, context 64", "75.5", "50.0"] in rows and "/home/me" not in text
    card = huggingface_hub.ModelCard(text)  # the hub's own reader
    assert card.data.license == "apache-2.0" and card.data.library_name == "transformers"
    told = {(e.dataset_name, e.metric_type): e.metric_value for e in card.data.eval_results}
    assert told[("held-out.jsonl", "perplexity")] == 12.5 and told[("hellaswag", "acc_norm")] == 0.42
    assert tilepress.verify(mine, reload=False).passed


@pytest.mark.parametrize("head", ["date: 2001-13-01", "x: [", "a: &a [*a]", "license: [1"], ids=str)
def test_a_source_s_card_that_does_not_say_what_it_should_is_left_out(tiny, tmp_path, head):
    """After all of a run's work, nothing there may end it."""
    shutil.copytree(tiny, tmp_path / "source")
    (tmp_path / "source" / "README.md").write_text(f"---\nlicense: mit\n{head}\n---\n# Source\n")
    tilepress.compress(tmp_path / "source", tmp_path / "out", tilepress.Prune(0.5))
    assert "license" not in huggingface_hub.ModelCard.load(tmp_path / "out" / "README.md").data.to_dict()


@pytest.mark.parametrize(
    "family,recipes,vllm",
    [
        ("llama", [tilepress.Quantize(), tilepress.KVCache()], "pip install vllm\nvllm serve DIR"),
        ("llama", [tilepress.Quantize(activations="tensor-dynamic")], "no kernel for this kind of INT8"),
        ("llama", [tilepress.Prune(0.5)], f"{installing('vllm')}\nvllm serve DIR"),
        ("llama", [tilepress.Prune(0.5, format="dense")], "pip install vllm\nvllm serve DIR"),
        ("mixtral", [tilepress.Prune(0.5)], "nothing for packed experts"),
        ("gpt2", [tilepress.Quantize()], "no kernel for this kind of INT8"),
    ],
)
def test_a_run_writes_how_its_result_is_loaded(family, recipes, vllm, checkpoint_of, tmp_path):
    """It is loaded by tilepress, transformers and vLLM; licence and languages are those of the source's card, the base that of the first step."""
    source = tmp_path / "source"
    shutil.copytree(checkpoint_of(family), source)
    (source / "README.md").write_text("---\nlicense: mit\nlanguage: [en]\ntags: [x]\n---\n# Source\n")
    words = None if isinstance(recipes[0], tilepress.Prune) else few_words(4, 64)
    tilepress.compress(source, tmp_path / "out", recipes, dataset=words, device="cpu")
    text = (tmp_path / "out" / "README.md").read_text()
    card = huggingface_hub.ModelCard(text)
    assert (card.data.license, card.data.language, card.data.pipeline_tag) == ("mit", ["en"], "text-generation")
    assert "# source, compressed" in text and "x" not in card.data.tags and vllm in text
    snippets = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    assert len(snippets) == 2 and all(ast.parse(snippet) for snippet in snippets)
    scope, here = {}, str(tmp_path / "out")
    exec(snippets[0].replace("DIR", here).replace('"cuda"', '"cpu"').replace("=100", "=3"), scope)
    assert scope["tokens"].shape[1] > 1
    assert ("its plain 16-bit cache serves" in text) == (len(recipes) == 2)


def test_what_is_measured_again_is_the_new_figure(mine):
    tilepress.write_card(mine, PERPLEXITY)
    first = (mine / "README.md").read_text()
    tilepress.write_card(mine, PERPLEXITY)
    assert (mine / "README.md").read_text() == first
    tilepress.write_card(mine, PERPLEXITY | {"perplexity": 13.5})
    text = (mine / "README.md").read_text()
    assert "13.5000" in text and "12.5000" not in text and text.count("## Measured") == 1
    (results,) = [one["results"] for one in yaml.safe_load(text.split("---\n")[1])["model-index"]]
    assert [each["metrics"][0]["value"] for each in results if each["metrics"][0]["type"] == "perplexity"] == [13.5]


def test_cards_that_cannot_be_written(tiny, mine, cli):
    with pytest.raises(UsageError, match="no finished artifact"):
        tilepress.write_card(tiny, PERPLEXITY)
    with pytest.raises(TilepressError, match="does not say what it should"):
        tilepress.write_card(mine, {"perplexity": 1.0})
    ran = cli("eval", "perplexity", tiny, "--write-card")
    assert ran.code == 2 and "--write-card" in ran.err and ran.err.count("\n") == 2
    (mine / "README.md").write_text("no front matter")
    with pytest.raises(TilepressError, match="not as a run writes it"):
        tilepress.write_card(mine, PERPLEXITY)


def test_eval_writes_the_card(mine, tiny, text, cli):
    words = ("--dataset", text, "--seqlen", 64, "--limit", 2, "--device", "cpu", "--write-card", "--json")
    ran = cli("eval", "perplexity", mine, "--base", tiny, *words)
    assert ran.code == 0 and f"{ran.json['perplexity']:.4f}" in (mine / "README.md").read_text()


class Hub(BaseHTTPRequestHandler):
    """The parts of the hub that an upload speaks with. It takes every file within the commit: storage of large ones is huggingface_hub's affair."""

    def do_POST(self):
        sent = self._body()
        if self.path == "/api/repos/create":
            self.server.created = json.loads(sent)
            self._answer({"url": f"{self.server.url}/me/small", "name": "me/small"})
        elif self.path == "/api/validate-yaml":  # of the model card
            yaml.safe_load(json.loads(sent)["content"].split("---\n")[1])
            self._answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = [{"path": f["path"], "uploadMode": "regular"} for f in json.loads(sent)["files"]]
            self._answer({"files": [f | {"shouldIgnore": False, "oid": None} for f in files]})
        elif "/commit/" in self.path:
            for line in map(json.loads, sent.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.server.files[value["path"]] = base64.b64decode(value["content"])
            self._answer({"commitUrl": f"{self.server.url}/me/small/commit/1", "commitOid": "1", "success": True})
        else:
            self._answer({"error": self.path}, 404)

    def do_GET(self):
        self._answer({"id": "me/small", "siblings": [], "sha": "0"})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, found: dict, code: int = 200) -> None:
        body = json.dumps(found).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words) -> None:
        pass


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.url, server.files, server.created = f"http://127.0.0.1:{server.server_port}", {}, None
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", "hf_made_up")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_what_goes_to_the_hub_is_what_the_manifest_lists(mine, hub, cli):
    manifest = read_manifest(mine)
    (mine / "SOURCE_README.md").unlink()
    (mine / "notes.txt").write_text("of mine alone")
    planned = cli("push", mine, "me/small", "--dry-run")
    assert planned.code == 0 and "nothing was sent" in planned.out and "notes.txt" not in planned.out
    assert hub.created is None and hub.files == {}
    told = cli("push", mine, "me/small", "--private", "--json").json
    names = {file["name"] for file in manifest["files"]} | {"tilepress.json"}
    assert set(hub.files) == set(told["files"]) == names and hub.created["visibility"] == "private"
    assert all(content == (mine / name).read_bytes() for name, content in hub.files.items())
    assert told["url"].endswith("/commit/1") and told["bytes"] == sum(map(len, hub.files.values()))


def test_what_does_not_go_to_the_hub(mine, tiny, hub, cli, monkeypatch):
    shard = next(mine.glob("*.safetensors"))
    broken = bytearray(shard.read_bytes())
    broken[-1] ^= 1
    shard.write_bytes(broken)
    for words, message in (
        ((mine, "me/small"), "does not verify"),
        ((tiny, "me/small"), "no finished artifact"),
        ((mine, "a/b/c"), "no name of a repository"),
    ):
        ran = cli("push", *words, "-q")
        assert ran.code in (1, 2) and message in ran.err and ran.err.count("\n") == 2 and hub.files == {}, ran.err


def test_a_hub_that_refuses_is_told(mine, hub, cli, monkeypatch):
    (mine / "SOURCE_README.md").unlink()
    monkeypatch.setattr(Hub, "do_POST", lambda self: (self._body(), self._answer({"error": "no"}, 403)))
    ran = cli("push", mine, "me/small", "-q")
    assert ran.code == 1 and "the hub did not take me/small" in ran.err and ran.err.count("\n") == 2

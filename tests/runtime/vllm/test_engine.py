"""Artifacts in vLLM's own engine, against transformers' forward pass over the same weights. `make test-vllm` runs these."""

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import torch
from safetensors.torch import save_file
from support.artifacts import prune, quantize
from support.engines import CARD, DTYPE, PROMPTS, TOLERANCE, assert_as, engine, generate, model_of
from torch.fx.experimental.proxy_tensor import make_fx

import tilepress
from tilepress.formats import UsageError
from tilepress.kernels.arch import Path

LAYOUTS = {
    "tiled-bitmap": {"format": "tiled-bitmap"},
    "tiled-csl": {"format": "tiled-csl"},
    "int8-values": {"format": "tiled-bitmap", "value_dtype": "int8"},
    "auto": {},
}


@pytest.mark.parametrize(
    "family,layout",
    [
        ("llama", "tiled-bitmap"),
        ("llama", "tiled-csl"),
        ("llama", "int8-values"),
        ("qwen2", "auto"),
        ("qwen3", "tiled-bitmap"),
        ("opt", "tiled-csl"),
        ("gemma3", "tiled-bitmap"),
        ("phi3", "tiled-csl"),
        ("gpt2-64", "tiled-bitmap"),
    ],
)
def test_families_and_layouts(checkpoint_of, tmp_path, family, layout):
    sizes = {"head_dim": 32} if family in ("qwen3", "gemma3") else {}
    prune(checkpoint_of(family, **sizes), tmp_path / "out", 0.6, **LAYOUTS[layout])
    llm = engine(tmp_path / "out")
    assert_as(tilepress.load(tmp_path / "out", dtype="float32"), PROMPTS, generate(llm, PROMPTS))
    layers = [module for module in model_of(llm).modules() if hasattr(module, "quant_method")]
    kinds = {type(layer.packed).__name__ for layer in layers if hasattr(layer, "packed")}
    assert kinds and kinds <= {"TiledBitmapLinear", "TiledCSLLinear", "_Separate"}


def test_what_was_left_dense_is_run_by_vllm(checkpoint_of, tmp_path):
    prune(checkpoint_of("llama"), tmp_path / "out", 0.6, ignore=("*.k_proj", "*.o_proj", "lm_head"))
    llm = engine(tmp_path / "out")
    assert_as(tilepress.load(tmp_path / "out", dtype="float32"), PROMPTS, generate(llm, PROMPTS))
    methods = {
        name: type(m.quant_method).__name__ for name, m in model_of(llm).named_modules() if hasattr(m, "quant_method")
    }
    assert methods["model.layers.0.self_attn.o_proj"] == "UnquantizedLinearMethod"
    assert (
        methods["model.layers.0.self_attn.qkv_proj"]
        == methods["model.layers.0.mlp.down_proj"]
        == "TilepressLinearMethod"
    )


@pytest.fixture(scope="module")
def llama(checkpoint_of, tmp_path_factory):
    path = tmp_path_factory.mktemp("vllm") / "llama"
    prune(checkpoint_of("llama"), path, 0.6)
    return path


def test_scheduling_changes_nothing(llama):
    """Batches that grow and shrink, a prefix that is shared, prompts in chunks, several samples of one prompt."""
    llm = engine(
        llama, enable_prefix_caching=True, max_num_batched_tokens=24, enable_chunked_prefill=True, block_size=32
    )
    model, shared = tilepress.load(llama, dtype="float32"), PROMPTS[2][:64]
    prompts = [*PROMPTS, [*shared, 9], [*shared, 8, 7], shared]
    for _ in range(2):  # the second time prefixes are cached
        assert_as(model, prompts, generate(llm, prompts))
    twice = generate(llm, PROMPTS[:1], n=2, temperature=1.0, seed=1)
    assert len(twice) == 2
    assert_as(model, PROMPTS[:1] * 2, twice, greedy=False)


def test_an_adapter_over_a_sparse_base(llama, tmp_path):
    from vllm.lora.request import LoRARequest

    model, rank, tensors = tilepress.load(llama, dtype="float32"), 4, {}
    torch.manual_seed(1)
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "v_proj", "down_proj")):
            down = 0.1 * torch.randn(rank, module.in_features)
            up = 0.1 * torch.randn(module.out_features, rank)
            key = f"base_model.model.{name}"
            tensors |= {f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up}
            module.register_forward_hook(lambda _, x, y, down=down, up=up: y + 2 * (x[0] @ down.T @ up.T))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "task_type": "CAUSAL_LM"}
    targets = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | targets))
    llm = engine(llama, enable_lora=True, max_lora_rank=8)
    assert_as(tilepress.load(llama, dtype="float32"), PROMPTS, generate(llm, PROMPTS))
    assert_as(model, PROMPTS, generate(llm, PROMPTS, lora=LoRARequest("ours", 1, str(tmp_path))))


@pytest.mark.skipif(CARD and torch.cuda.device_count() < 2, reason="one card")
def test_two_ranks(checkpoint_of, tmp_path, monkeypatch):
    """A part of a layer begins and ends where tiles do not."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    prune(checkpoint_of("qwen2"), tmp_path / "out", 0.6)
    llm = engine(tmp_path / "out", tensor_parallel_size=2, distributed_executor_backend="mp")
    assert_as(tilepress.load(tmp_path / "out", dtype="float32"), PROMPTS, generate(llm, PROMPTS))


def test_compiled(llama):
    """One graph for all sizes of a batch: torch.compile breaks nowhere in it, and does not compile again."""
    from torch._dynamo.utils import counters

    counters.clear()
    llm = engine(llama, enforce_eager=False)
    model, made = tilepress.load(llama, dtype="float32"), counters["stats"]["unique_graphs"]
    batches = PROMPTS, PROMPTS[:1], PROMPTS * 2
    for prompts in batches:
        generate(llm, prompts, logprobs=None)  # those are compiled by vLLM, too
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == made <= 1  # 0: from vLLM's own cache
    for prompts in batches:
        assert_as(model, prompts, generate(llm, prompts))


def test_a_layer_is_one_op(llama):
    """Nothing stands around it: no copy, no view, no sum with a bias."""
    from tilepress.runtime.linear.sparse import SparseLinear

    layers = [m for m in model_of(engine(llama)).modules() if type(m).__name__.endswith("ParallelLinear")]
    packed = [layer for layer in layers if isinstance(getattr(layer, "packed", None), SparseLinear)]
    assert packed  # but where tiles of projections do not meet
    for layer in packed:
        x, bias = torch.randn(3, layer.packed.in_features), torch.randn(layer.packed.out_features)
        for given in (None, bias):
            assert re.fullmatch(r"tilepress\.tiled_(csl|bitmap)_spmm\.default", " ".join(_ops_of(layer, given, x)))


def _ops_of(layer, bias: torch.Tensor | None, x: torch.Tensor) -> list[str]:
    graph = make_fx(lambda x: layer.quant_method.apply(layer, x, bias))(x).graph
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def test_loading_holds_no_more_than_a_shard(checkpoint_of, tmp_path, monkeypatch):
    """Stored tensors that wait for others of their layer, in bytes; what is put together is let go of."""
    from tilepress.runtime.vllm.linear import TilepressLinearMethod

    prune(checkpoint_of("llama"), tmp_path / "out", 0.6)
    shards = [file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors")]
    assert len(shards) > 3
    take, layers, held = TilepressLinearMethod._take, set(), []

    def counted(self, layer, *args, **kwargs) -> None:
        take(self, layer, *args, **kwargs)
        layers.add(layer)
        waiting = [layer.arriving for layer in layers if layer.arriving is not None]
        tensors = [t for each in waiting for parts in each.tensors.values() for t in parts.values()]
        held.append(sum(t.nbytes for t in tensors))

    monkeypatch.setattr(TilepressLinearMethod, "_take", counted)
    engine(tmp_path / "out")
    assert held[-1] == 0 and max(held) <= 2 * max(shards)  # of a layer whose tensors stand in two


def _without_kernels(monkeypatch) -> list[str]:
    """Have layers say that a card has no kernel for them. Returns what is logged."""
    from tilepress.runtime.linear import sparse
    from tilepress.runtime.vllm import linear

    said, why = [], Path("tiled_bitmap_spmm", "cuda", "cuda-core is not installed or too old")
    for kind in (sparse.TiledBitmapLinear, sparse.TiledCSLLinear):
        monkeypatch.setattr(kind, "path_for", lambda self, dtype, n=1: why)
    monkeypatch.setattr(linear._log, "warning_once", lambda text, *words: said.append(text % words))
    return said


def test_without_a_kernel_weights_are_decoded(llama, monkeypatch):
    said = _without_kernels(monkeypatch)
    llm = engine(llama)
    layers = [m for m in model_of(llm).modules() if type(m).__name__.endswith("ParallelLinear")]
    assert {type(layer.quant_method).__name__ for layer in layers} == {"UnquantizedLinearMethod"}
    assert set(said) == {
        "No kernel multiplies packed weights here: cuda-core is not installed or too old. "
        "They are decoded, and take the memory of dense ones."
    }
    monkeypatch.undo()
    assert_as(tilepress.load(llama, dtype="float32"), PROMPTS, generate(llm, PROMPTS))


def test_without_a_kernel_and_memory_they_are_refused(llama, monkeypatch):
    from tilepress.runtime.linear import sparse

    _without_kernels(monkeypatch)
    for kind in (sparse.TiledBitmapLinear, sparse.TiledCSLLinear):
        monkeypatch.setattr(kind, "dense", lambda self: (_ for _ in ()).throw(torch.OutOfMemoryError()))
    with pytest.raises(UsageError, match="no kernel multiplies model.layers.0.* and there is no memory to decode it"):
        engine(llama)


SOME = ("lm_head", "*.0.mlp.down_proj", "*.0.self_attn.[qkv]_proj", "*.1.self_attn.o_proj")  # stay in 16 bits


@pytest.mark.parametrize(
    "activations,ignore", [("token", ("lm_head",)), ("token", SOME), ("tensor", ("lm_head",)), ("tensor-asym", SOME)]
)
def test_int8_needs_no_plug_in(checkpoint_of, tmp_path, activations, ignore, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "")
    from support.artifacts import few_words

    text = None if activations == "token" else few_words(4, 64)
    quantize(checkpoint_of("llama"), tmp_path / "out", text=text, activations=activations, ignore=ignore)
    llm = engine(tmp_path / "out", dtype="bfloat16")
    assert_as(
        tilepress.load(tmp_path / "out", dtype=torch.float32), PROMPTS, generate(llm, PROMPTS), 0.1
    )  # bfloat16 against float32


def test_int8_weights_alone_are_taken_by_vllms_reader(checkpoint_of, tmp_path):
    """Its CPU build has no kernel for 8 bits, so its own reader says which scheme serves the layers, on a card."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    quantize(checkpoint_of("llama"), tmp_path / "out", activations="none")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    read = CompressedTensorsConfig.from_config(config)
    (target,) = read.target_scheme_map.values()
    scheme = read._get_scheme_from_parts(target["weights"], target["input_activations"], format=target["format"])
    assert type(scheme).__name__ == "CompressedTensorsWNA16"
    assert (scheme.pack_factor, scheme.strategy, scheme.group_size, scheme.symmetric) == (4, "channel", -1, True)


def test_serve_answers_a_request(llama):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["-m", "vllm.entrypoints.openai.api_server"]  # what `vllm serve` starts
    words += ["--model", str(llama), "--port", str(port), "--host", "127.0.0.1", "--enforce-eager"]
    words += ["--dtype", DTYPE, "--max-model-len", "128"]
    server = subprocess.Popen([sys.executable, *words], start_new_session=True)
    try:
        asked = {"model": str(llama), "prompt": PROMPTS[1], "max_tokens": 4, "temperature": 0, "logprobs": 1}
        asked |= {"ignore_eos": True, "return_tokens_as_token_ids": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        answer = _when_ready(request, server)
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)
    told = answer["choices"][0]["logprobs"]
    tokens = [int(re.fullmatch(r"token_id:(\d+)", token).group(1)) for token in told["tokens"]]
    expected = tilepress.load(llama, dtype="float32")(torch.tensor([PROMPTS[1] + tokens])).logits[0].log_softmax(-1)
    for i, (token, value) in enumerate(zip(tokens, told["token_logprobs"], strict=True)):
        assert math.isclose(expected[len(PROMPTS[1]) - 1 + i, token].item(), value, abs_tol=TOLERANCE)


def _when_ready(request, server) -> dict:
    ends = time.monotonic() + 400
    while time.monotonic() < ends and server.poll() is None:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.URLError:
            time.sleep(1)
    raise AssertionError(f"the server did not answer (exit code {server.poll()})")


def test_codes_are_not_taken_for_numbers():
    from tilepress.runtime.vllm.linear import _Arriving

    arriving = _Arriving("up_proj", torch.device("cpu"), torch.float32, [4], [(0, 4)], None, 8)
    arriving.tensors[None] = {"weight": torch.ones(4, 8, dtype=torch.int8), "weight_scale": torch.ones(4, 1)}
    with pytest.raises(UsageError, match="up_proj is INT8 in an artifact with sparse layers"):
        arriving.parts()


def test_another_method_is_refused(llama):
    with pytest.raises(Exception, match=r"(?s)tilepress.* does not match .*fp8"):
        engine(llama, quantization="fp8")


def test_an_adapter_for_a_layer_that_cannot_have_one_is_refused(llama, tmp_path):
    from vllm.lora.request import LoRARequest

    key = "base_model.model.model.layers.0.input_layernorm"
    save_file(
        {f"{key}.lora_A.weight": torch.ones(4, 64), f"{key}.lora_B.weight": torch.ones(64, 4)},
        tmp_path / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "task_type": "CAUSAL_LM"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["input_layernorm"]}))
    llm = engine(llama, enable_lora=True, max_lora_rank=8)
    with pytest.raises(Exception, match="input_layernorm"):
        generate(llm, PROMPTS, lora=LoRARequest("theirs", 1, str(tmp_path)))


def test_what_the_plug_in_does_not_serve_is_said(checkpoint_of, tmp_path, llama):
    newer = tmp_path / "newer"
    newer.mkdir()
    for file in llama.iterdir():
        (newer / file.name).symlink_to(file)
    config = json.loads((llama / "config.json").read_text())
    config["quantization_config"]["format_version"] = 99
    (newer / "config.json").unlink()
    (newer / "config.json").write_text(json.dumps(config))
    with pytest.raises(Exception, match="format version 99"):
        engine(newer)
    prune(checkpoint_of("mixtral"), tmp_path / "experts", 0.6)
    with pytest.raises(UsageError, match="experts are packed"):
        engine(tmp_path / "experts")

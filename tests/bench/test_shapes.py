"""Random models of a shape: what they are made of by independent counts, artifacts against the dense model, the command; on a card, kernels alone."""

import json
import weakref

import pytest
import torch
from support.decoding import decoded
from support.ranks import torchrun
from torch import nn

from tilepress.bench import shapes
from tilepress.bench.shapes import DENSE, SHAPES, Artifact, config_of, protocols, random_model
from tilepress.bench.speed import Protocol, Subject, compare, stored_bytes
from tilepress.formats import UsageError, int8
from tilepress.formats.layout import layout_of
from tilepress.runtime.linear.cut import Trimmed
from tilepress.runtime.linear.int8 import Int8Linear
from tilepress.runtime.linear.sparse import SparseLinear
from tilepress.runtime.parallel.group import RowParallel, VocabularyParallel


def opt_parameters(hidden: int, layers: int) -> int:
    """Embeddings of tokens and positions, twelve squares with their biases and two norms a layer, the last norm."""
    return (50272 + 2050) * hidden + layers * (12 * hidden**2 + 9 * hidden + 4 * hidden) + 2 * hidden


PARAMETERS = {
    "llama-3-8b": 8_030_261_248,  # as published with the models
    "llama-2-70b": 68_976_648_192,
    "opt-30b": opt_parameters(7168, 48),
    "opt-66b": opt_parameters(9216, 64),
}
FAST = {"new_tokens": 2, "runs": 1, "chunk": 8}


def made(shape: str, recipe: str, device: str = "cpu", **changes) -> nn.Module:
    return random_model(config_of(shape), Artifact.parse(recipe), device, **changes)[0]


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: m for name, m in model.named_modules() if type(m) is nn.Linear and "lm_head" not in name}


@pytest.mark.parametrize("shape", PARAMETERS)
def test_shapes_have_as_many_parameters_as_the_models(shape):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(shape))
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[shape]


def test_positions_grow_where_a_model_has_embeddings_for_them():
    assert config_of("opt-tiny", 4000).max_position_embeddings == 4000
    assert config_of("opt-tiny").max_position_embeddings == 2048
    result = shapes.run("opt-tiny", [DENSE], protocols([1], [2046], **FAST | {"chunk": 2048}), "cpu")
    assert [row["context"] for row in result["rows"]] == [2046]


@pytest.mark.parametrize("shape", ["llama-tiny", "opt-tiny"])
def test_a_random_model_is_finite_seeded_and_of_its_deviations(shape):
    model, layers = made(shape, DENSE), SHAPES[shape]["num_hidden_layers"]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and not any(p.is_meta for p in model.parameters())
    residual = [m.weight for n, m in linears(model).items() if n.endswith(("o_proj", "down_proj", "out_proj", "fc2"))]
    others = [m.weight for n, m in linears(model).items() if n.endswith(("q_proj", "gate_proj", "fc1"))]
    assert len(residual) == 2 * layers and others
    for weight in residual:
        assert float(weight.float().std()) == pytest.approx(0.02 / (2 * layers) ** 0.5, rel=0.02)
    for weight in others:
        assert float(weight.float().std()) == pytest.approx(0.02, rel=0.02)
    tokens = torch.arange(40).view(2, 20)
    with torch.inference_mode():
        logits = model(tokens).logits
        assert bool(torch.isfinite(logits).all()) and float(logits.float().std()) > 0
        assert torch.equal(made(shape, DENSE)(tokens).logits, logits)
        assert not torch.equal(made(shape, DENSE, seed=1)(tokens).logits, logits)
    tied = SHAPES[shape]["model_type"] == "opt"
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied


def test_sparse_artifacts_hold_the_largest_of_the_same_weights():
    dense = linears(made("llama-tiny", DENSE))
    for recipe, zeros in (("tiled-csl-80", 0.8), ("tiled-bitmap-50", 0.5)):
        packed = {n: m for n, m in made("llama-tiny", recipe).named_modules() if isinstance(m, SparseLinear)}
        assert packed.keys() == dense.keys()
        for name, module in packed.items():
            whole = dense[name].weight
            found = layout_of(module.packed).matrix(module.packed)
            stored = found != 0
            assert int(stored.sum()) == whole.numel() - round(zeros * whole.numel())
            assert torch.equal(found[stored], whole[stored])
            assert float(whole[~stored].abs().max()) <= float(whole[stored].abs().min())


def test_int8_artifacts_are_the_same_weights_rounded():
    dense = linears(made("opt-tiny", DENSE))
    quantized = {n: m for n, m in made("opt-tiny", "w8a16").named_modules() if isinstance(m, Int8Linear)}
    assert quantized.keys() == dense.keys()
    for name, module in quantized.items():
        whole = dense[name].weight.float()
        step = module.weight_scale.float()
        error = (int8.dequantize(module.weight, step) - whole).abs()
        # half a step, and at the ends what the scale lost when it was rounded to bfloat16
        assert bool((error <= 0.5 * step + 127 * step / 256).all()) and float(error.mean()) < 0.3 * float(step.mean())
        assert step.shape == (len(whole), 1)


@pytest.mark.parametrize(
    "name", ["tiled-csl", "tiled-csl-100", "tiled-csl-80+kv5", "w4a16", "dense+", "", "tiled-csl-80+kv4 "]
)
def test_unknown_recipes_are_told(name):
    with pytest.raises(UsageError, match="is unknown"):
        Artifact.parse(name)


def test_contexts_go_with_batches():
    found = protocols([16, 1, "fit"], [8192, 2048, 8192], **FAST)
    assert [(plan.context, plan.batches) for plan in found] == [(8192, (16, "fit")), (2048, (1,))]
    assert [(plan.context, plan.batches) for plan in protocols([4, 2], [9], **FAST)] == [(9, (4, 2))]
    with pytest.raises(UsageError, match="3 contexts for 2 batches"):
        protocols([1, 2], [1, 2, 3], **FAST)


@pytest.mark.parametrize(
    ("shape", "recipes"),
    [("llama-tiny", ["tiled-csl-80+kv4", "w8a8+kv8", DENSE]), ("opt-tiny", ["tiled-bitmap-50", "w8a8+kv4"])],
)
def test_every_artifact_runs_beside_one_base(shape, recipes):
    result = shapes.run(shape, recipes, protocols([2], [6], **FAST), "cpu")
    rows = {row["artifact"]: row for row in result["rows"]}
    assert list(rows) == [build["artifact"] for build in result["builds"]] == [DENSE, *recipes[:2]]
    base = rows[DENSE]
    assert base["is_base"] and "speedup" not in base
    for name in recipes[:2]:
        row, bits = rows[name], Artifact.parse(name).kv_bits
        assert row["model"] == shape and row["fits"] and not row["is_base"] and (row["batch"], row["context"]) == (2, 6)
        assert row["speedup"] == pytest.approx(row["tokens_per_gpu_s"] / base["tokens_per_gpu_s"])
        assert row["weights_gib"] < base["weights_gib"]
        stored = 16 if bits is None else bits + 32 / 64  # a scale and a shift for 64 channels
        assert row["kv_gib"] == pytest.approx(base["kv_gib"] * stored / 16)
    stages = [set(build) - {"artifact", "seconds"} for build in result["builds"]]
    assert stages == [{"draw_s"}, {"draw_s", "prune_s", "pack_s"}, {"draw_s", "quantize_s"}]


def test_a_base_that_does_not_fit_leaves_the_others():
    half_made = []

    def too_large():
        model = nn.Linear(2, 2)
        model.itself = [model]  # as hooks are
        half_made.append(weakref.ref(model))
        raise torch.OutOfMemoryError

    def load():
        assert half_made[0]() is None  # its memory is free again
        return made("llama-tiny", "tiled-csl-80")

    base, other = Subject("dense", too_large), Subject("packed", load)
    plans = [Protocol((1,), 4, **FAST), Protocol((2,), 6, **FAST)]
    rows = compare([other], base, plans, lambda at: None)["rows"]
    assert [(row["model"], row["batch"], row["context"], row["fits"]) for row in rows] == [
        ("dense", 1, 4, False),
        ("dense", 2, 6, False),
        ("packed", 1, 4, True),
        ("packed", 2, 6, True),
    ]
    assert not any("speedup" in row for row in rows)


def test_without_a_base(monkeypatch, cli):
    result = shapes.run("llama-tiny", ["w8a16"], protocols([1], [4], **FAST), "cpu", base=None)
    assert [(row["artifact"], row["is_base"], "speedup" in row) for row in result["rows"]] == [("w8a16", False, False)]
    other = shapes.run("llama-tiny", ["w8a16"], protocols([1], [4], **FAST), "cpu", base="w8a16+kv8")
    assert [row["artifact"] for row in other["rows"]] == ["w8a16+kv8", "w8a16"] and "speedup" in other["rows"][1]

    def too_large(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(shapes, "random_model", too_large)
    words = ["demo", "--shape", "llama-tiny", "--base", "none", "--recipe", "w8a8", "--device", "cpu"]
    told = cli(*words)
    assert told.code == 0 and told.out.count("does not fit") == 2 and "dense" not in told.out


def weight_of(module: nn.Module) -> torch.Tensor:
    """What a layer, or a rank's part of it, multiplies by."""
    if isinstance(module, Trimmed):
        covered = weight_of(module.linears[0])
        return covered[slice(*module.rows), module.beside[0] : covered.shape[1] - module.beside[1]]
    if isinstance(module, RowParallel | VocabularyParallel):
        return weight_of(module.linears[0])
    if isinstance(module, SparseLinear):
        return layout_of(module.packed).matrix(module.packed)
    if isinstance(module, Int8Linear):
        return int8.dequantize(module.weight, module.weight_scale)
    return module.weight


def beside_one(shape: str, group, recipe: str, device: str = "cpu") -> tuple[list[str], float, list[list[int]], float]:
    """A rank's part of a model beside the same in one process: layers with other weights, largest error of logits by both passes, tokens, share of bytes."""
    config, artifact = config_of(shape), Artifact.parse(recipe)
    one = random_model(config, artifact, device)[0]
    ours = random_model(config, artifact, group.device, group=group)[0]
    assert not any(tensor.is_meta for tensor in (*ours.parameters(), *ours.buffers()))
    columns, wrong, compared = ("o_proj", "down_proj", "out_proj", "fc2"), [], 0
    modules = dict(one.named_modules())
    for name, module in ours.named_modules():
        whole = modules.get(name)
        if type(whole) is nn.Linear or isinstance(whole, SparseLinear | Int8Linear):
            expected = weight_of(whole).chunk(2, 1 if name.endswith(columns) else 0)[group.rank]
            compared += 1
            if not torch.equal(weight_of(module), expected):
                wrong.append(name)
    assert compared >= 5  # INT8's merged layers have other names
    share = stored_bytes(ours) / stored_bytes(one)
    prompt = torch.arange(3, 40, device=group.device)[None]
    with torch.inference_mode():
        logits, expected = (model(prompt, use_cache=False).logits.float() for model in (ours, one))
    error = float((logits - expected).abs().max() / expected.abs().max())
    return wrong, error, decoded(ours, [[5, 9, 2], [7] * 30], 6), share


RECIPES = ["dense", "tiled-csl-80", "tiled-bitmap-50+kv4", "w8a16", "w8a8+kv8"]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", ["llama-tiny", "opt-tiny"])
def test_ranks_have_their_parts_of_the_same_model(two, shape, recipe):
    answers = two(beside_one, shape, recipe)
    for wrong, error, tokens, share in answers:
        assert wrong == [] and error < (0.1 if "kv4" in recipe else 0.05) and share < 0.95
        assert tokens == answers[0][2] and [len(each) for each in tokens] == [6, 6]


def with_little_memory(recipe: str, group, shape: str, lacking: int) -> list[tuple]:
    """Rows where a rank has no memory for one recipe's model."""
    make = shapes.random_model

    def random_model(config, artifact, *rest):
        made = make(config, artifact, *rest)
        if artifact.name == recipe and group.rank == lacking:
            raise torch.OutOfMemoryError
        return made

    shapes.random_model = random_model
    try:
        found = shapes.run(shape, ["w8a8+kv4"], protocols([1, 2], [5], **FAST), group.device, group=group)
    finally:
        shapes.random_model = make
    return [(row["artifact"], row["fits"], row["gpus"], "speedup" in row) for row in found["rows"]]


@pytest.mark.parametrize("lacking", [0, 1])
def test_what_one_rank_cannot_hold_is_left_out_by_all(two, lacking):
    packed = ("w8a8+kv4", True, 2, False)
    assert (
        two(with_little_memory, "dense", "llama-tiny", lacking) == [[("dense", False, 2, False)] * 2 + [packed] * 2] * 2
    )


@pytest.mark.thorough
def test_the_command_with_ranks(tmp_path):
    words = ["demo", "--shape", "llama-tiny", "--recipe", "w8a8+kv4", "--context", 5, "--batch", 2]
    ran = torchrun(*words, "--new-tokens", 2, "--runs", 1, "-o", tmp_path / "found.json")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("context 5") == 1
    dense, packed = json.loads((tmp_path / "found.json").read_text())["rows"]
    for row in (dense, packed):
        assert row["gpus"] == 2 and row["tokens_per_gpu_s"] == pytest.approx(row["tokens_per_s"] / 2)
        assert row["paths"]["sums over 2 ranks, gloo"] == 4
    assert packed["speedup"] == pytest.approx(packed["tokens_per_gpu_s"] / dense["tokens_per_gpu_s"])


def test_the_command(cli, tmp_path):
    words = ["demo", "--shape", "llama-tiny", "--recipe", "tiled-csl-80+kv4", "--device", "cpu", "--context", "5,4"]
    words += ["--batch", "2,1", "--new-tokens", 2, "--runs", 1]
    ran = cli(*words, "-o", tmp_path / "deep" / "found.json")
    assert ran.code == 0, ran.err
    assert "context 5" in ran.out and "context 4" in ran.out and "prune" in ran.out and "tiled-csl-80+kv4" in ran.out
    found = json.loads((tmp_path / "deep" / "found.json").read_text())
    assert len(found["rows"]) == 4 and found["protocol"]["cases"][0] == {"batches": [2], "context": 5}
    for wrong, said in (
        (["demo", "--shape", "gpt-5"], "llama-3-8b"),
        (["demo", "--shape", "llama-tiny", "--recipe", "csl"], "tiled-csl-80"),
        (["demo", "--recipe", "w8a8"], "--shape"),
        (["demo", "--base", "none"], "--shape"),
        (["demo", "--shape", "llama-tiny", "--context", "1,2,3"], "one for each"),
    ):
        refused = cli(*wrong, "--device", "cpu")
        assert refused.code == 2 and said in refused.err


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", ["llama-tiny", "opt-tiny"])
def test_two_cards_have_their_parts_of_the_same_model(two_cards, shape, recipe):
    answers = two_cards(beside_one, shape, recipe, "cuda")
    for wrong, error, tokens, share in answers:
        assert wrong == [] and error < (0.1 if "kv4" in recipe else 0.05) and share < 0.95
        assert tokens == answers[0][2]


def timed(shape: str, group, recipes: list[str]) -> list[dict]:
    return shapes.run(shape, recipes, protocols([4], [200], new_tokens=8, runs=2, chunk=64), group.device, group=group)[
        "rows"
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["llama-tiny", "opt-tiny"])
def test_on_two_cards_only_kernels_run(two_cards, shape):
    for rows in two_cards(timed, shape, ["tiled-bitmap-50+kv4", "w8a8+kv4"]):
        assert len(rows) == 3
        for row in rows:
            assert row["fits"] and row["gpus"] == 2 and not any(" reference" in path for path in row["paths"])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["llama-tiny", "opt-tiny"])
def test_on_a_card_only_kernels_run(shape):
    recipes = ["tiled-csl-80+kv4", "tiled-bitmap-50+kv4", "w8a8+kv4", "w8a16"]
    result = shapes.run(shape, recipes, protocols([4, 1], [200, 70], new_tokens=8, runs=2, chunk=64), "cuda")
    assert len(result["rows"]) == 10 and result["env"]["card"]
    for row in result["rows"]:
        assert row["fits"] and row["peak_gib"] > 0 and not any(" reference" in path for path in row["paths"])


@pytest.mark.gpu
def test_on_a_card_a_large_weight_is_compressed_in_no_time():
    config = config_of("llama-3-8b")
    config.num_hidden_layers, config.vocab_size = 2, 512
    for recipe in ("tiled-csl-80", "tiled-bitmap-50", "w8a8"):
        random_model(config, Artifact.parse(recipe), "cuda")
        _, stages = random_model(config, Artifact.parse(recipe), "cuda")
        millions = 2 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336) / 1e6
        took = sum(seconds for name, seconds in stages.seconds.items() if name != "draw")
        assert took / millions < 0.15 / 58.7, (recipe, stages.seconds)

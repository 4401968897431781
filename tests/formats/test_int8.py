"""The INT8 format: golden codes and scales, rules computed independently in numpy, configs that every reader parses, vLLM's rules."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tilepress.formats import TilepressError, int8, patterns
from tilepress.formats.int8 import ACTIVATIONS, Int8Scheme, scheme_of
from tilepress.formats.int8_rules import vllm_findings
from tilepress.models.families import ONE_PRODUCT


def test_golden_codes():
    """The worked example of docs/format.md."""
    weight = torch.tensor([[1.0, -0.5, 0.25, 2.0], [0.0, 0.0, 0.0, 0.0], [-3.0, 0.01, 1.5, 3.0]], dtype=torch.bfloat16)
    scale = int8.weight_scale(weight, "channel", torch.bfloat16)
    assert scale.view(torch.int16).tolist() == [[0x3C81], [0x3F80], [0x3CC2]]
    codes = int8.quantize(weight, scale)
    assert codes.tolist() == [[64, -32, 16, 127], [0, 0, 0, 0], [-127, 0, 63, 127]]
    assert int8.weight_scale(weight, "tensor", torch.float32).tolist() == [np.float32(3) / np.float32(127)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("per", ["channel", "tensor"])
def test_weights_against_numpy(dtype, per):
    weight = (torch.randn(70, 33, generator=torch.Generator().manual_seed(0)) * 0.03).to(dtype)
    weight[5] = 0
    scale = int8.weight_scale(weight, per, dtype)
    w = weight.double().numpy()
    absmax = np.abs(w).max(axis=1, keepdims=True) if per == "channel" else np.abs(w).max().reshape(1)
    expected = torch.from_numpy(absmax / 127).float().to(dtype).double().numpy()
    expected[absmax == 0] = 1
    assert scale.shape == expected.shape and np.array_equal(scale.double().numpy(), expected)
    codes = int8.quantize(weight, scale).numpy()
    assert np.array_equal(codes, np.rint(w.astype(np.float32) / expected.astype(np.float32)).astype(np.int8))
    assert codes.min() >= -127 and np.abs(codes).max() == 127
    assert np.abs(codes * expected - w).max() <= 0.5001 * expected.max()


def test_scales_below_what_float16_holds_stay_usable():
    weight = torch.full((2, 4), 6e-8, dtype=torch.float16)
    scale = int8.weight_scale(weight, "channel", torch.float16)
    assert int8.quantize(weight, scale).unique().tolist() == [1]
    small = torch.rand(4, 64, generator=torch.Generator().manual_seed(0)).half() * 1e-3
    scale = int8.weight_scale(small, "channel", torch.float16)
    codes = int8.quantize(small, scale)
    assert int(codes.max()) >= 126 and bool((small.float() / scale.float() < 127.5).all())  # nothing is clipped


def test_quantize_saturates_and_rounds_half_to_even():
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, 126.5, 127.5, 400.0, -128.5, -400.0, -0.0])
    assert int8.quantize(x, torch.ones(1)).tolist() == [0, 2, 2, 0, 126, 127, 127, -128, -128, 0]
    zero_point = torch.tensor([-3], dtype=torch.int8)
    assert int8.quantize(x[:3], torch.ones(1), zero_point).tolist() == [-2, -2, 0]
    back = int8.dequantize(torch.tensor([-3, 4], dtype=torch.int8), torch.tensor([0.5]), zero_point)
    assert back.tolist() == [0.0, 3.5]


@pytest.mark.parametrize("low,high", [(-1.0, 3.0), (0.5, 2.0), (-2.0, -0.5), (0.0, 0.0), (-1e-9, 7.0)])
def test_asymmetric_range_is_covered_and_zero_is_exact(low, high):
    scale, zero_point = int8.static_scale(low, high, True, torch.float32)
    assert -128 <= int(zero_point) <= 127
    ends = torch.tensor([min(low, 0.0), 0.0, max(high, 0.0)])
    back = int8.dequantize(int8.quantize(ends, scale, zero_point), scale, zero_point)
    assert float(back[1]) == 0.0
    assert float((back - ends).abs().max()) <= 1.01 * float(scale) * (high > low)


def test_dynamic_scales():
    x = torch.tensor([[1.0, -2.0], [0.0, 0.0], [0.25, 0.125]], dtype=torch.bfloat16)
    per_token = int8.dynamic_scale(x, True)
    assert per_token.dtype == torch.float32 and per_token.shape == (3, 1)
    assert per_token[0] == np.float32(2) / np.float32(127.5) and per_token[1] > 0
    assert int8.dynamic_scale(x, False).tolist() == [np.float32(2) / np.float32(127.5)]
    codes = int8.quantize(x, per_token).tolist()
    assert codes[0][0] == 64 and codes[0][1] in (-127, -128) and codes[1:] == [[0, 0], [127, 64]]


@pytest.mark.parametrize("weights", ["channel", "tensor"])
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_config_tells_the_scheme(weights, activations):
    scheme = Int8Scheme(weights, activations)
    config = json.loads(json.dumps(scheme.quantization_config(["lm_head"])))
    assert scheme_of(config) == scheme
    # as llm-compressor writes it
    group = config["config_groups"]["group_0"]
    group |= {"output_activations": None, "format": "int-quantized"}
    for part in ("weights", "input_activations"):
        if part in group:
            group[part] |= {"group_size": None, "actorder": None, "observer": "minmax", "observer_kwargs": {}}
    group.setdefault("input_activations", None)
    config |= {"kv_cache_scheme": None, "sparsity_config": {}, "version": "0.17.0"}
    assert scheme_of(config) == scheme


def _with(path: str, value):
    def change(config):
        *parents, last = path.split(".")
        for key in parents:
            config = config[key]
        config[last] = value

    return change


@pytest.mark.parametrize(
    "change,message",
    [
        (_with("quantization_status", "frozen"), "quantization_status"),
        (_with("format", "pack-quantized"), "format"),
        (_with("config_groups", {}), "one group"),
        (_with("config_groups", []), "one group"),
        (_with("config_groups.group_0.targets", ["re:.*"]), "targets"),
        (_with("config_groups.group_0.weights", None), "weights"),
        (_with("config_groups.group_0.weights.num_bits", 4), "8-bit"),
        (_with("config_groups.group_0.weights.type", "float"), "8-bit"),
        (_with("config_groups.group_0.weights.symmetric", False), "symmetric"),
        (_with("config_groups.group_0.weights.strategy", "group"), "per channel"),
        (_with("config_groups.group_0.input_activations.strategy", "group"), "input_activations"),
        (_with("config_groups.group_0.input_activations.dynamic", False), "input_activations"),
        (_with("kv_cache_scheme", {"num_bits": 8}), "kv_cache_scheme"),
    ],
)
def test_configs_of_other_schemes_are_refused(change, message):
    config = Int8Scheme().quantization_config([])
    change(config)
    with pytest.raises(TilepressError, match=message):
        scheme_of(config)


PACKAGES = Path(sys.prefix) / "compressed-tensors"
NEWEST = "0.20.0"
VERSIONS = ("0.9.4", "0.15.0", NEWEST)


PARSE = """
import importlib.metadata, json, os, sys
import torch, transformers
configs = json.loads(sys.argv[1])
for folder in sys.argv[2:]:
    if os.fork():
        assert os.wait()[1] == 0, folder
        continue
    sys.path.insert(0, folder)
    from compressed_tensors.quantization import QuantizationConfig
    found = []
    for config in configs:
        group = QuantizationConfig.model_validate(config).config_groups["group_0"]
        parts = [p and [p.num_bits, p.strategy, p.symmetric, p.dynamic] for p in (group.weights, group.input_activations)]
        found.append([group.targets, *parts])
    print(json.dumps([folder, importlib.metadata.version("compressed-tensors"), found]), flush=True)
    assert "tilepress" not in sys.modules
    os._exit(0)
"""


@pytest.fixture(scope="module")
def parsed() -> dict[str, list]:
    """What each installed version makes of our configs, read in a fork of one process that has torch and transformers already."""
    configs = [Int8Scheme(w, a).quantization_config(["lm_head"]) for w in ("channel", "tensor") for a in ACTIVATIONS]
    folders = [str(PACKAGES / version) for version in VERSIONS if (PACKAGES / version).exists()]
    words = [sys.executable, "-c", PARSE, json.dumps(configs), *folders]
    ran = subprocess.run(words, env={"PATH": ""}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [[folder, Path(folder).name] for folder in folders] == [line[:2] for line in lines]
    return {version: found for _, version, found in lines}


@pytest.mark.thorough
@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_of_compressed_tensors_parses_the_config(parsed, version):
    if version not in parsed:
        pytest.skip("`make test` installs compressed-tensors for this")
    inputs = {
        "token": [8, "token", True, True],
        "tensor": [8, "tensor", True, False],
        "tensor-asym": [8, "tensor", False, False],
        "tensor-dynamic": [8, "tensor", True, True],
        "none": None,
    }
    expected = [[["Linear"], [8, w, True, False], inputs[a]] for w in ("channel", "tensor") for a in ACTIVATIONS]
    assert parsed[version] == expected


MIXED = Int8Scheme("channel", "tensor", frozenset({"model.mlp.down_proj"}))
PATHS = ["model.mlp.up_proj", "model.mlp.down_proj"]


def test_exceptions_are_told_by_name():
    config = json.loads(json.dumps(MIXED.quantization_config(["lm_head"], PATHS)))
    assert scheme_of(config) == MIXED
    assert MIXED.of("model.mlp.down_proj.weight") == Int8Scheme() and MIXED.of("model.mlp.up_proj.weight") == STATIC
    groups = config["config_groups"]
    assert [group["targets"] for group in groups.values()] == [PATHS[:1], PATHS[1:]]
    swapped = config | {"config_groups": dict(zip("ab", reversed(groups.values()), strict=True))}
    assert scheme_of(swapped) == MIXED


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda groups: groups["group_1"].update(targets=["re:.*down_proj"]), "patterns"),
        (lambda groups: groups["group_1"].update(targets=["Linear"]), "names of layers"),
        (lambda groups: groups["group_1"]["weights"].update(strategy="tensor"), "one of static inputs"),
        (lambda groups: groups["group_0"].update(groups["group_1"]), "one of static inputs"),
        (lambda groups: groups.update(group_2=groups["group_1"]), "one of static inputs"),
    ],
)
def test_other_groups_are_refused(change, message):
    config = json.loads(json.dumps(MIXED.quantization_config([], PATHS)))
    change(config["config_groups"])
    with pytest.raises(TilepressError, match=message):
        scheme_of(config)


DYNAMIC = Int8Scheme()


def artifact(scheme=DYNAMIC, drop=(), **changes):
    """Headers of an artifact with one layer, and its small tensors."""
    tensors, values = {"lm_head.weight": ("BF16", (8, 4))}, {}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        path = f"model.layers.0.{name}"
        if scheme.format == "pack-quantized":
            tensors |= {f"{path}.weight_packed": ("I32", (6, 1)), f"{path}.weight_shape": ("I64", (2,))}
        else:
            tensors[f"{path}.weight"] = ("I8", (6, 4))
        tensors[f"{path}.weight_scale"] = ("BF16", (6, 1) if scheme.weights == "channel" else (1,))
        if scheme.static:
            tensors[f"{path}.input_scale"] = ("BF16", (1,))
            values[f"{path}.input_scale"] = torch.tensor([0.5])
        if scheme.asymmetric:
            tensors[f"{path}.input_zero_point"] = ("I8", (1,))
            values[f"{path}.input_zero_point"] = torch.tensor([3], dtype=torch.int8)
    for name, value in changes.items():
        name = f"model.layers.0.{name.replace('__', '.')}"
        if isinstance(value, tuple):
            tensors[name] = value
        else:
            values[name] = value
    tensors = {name: entry for name, entry in tensors.items() if not any(part in name for part in drop)}
    linears = {name: name.removesuffix(".weight") for name in tensors if name.endswith(".weight")}
    return scheme.quantization_config(["lm_head"]), tensors, linears, values.__getitem__, ONE_PRODUCT


@pytest.mark.parametrize(
    "weights,activations",
    [*itertools.product(("channel", "tensor"), ("token", "tensor", "tensor-asym")), ("channel", "none")],
)
def test_vllm_takes_what_is_written(weights, activations):
    assert vllm_findings(*artifact(Int8Scheme(weights, activations))) == ([], [])


def test_vllm_takes_exceptions_of_whole_products_alone():
    _, tensors, *rest = artifact(Int8Scheme("channel", "tensor"), drop=("up_proj.input_scale", "gate_proj.input_scale"))
    paths = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight") and "lm_head" not in name]
    inner = [path for path in paths if ".mlp." in path]
    for dynamic, of, message in (
        (inner, paths, None),
        (inner[:1], paths, "only some"),
        (inner, paths[1:], "in no group"),
    ):
        scheme = Int8Scheme("channel", "tensor", frozenset(dynamic))
        findings, _ = vllm_findings(scheme.quantization_config(["lm_head"], of), tensors, *rest)
        assert (findings == []) if message is None else any(message in finding for finding in findings), findings


def test_an_int8_head_is_a_target_and_not_ignored():
    _, tensors, *rest = artifact()
    tensors |= {"lm_head.weight": ("I8", (8, 4)), "lm_head.weight_scale": ("BF16", (8, 1))}
    paths = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]
    for ignore, named, message in (
        ([], paths, None),
        ([], [], "targets do not name it"),
        (["lm_head"], paths, "lm_head is quantized but in"),
    ):
        config = DYNAMIC.quantization_config(ignore, named)
        assert config["config_groups"]["group_0"]["targets"] == ["Linear", *(["lm_head"] if named else [])]
        assert scheme_of(config) == DYNAMIC
        findings, notes = vllm_findings(config, tensors, *rest)
        assert (findings == []) if message is None else any(message in finding for finding in findings), findings
        assert "INT8 output head" in "".join(notes)
    mixed = Int8Scheme("channel", "tensor", frozenset(["lm_head"]))
    assert scheme_of(mixed.quantization_config([], paths)) == mixed


@pytest.mark.parametrize("weights,activations", [("tensor", "none"), ("channel", "tensor-dynamic")])
def test_schemes_without_a_vllm_kernel_are_noted(weights, activations):
    findings, notes = vllm_findings(*artifact(Int8Scheme(weights, activations)))
    assert findings == [] and "no kernel" in notes[0]


STATIC = Int8Scheme("channel", "tensor")


@pytest.mark.parametrize(
    "args,message",
    [
        (artifact(self_attn__q_proj__weight_scale=("BF16", (6,))), "q_proj.weight_scale is [6]"),
        (artifact(drop=("k_proj.weight_scale",)), "k_proj.weight_scale is missing"),
        (artifact(STATIC, drop=("k_proj.input_scale",)), "k_proj.input_scale is missing"),
        (artifact(mlp__up_proj__input_scale=("BF16", (1,))), "up_proj.input_scale is there"),
        (artifact(STATIC, mlp__up_proj__input_scale=torch.tensor([0.25])), "their input scales differ"),
        (
            artifact(Int8Scheme("channel", "tensor-asym"), mlp__up_proj__input_zero_point=torch.tensor([4])),
            "their input scales differ",
        ),
        (artifact(self_attn__v_proj__weight=("BF16", (6, 4)), drop=("v_proj.weight_scale",)), "one GEMM, but only"),
        (artifact(Int8Scheme("channel", "tensor-asym"), mlp__up_proj__input_zero_point=("I32", (1,))), "is I32"),
        (artifact(Int8Scheme("channel", "none"), mlp__up_proj__weight=("I8", (6, 4))), "up_proj.weight is not pack-"),
    ],
)
def test_vllm_rules(args, message):
    findings, _ = vllm_findings(*args)
    assert any(message in finding for finding in findings), findings


@pytest.mark.parametrize(
    "change,message",
    [
        (_with("ignore", []), "lm_head is float but not in"),
        (_with("ignore", ["lm_head", "model.layers.0.mlp.up_proj"]), "quantized but in `ignore`"),
        (_with("quantization_status", "initialized"), "quantization_status"),
        (_with("sparsity_config", {"format": "dense", "targets": ["Linear"]}), "sparsity_config"),
        (_with("sparsity_config", ["Linear"]), "sparsity_config"),
        (_with("ignore", 5), "no list of names"),
        (_with("ignore", ["lm_head", 5]), "no list of names"),
        (_with("ignore", ["re:lm_head", "re:.*up_proj"]), "up_proj is quantized but in `ignore`"),
        (_with("ignore", ["lm_head", "re:("]), "a pattern that is none"),
        (_with("ignore", ["lm_head", "re:a{99999999999999999999}"]), "a pattern that is none"),
        (_with("config_groups.group_0.weights.scale_dtype", "torch.float32"), "scale_dtype"),
    ],
)
def test_vllm_rules_of_the_config(change, message):
    config, *rest = artifact()
    change(config)
    findings, _ = vllm_findings(config, *rest)
    assert any(message in finding for finding in findings), findings


def test_a_pattern_that_matches_for_years_is_stopped(monkeypatch):
    monkeypatch.setattr(patterns, "MOST_S", 0.3)
    config, *rest = artifact()
    findings, _ = vllm_findings(config | {"ignore": ["re:((((.*)*)*)*)*!"]}, *rest)
    assert "takes too long" in findings[-1]


def test_an_input_scale_of_no_numbers_is_told():
    empty = {"self_attn__q_proj__input_scale": ("BF16", (0,))}
    config, tensors, linears, value, products = artifact(STATIC, **empty)
    name = "model.layers.0.self_attn.q_proj.input_scale"
    findings, _ = vllm_findings(
        config, tensors, linears, lambda asked: torch.ones(0) if asked == name else value(asked), products
    )
    assert f"{name} is [0], not [1]" in findings

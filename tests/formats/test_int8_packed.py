"""INT8 weights alone in words of four codes: a golden word, a decoder written from the specification, parts, what is refused."""

import json

import numpy as np
import pytest
import torch
from support.artifacts import quantize

import tilepress
from tilepress.eval.verify import verify
from tilepress.formats import TilepressError
from tilepress.formats.checkpoint import Checkpoint
from tilepress.formats.int8 import Int8Scheme
from tilepress.formats.int8_packed import Int8PackedWeight, PackedLayout, from_words, to_words

LAYOUT = PackedLayout()


def packed(rows=5, cols=11, seed=0) -> tuple[Int8PackedWeight, torch.Tensor]:
    codes = torch.randint(-128, 128, (rows, cols), dtype=torch.int8, generator=torch.Generator().manual_seed(seed))
    scale = torch.arange(1, rows + 1).view(rows, 1) / 16
    parts = {"weight_packed": to_words(codes), "weight_scale": scale, "weight_shape": torch.tensor([rows, cols])}
    return Int8PackedWeight("a.weight", parts), codes


def test_a_golden_word():
    """The first code lies lowest, 128 is added, and what lies behind the last column is 0."""
    words = to_words(torch.tensor([[-128, -127, 0, 127, 1]], dtype=torch.int8))
    assert words.tolist() == [[0xFF800100 - (1 << 32), 0x81]]


@pytest.mark.parametrize("cols", [1, 4, 7, 64])
def test_against_a_decoder_from_the_specification(cols):
    weight, codes = packed(6, cols)
    words = weight.stored.numpy().astype(np.int64) & 0xFFFFFFFF
    found = np.stack([(words >> shift) & 0xFF for shift in (0, 8, 16, 24)], axis=-1).reshape(6, -1)[:, :cols] - 128
    assert (found == codes.numpy()).all() and torch.equal(from_words(weight.stored, cols), codes)
    matrix = LAYOUT.matrix(weight)
    assert torch.equal(matrix, torch.from_numpy(found).float() * weight.scale)
    assert LAYOUT.form(weight).rows == 6 and LAYOUT.form(weight).cols == cols
    facts, problems = LAYOUT.examine(weight)
    assert problems == [] and facts["nonzeros"] == int((codes != 0).sum()) and facts["shape"] == [6, cols]


@pytest.mark.parametrize("rows,cols", [((1, 4), (2, 9)), ((0, 5), (4, 8)), ((4, 5), (10, 11))])
def test_parts_are_cut_out_of_words(rows, cols):
    weight, codes = packed()
    read = lambda part, *index: weight.parts[part][index]  # noqa: E731
    part, covered = LAYOUT.slice(weight, read, rows, cols, torch.device("cpu"))
    assert covered == (rows, cols)
    assert torch.equal(part.stored, codes[slice(*rows), slice(*cols)])
    assert torch.equal(part.scale, weight.scale[slice(*rows)])


@pytest.mark.parametrize(
    "change,message",
    [
        ({"weight_shape": torch.tensor([5, 13])}, "words of [5, 3] for a weight of [5, 13]"),
        ({"weight_shape": torch.tensor([4, 11])}, "for a weight of [4, 11]"),
        ({"weight_shape": torch.tensor([5, -3]), "weight_packed": torch.zeros(5, 0, dtype=torch.int32)}, "of [5, -3]"),
        ({"weight_shape": torch.tensor([5])}, "for a weight of []"),
        ({"weight_packed": torch.zeros(5, 3, 1, dtype=torch.int32)}, "words of [5, 3, 1]"),
    ],
)
def test_what_does_not_agree_is_refused(change, message):
    weight, _ = packed()
    broken = Int8PackedWeight("a.weight", weight.parts | change)
    with pytest.raises(TilepressError) as error:
        LAYOUT.form(broken)
    assert message in error.value.message
    assert LAYOUT.examine(broken)[1]


def test_an_artifact_is_found_verified_saved_and_made_dense(checkpoint_of, tmp_path):
    """Odd sizes among them; what is saved again has the words that were read."""
    made = tmp_path / "made"
    quantize(checkpoint_of("llama-tied", torch.float32), made, activations="none")
    checkpoint = Checkpoint(made)
    weights = [weight for weight in checkpoint.weights.values() if weight.layout == "int8-packed"]
    assert len(weights) == 14 and all(weight.is_int8 for weight in weights)
    assert verify(made).passed
    model = tilepress.load(made)
    for weight in weights:
        linear = model.get_submodule(weight.name.removesuffix(".weight"))
        assert torch.equal(linear.dense(), checkpoint.dense(weight))
        assert linear.weight.dtype == torch.int8 and "weight_packed" not in dict(linear.named_buffers())
    model.save_pretrained(tmp_path / "saved")
    again = Checkpoint(tmp_path / "saved")
    assert again.tensors.keys() == checkpoint.tensors.keys()
    assert all(torch.equal(again.read(name), checkpoint.read(name)) for name in checkpoint.tensors)
    model.load_state_dict(model.state_dict())
    assert torch.equal(model.get_submodule(weights[0].name.removesuffix(".weight")).dense(), again.dense(weights[0]))


def test_what_was_written_before_is_read(checkpoint_of, tmp_path, monkeypatch):
    """Codes a byte each, under the format's former name."""
    quantize(checkpoint_of("llama"), tmp_path / "packed", activations="none")
    monkeypatch.setattr(Int8Scheme, "format", "int-quantized")
    quantize(checkpoint_of("llama"), tmp_path / "plain", activations="none")
    monkeypatch.undo()
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "int-quantized"
    one, other = (tilepress.load(tmp_path / name) for name in ("packed", "plain"))
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(one(ids).logits, other(ids).logits)
    assert verify(tmp_path / "plain").passed

"""The shard writer: files that safetensors itself reads, atomic names, a full disk."""

import errno

import pytest
import torch
from safetensors import safe_open

from tilepress.formats import TilepressError
from tilepress.formats.artifact import ShardWriter, disk_errors, sha256_file
from tilepress.formats.checkpoint import read_header


def test_streamed_file_is_ordinary_safetensors(tmp_path):
    writer = ShardWriter(tmp_path / "m.safetensors", tmp_path)
    writer.add("words", (-1,), [torch.arange(5, dtype=torch.int32), torch.arange(7, dtype=torch.int32)])
    writer.add("dense", (3, 4), [torch.ones(12, dtype=torch.bfloat16)])
    writer.add("scalar", (), [torch.tensor([2.0], dtype=torch.bfloat16)])
    assert not (tmp_path / "m.safetensors").exists()
    size, digest = writer.finish()
    assert size == (tmp_path / "m.safetensors").stat().st_size and digest == sha256_file(tmp_path / "m.safetensors")
    assert list(tmp_path.iterdir()) == [tmp_path / "m.safetensors"]
    with safe_open(tmp_path / "m.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_tensor("words").tolist() == [*range(5), *range(7)]
        assert file.get_tensor("dense").shape == (3, 4) and file.get_tensor("scalar").item() == 2.0
    assert read_header(tmp_path / "m.safetensors")["words"].shape == (12,)


def test_the_order_in_which_tensors_come_changes_no_byte(tmp_path):
    """Wide elements first, words before what stands beside them, then names: whatever came when, and however long it is."""
    ordered = {
        "b.weight": torch.arange(6, dtype=torch.int32),
        "c.weight": torch.arange(3.0),
        "a.weight_offsets": torch.arange(2, dtype=torch.int32),
        "b.weight_offsets": torch.arange(3, dtype=torch.int32),
        "b.weight_bitmap": torch.arange(7, dtype=torch.int32),
        "a.weight_scale": torch.arange(4.0),
        "d.weight": torch.arange(8).bfloat16().view(2, 4),
        "e.input_zero_point": torch.ones(1, dtype=torch.int8),
        "e.weight": torch.arange(5).to(torch.int8),
    }
    found = set()
    for order in (list(ordered), sorted(ordered), list(ordered)[::-1]):
        writer = ShardWriter(tmp_path / "m.safetensors", tmp_path)
        for name in order:
            writer.add(name, tuple(ordered[name].shape), ordered[name].split(1))
        found.add(writer.finish())
        assert list(tmp_path.iterdir()) == [tmp_path / "m.safetensors"]
    assert len(found) == 1
    header = read_header(tmp_path / "m.safetensors")
    assert list(header) == list(ordered)
    with safe_open(tmp_path / "m.safetensors", framework="pt") as file:
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in ordered.items())
    length = int.from_bytes((tmp_path / "m.safetensors").read_bytes()[:8], "little")
    assert (length + 8) % 128 == 0 and next(iter(found))[0] == 8 + length + sum(t.nbytes for t in ordered.values())


def test_abandoned_file_leaves_nothing(tmp_path):
    writer = ShardWriter(tmp_path / "m.safetensors", tmp_path)
    writer.add("words", (-1,), [torch.arange(5, dtype=torch.int32)])
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_told(tmp_path):
    with pytest.raises(TilepressError, match="the disk is full") as caught, disk_errors(tmp_path / "x"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert "--resume" in caught.value.hint

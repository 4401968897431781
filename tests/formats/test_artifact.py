"""The shard writer: files that safetensors itself reads, atomic names, a full disk."""

import errno

import pytest
import torch
from safetensors import safe_open

from tilepress.formats import TilepressError
from tilepress.formats.artifact import PlannedTensor, ShardWriter, disk_errors, sha256_file
from tilepress.formats.checkpoint import read_header

PLANNED = [
    PlannedTensor("words", torch.int32, 1000),
    PlannedTensor("dense", torch.bfloat16, 12, 2),
    PlannedTensor("scalar", torch.bfloat16, 1, 0),
]


def test_streamed_file_is_ordinary_safetensors(tmp_path):
    writer = ShardWriter(tmp_path / "m.safetensors", PLANNED, tmp_path)
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


def test_abandoned_file_leaves_nothing(tmp_path):
    writer = ShardWriter(tmp_path / "m.safetensors", PLANNED, tmp_path)
    writer.add("words", (-1,), [torch.arange(5, dtype=torch.int32)])
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_told(tmp_path):
    with pytest.raises(TilepressError, match="the disk is full") as caught, disk_errors(tmp_path / "x"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert "--resume" in caught.value.hint

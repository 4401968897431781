"""Checkpoints that must be refused, each with the file or tensor named, and what a good one gives."""

import json
import os
import socket
import struct
import time

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from tilepress.formats import TilepressError, UsageError, hub
from tilepress.formats.checkpoint import Checkpoint, read_header
from tilepress.formats.hub import locate


def raw(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def tensor(begin, end, shape=(2,), dtype="BF16"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


MALFORMED = {
    "truncated before the header": (b"", None, b"", "truncated"),
    "huge header": (b"{}", 1 << 60, b"", "the header claims"),
    "header longer than the file": (b"{}", 100, b"", "the header claims 100"),
    "not json": (b"{oops", None, b"", "not valid JSON"),
    "deep json": (b"[" * 200_000, None, b"", "not valid JSON"),
    "a list": (b"[]", None, b"", "not a JSON object"),
    "duplicate names": (
        b'{"a":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]},"a":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}',
        None,
        b"xx",
        "duplicate name 'a'",
    ),
    "overlap": ({"a": tensor(0, 4), "b": tensor(2, 6)}, None, b"x" * 6, "'b' at 2..6 overlaps"),
    "hole": ({"a": tensor(0, 4), "b": tensor(6, 10)}, None, b"x" * 10, "'b' at 6..10 leaves a hole"),
    "out of range": ({"a": tensor(0, 4)}, None, b"xx", "'a' .2. needs 4 bytes"),
    "trailing bytes": ({"a": tensor(0, 4)}, None, b"x" * 9, "the tensors end at 4 of 9"),
    "size does not fit": ({"a": tensor(0, 4, (3,))}, None, b"x" * 4, "'a' .3. needs 6 bytes"),
    "overflowing shape": ({"a": tensor(0, 4, (1 << 62, 1 << 62))}, None, b"x" * 4, "'a'"),
    "negative": ({"a": tensor(-4, 0)}, None, b"", "'a' is badly described"),
    "float shape": ({"a": tensor(0, 4, (2.0,))}, None, b"x" * 4, "'a' is badly described"),
    "unknown dtype": ({"a": tensor(0, 4, dtype="PICKLE")}, None, b"x" * 4, "'a' is badly described"),
    "no offsets": ({"a": {"dtype": "BF16", "shape": [2]}}, None, b"", "'a' is badly described"),
    "zero times too much": ({"a": tensor(0, 0, (2**63, 0))}, None, b"", "'a' is badly described"),
    "metadata is a list": ({"__metadata__": [1]}, None, b"", "__metadata__"),
    "metadata of numbers": ({"__metadata__": {"format": 1}}, None, b"", "__metadata__"),
    "no text for a name": (
        b'{"\\ud800":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}',
        None,
        b"xx",
        "badly described",
    ),
    "more names than any model has": (b'{"data_offsets"' * (1 << 18), None, b"", "has 262144 tensors"),
    "not a description": ({"a": 7}, None, b"", "'a' is badly described"),
    "many dimensions": ({"a": tensor(0, 4, [2**40] * 100_000)}, None, b"x" * 4, "'a' is badly described"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_headers_are_refused(tmp_path, case):
    header, length, data, message = MALFORMED[case]
    path = tmp_path / "model.safetensors"
    if case == "truncated before the header":
        path.write_bytes(b"\x01\x02")
    else:
        raw(path, header, data, length)
    with pytest.raises(TilepressError, match=message) as caught:
        read_header(path)
    assert "model.safetensors" in caught.value.message


def test_many_names_take_no_longer_than_reading_them(tmp_path):
    names = ",".join(f'"a{i}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for i in range(30_000))
    started = time.process_time()
    with pytest.raises(TilepressError, match="duplicate name 'a0'"):
        read_header(raw(tmp_path / "model.safetensors", f'{{{names},"a0":{{}}}}'.encode()))
    assert time.process_time() - started < 5


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "merges.txt", "model.safetensors"])
def test_a_pipe_is_not_waited_for(tmp_path, name):
    path = folder(tmp_path, {"model.safetensors": A})
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)
    with pytest.raises(TilepressError, match=f"{name} is no regular file"):
        Checkpoint(path)


def test_half_of_a_character_is_no_json(tmp_path):
    path = folder(tmp_path, {"model.safetensors": A})
    (path / "config.json").write_text('{"model_type": "\\ud83d\\ude00"}')
    assert Checkpoint(path).config["model_type"] == "\U0001f600"
    (path / "config.json").write_text('{"model_type": "\\ud83d"}')
    with pytest.raises(TilepressError, match="surrogates"):
        Checkpoint(path)


def folder(tmp_path, shards, index=None):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for name, tensors in shards.items():
        save_file(tensors, tmp_path / name)
    if index is not None:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return tmp_path


A, B = {"a": torch.ones(2)}, {"b": torch.ones(3)}


def test_lying_index_is_refused(tmp_path):
    cases = [
        ({"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}, "'c'.*no shard has it"),
        ({"a": "two.safetensors", "b": "one.safetensors"}, "'a'.*it is in one"),
        ({"a": "one.safetensors", "b": "three.safetensors"}, "three.safetensors is missing"),
        ({"a": "../one.safetensors"}, "no safetensors file of this folder"),
        ({"a": 3}, "no weight_map"),
    ]
    for index, message in cases:
        folder(tmp_path, {"one.safetensors": A, "two.safetensors": B}, index)
        with pytest.raises(TilepressError, match=message):
            Checkpoint(tmp_path)
    folder(
        tmp_path,
        {"one.safetensors": A | {"hidden": torch.ones(1)}, "two.safetensors": B},
        {"a": "one.safetensors", "b": "two.safetensors"},
    )
    with pytest.raises(TilepressError, match="'hidden', which .* does not list"):
        Checkpoint(tmp_path)
    folder(tmp_path, {"one.safetensors": A, "two.safetensors": A | B}, {"a": "one.safetensors", "b": "two.safetensors"})
    with pytest.raises(TilepressError, match="'a' is in both"):
        Checkpoint(tmp_path)


def test_several_shards_need_an_index(tmp_path):
    with pytest.raises(TilepressError, match="2 safetensors files"):
        Checkpoint(folder(tmp_path, {"one.safetensors": A, "two.safetensors": B}))


def test_pickles_are_refused_with_the_way_to_convert(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"never opened")
    with pytest.raises(UsageError, match="pickle") as caught:
        Checkpoint(tmp_path)
    assert "save_pretrained" in caught.value.hint


def test_missing_things_are_named(tmp_path):
    with pytest.raises(UsageError, match="not a folder"):
        Checkpoint(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"no config\.json"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(TilepressError, match="not valid JSON"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="no .*safetensors file"):
        Checkpoint(tmp_path)


def test_unreadable_shard_is_named(tmp_path, monkeypatch):
    path = folder(tmp_path, {"model.safetensors": A})
    real = open

    def refuse(name, *args, **kwargs):
        if str(name).endswith("model.safetensors"):
            raise PermissionError(13, "Permission denied")
        return real(name, *args, **kwargs)

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(TilepressError, match="Permission denied"):
        Checkpoint(path)


def test_packed_weight_with_a_missing_part_is_refused(tmp_path):
    path = folder(tmp_path, {"model.safetensors": {"l.weight_offsets": torch.zeros(2, dtype=torch.int32)}})
    with pytest.raises(TilepressError, match="other parts are missing"):
        assert Checkpoint(path).weights


def test_a_hub_id_that_nobody_answers_for(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UsageError, match="neither a folder nor a model"):
        locate("nobody/nothing")


def test_a_hub_that_does_not_answer_is_not_tried_again_and_again(monkeypatch):
    silent = socket.create_server(("127.0.0.1", 0), backlog=0)  # it takes one connection that nobody reads
    port = silent.getsockname()[1]
    filled = [socket.create_connection(("127.0.0.1", port)) for _ in range(1)]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_PATIENCE_S", 0.3)
    for endpoint in (f"http://127.0.0.1:{port}", "http://nobody.invalid"):
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setenv("no_proxy", "*")
        started = time.monotonic()
        with pytest.raises(UsageError, match="cannot be reached, and no copy is cached"):
            locate("nobody/nothing")
        assert time.monotonic() - started < 5 and not constants.HF_HUB_OFFLINE
    for each in (*filled, silent):
        each.close()


def test_reads_without_taking_memory(tmp_path):
    checkpoint = Checkpoint(folder(tmp_path, {"model.safetensors": {"a": torch.arange(6).view(2, 3)}}))
    assert torch.equal(checkpoint.read("a"), torch.arange(6).view(2, 3))
    assert checkpoint.weights["a"].layout == "dense" and checkpoint.weights["a"].nbytes == 48

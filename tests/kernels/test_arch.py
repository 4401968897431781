"""Cards as rows: what is known of each, which kernel serves what on it, and nothing about cards elsewhere."""

import re
from pathlib import Path

import pytest
import torch
from support.cards import pretend

from tilepress.formats import UsageError
from tilepress.formats.kv_int4 import KVFormat, UnlikeForms
from tilepress.kernels import (
    arch,
    decode_attention,
    jit,
    kv_cache,
    kv_read,
    rope_append,
    tiled_bitmap_spmm,
    tiled_csl_spmm,
    w8a8_gemm,
    w8a16_gemm,
)

CUDA, BF16 = torch.device("cuda", 0), torch.bfloat16
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "capability,target,kib,block_kib,wgmma,dependent",
    [
        ((8, 0), "sm_80", 164, 163, False, False),
        ((8, 6), "sm_86", 100, 99, False, False),
        ((8, 9), "sm_89", 100, 99, False, False),
        ((9, 0), "sm_90a", 228, 227, True, True),
        ((10, 0), "sm_100a", 228, 227, False, True),
        ((12, 0), "sm_120a", 100, 99, False, True),
        ((12, 1), "sm_121a", 100, 99, False, True),  # not in the table: as the row before it
        ((9, 9), "sm_99a", 228, 227, False, True),  # wgmma is of sm_90a alone
    ],
)
def test_rows(capability, target, kib, block_kib, wgmma, dependent):
    card = arch.card_of(*capability)
    assert (card.capability, card.target) == (capability, target) and card.has_kernels
    assert (card.shared_bytes, card.block_shared_bytes) == (kib * 1024, block_kib * 1024)
    assert (card.has_wgmma, card.has_dependent_launch) == (wgmma, dependent)


def test_rows_are_in_order():
    assert [card.capability for card in arch.CARDS] == sorted({card.capability for card in arch.CARDS})


def test_older_cards_have_no_kernel(monkeypatch):
    pretend(monkeypatch, (7, 5))
    assert not arch.card(CUDA).has_kernels and all(arch.kernel_for(op, CUDA) is None for op in arch.KERNELS)
    assert jit.why_not.__wrapped__(CUDA) == "the card is older than sm_80" and jit.why_not(torch.device("cpu")) == ""


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_who_serves_what(monkeypatch, capability):
    pretend(monkeypatch, capability)
    monkeypatch.setattr(jit, "why_not", lambda device: None)
    of_hopper = capability == (9, 0)
    assert str(tiled_csl_spmm.path(CUDA, BF16, BF16)) == f"tiled_csl_{'spmm' if of_hopper else 'mma'} kernel on cuda"
    bitmap = f"tiled_bitmap_{'spmm' if of_hopper else 'mma'} kernel on cuda"
    assert str(tiled_bitmap_spmm.path(CUDA, BF16, BF16)) == bitmap
    assert str(w8a8_gemm.path(CUDA, BF16, BF16, 64, 64)) == f"w8a8_{'gemm' if of_hopper else 'mma'} kernel on cuda"
    assert str(w8a16_gemm.path(CUDA, BF16, BF16, 64)) == f"w8a16_{'gemm' if of_hopper else 'mma'} kernel on cuda"
    form = KVFormat(128, 4, 32)
    mma = f"decode_attention_mma kernel ({form.name}) on cuda"
    best = f"decode_attention kernel ({form.name}) on cuda" if of_hopper else mma
    assert str(decode_attention.path(CUDA, form)) == best
    assert str(decode_attention.path(CUDA, form, extras=("a window",))) == mma
    assert "decode_attention_mma kernel" in str(decode_attention.path(CUDA, KVFormat(256)))
    assert str(decode_attention.path(CUDA, KVFormat(32))).endswith("(heads of 32, the kernel takes 64, 96, 128, 256)")
    both = UnlikeForms(form, KVFormat(128))
    assert "decode_attention_mma kernel" in str(decode_attention.path(CUDA, both))
    for op in (kv_read, rope_append, kv_cache):
        assert str(op.path(CUDA, both)).endswith(f" reference ({both.name}) on cuda ({kv_cache.UNLIKE})")
    monkeypatch.setattr(kv_cache, "UNLIKE", None)
    for op in (kv_read, rope_append, kv_cache):
        assert str(op.path(CUDA, both)).endswith(f" kernel ({both.name}) on cuda")


@pytest.mark.parametrize("name,capability,kib", [("sm80", (8, 0), 163), ("sm_86", (8, 6), 99), ("sm120", (12, 0), 99)])
def test_a_card_may_be_taken_for_an_older_one(monkeypatch, name, capability, kib):
    monkeypatch.setenv("TILEPRESS_ARCH", name)
    assert arch.forced().capability == capability
    taken = arch.as_older(arch.HOPPER, arch.forced())
    assert not taken.has_wgmma and not taken.runs("sm90_any.cu") and taken.runs("sm80_any.cu")
    assert (taken.block_shared_bytes, taken.target) == (kib * 1024, "sm_90a")
    assert taken.multiprocessors == arch.HOPPER.multiprocessors


def test_a_card_is_taken_for_none_that_there_is_not(monkeypatch):
    monkeypatch.delenv("TILEPRESS_ARCH", raising=False)
    assert arch.forced() is None
    for name in ("sm70", "ampere", "sm"):
        monkeypatch.setenv("TILEPRESS_ARCH", name)
        with pytest.raises(UsageError, match=f"TILEPRESS_ARCH={name} names no card"):
            arch.forced()


def test_files_are_named_after_the_oldest_card_that_they_run_on():
    listed = {source.file: source.kernel for sources in arch.KERNELS.values() for source in sources}
    assert set(listed) == {path.name for path in jit.FOLDER.glob("*.cu")}
    for file, kernel in listed.items():
        text = (jit.FOLDER / file).read_text()
        assert re.search(rf'extern "C" __global__ void [^;{{]*?\b{kernel}\(', text), file
        needs_hopper = re.search(r"\b(wgmma|tma_2d|bulk_copy|bar_init)\b", re.sub("//.*", "", text)) is not None
        assert re.match("sm90_" if needs_hopper else "sm80_", file), file
    for op, sources in arch.KERNELS.items():
        assert all(source.file.removeprefix("sm90_").removeprefix("sm80_") == f"{op}.cu" for source in sources)


def test_paths_are_sentences():
    path = arch.Path
    assert str(path("a", "cuda")) == "a kernel on cuda" and not path("a", "cuda").is_reference
    assert str(path("a", "cpu", "")) == "a reference on cpu" and path("a", "cpu", "").is_reference
    assert str(path("a", "cuda", "too old", "int4")) == "a reference (int4) on cuda (too old)"
    assert str(path("a", "cuda", decodes=True)) == "a kernel and cuBLAS on cuda"
    slow = path("a", "cpu", "")
    assert arch.references({slow: 1, path("a", "cuda"): 2, "torch linear on cpu": 3}) == [slow]


def test_cards_are_known_nowhere_else():
    """No compute capability and no size of shared memory but in arch.py, and no sentence that is searched for a path."""
    wrong = []
    for folder in ("tilepress", "tests"):
        for file in (ROOT / folder).rglob("*.py"):
            if file.name in ("arch.py", "test_arch.py"):
                continue
            for number, line in enumerate(file.read_text().splitlines(), 1):
                if re.search(r"\b22[78] \* 1024|get_device_capability|\.major\b|\bcapability\(", line):
                    wrong.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()}")
    assert wrong == []

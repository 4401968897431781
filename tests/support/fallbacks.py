"""What ops call on a card where no kernel serves: made to raise, it tells that only kernels ran."""

from tilepress.kernels import (
    argmax,
    decode_attention,
    fused_norm,
    fused_quant,
    kv_cache,
    kv_read,
    rope_append,
    tiled_bitmap_decode,
    tiled_bitmap_spmm,
    tiled_csl_decode,
    tiled_csl_spmm,
    w8a8_gemm,
    w8a16_gemm,
)

FALLBACKS = {
    argmax: ["argmax_ref"],
    tiled_csl_decode: ["tiled_csl_decode_ref"],
    tiled_bitmap_decode: ["tiled_bitmap_decode_ref"],
    tiled_csl_spmm: ["tiled_csl_spmm_ref"],
    tiled_bitmap_spmm: ["tiled_bitmap_spmm_ref"],
    w8a8_gemm: ["w8a8_gemm_ref"],
    w8a16_gemm: ["w8a16_gemm_ref"],
    fused_quant: [f.__name__ for f in fused_quant.REFERENCES.values()],
    fused_norm: [f.__name__ for f in fused_norm.REFERENCES.values()],
    rope_append._Rows: ["reference"],
    kv_cache.Quantization: ["store"],
    kv_read: ["kv_read_ref"],
    decode_attention: ["_attend"],
}


def refuse(*_, **__):
    raise AssertionError("a reference ran")


def refuse_all(monkeypatch) -> None:
    for owner, names in FALLBACKS.items():
        for name in names:
            monkeypatch.setattr(owner, name, refuse)

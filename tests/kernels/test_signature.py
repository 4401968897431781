"""What kernels take, read from cubins, against what their launches say and what their sources say."""

import functools
import inspect
import re

import pytest
import torch

from tilepress.formats import TilepressError
from tilepress.formats.kv_int4 import KVFormat
from tilepress.kernels import (
    arch,
    argmax,
    decode_attention,
    decode_attention_mma,
    fused_norm,
    fused_quant,
    jit,
    kv_cache,
    kv_read,
    read_bandwidth,
    rope_append,
    tiled_bitmap_decode,
    tiled_bitmap_mma,
    tiled_bitmap_prefill,
    tiled_bitmap_spmm,
    tiled_csl_decode,
    tiled_csl_mma,
    tiled_csl_spmm,
    w8a8_gemm,
    w8a16_gemm,
)
from tilepress.kernels.arch import KERNELS
from tilepress.kernels.signature import Parameter, check_compiled, compiled_widths, parse, sections

COMPILER = pytest.mark.skipif(jit.missing() is not None, reason="needs cuda-core")
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
TWO = (
    "struct Pair { int a, b, c; };"
    'extern "C" __global__ void first(float* x, long long n, const __grid_constant__ Pair pair, float by, char c) { x[n] = pair.b + by + c; }'
    'extern "C" __global__ void none() {}'
)
BF16, FORM = torch.bfloat16, KVFormat(128, 4, 32)


def kernels() -> dict[str, jit.Kernel]:
    """One of each kernel that a launch makes; of those for sm_90 with a choice of parameters, each choice."""
    quantizing = fused_quant.configuration_for(4096, False)
    bitmap = tiled_bitmap_spmm.Configuration(16, 1, BF16, BF16, 1)
    prefill = tiled_bitmap_prefill.Configuration(256, BF16, BF16, 1)
    steps = kv_cache.Steps(True, True, 2)
    mma = decode_attention_mma.configuration_for(FORM, 64, BF16, 4, arch.HOPPER)
    found = {
        "argmax": argmax._kernel(BF16, True),
        "attention_combine": decode_attention_mma.combine_kernel(mma),
        "decode_attention_mma": decode_attention_mma.kernel(mma),
        "decode_attention": decode_attention._kernel(decode_attention.Configuration(FORM, BF16, 1)),
        "dequantize": w8a16_gemm._dequantize_kernel(BF16),
        "fused_quant": fused_quant._kernel(quantizing, fused_quant.RMS_NORM, 0, True, BF16),
        "fused_norm": fused_norm._kernel(quantizing, fused_quant.RMS_NORM, True, BF16),
        "kv_append": kv_cache._append_kernel(FORM, BF16, steps),
        "kv_read": kv_read._kernel(FORM, BF16),
        "read_bandwidth": read_bandwidth._kernel(),
        "rope_append": rope_append._kernel(FORM, BF16, steps, 64, 32, 8, 128, False, False, False, False, False),
        "tiled_bitmap_decode": tiled_bitmap_decode.kernel(BF16, BF16, 1),
        "tiled_bitmap_prefill": tiled_bitmap_prefill._kernel(prefill),
        "tiled_bitmap_spmm": tiled_bitmap_spmm._kernel(bitmap, 1 << 16),
        "tiled_csl_decode": tiled_csl_decode.kernel(),
        "tiled_bitmap_mma": tiled_bitmap_mma.kernel(
            tiled_bitmap_mma.Configuration(16, 1, 2, 4, BF16, BF16, 1), 1 << 14
        ),
        "tiled_csl_mma": tiled_csl_mma.kernel(tiled_csl_mma.Configuration(16, 1, 4, 6, True)),
        "w8a16_gemm": w8a16_gemm._kernel(16, BF16),
        "w8a16_mma": w8a16_gemm._mma_kernel(16, BF16),
        "w8a8_gemm": w8a8_gemm._kernel(w8a8_gemm.configuration_for(16, 4096, 4096), BF16),
        "w8a8_mma": w8a8_gemm._mma_kernel(BF16),
    }
    for columns in (16, 256):
        chosen = tiled_csl_spmm.configuration(0.3, columns, BF16)
        found[f"tiled_csl_spmm {columns}"] = tiled_csl_spmm._kernel(chosen, 132)
    return found


@functools.cache
def files() -> dict[str, str]:
    return {source.kernel: source.file for sources in KERNELS.values() for source in sources}


def declared(kernel: jit.Kernel) -> list[str]:
    """The parameters in a kernel's file, as a signature writes them."""
    text = (jit.FOLDER / files()[kernel.name]).read_text()
    cuts = "const Cuts cuts," if "cuts&" in kernel.takes else ""
    inside = re.search(rf"\n?{kernel.name}\((.*?)\) {{", text[text.index('extern "C"') :], re.S)[1]
    inside = re.sub(r"//.*", "", inside).replace("CUTS_PARAMETER", cuts)
    found = []
    for parameter in inside.split(","):
        *kind, name = parameter.replace("*", " * ").split()
        wide = "8" if {"u64", "long"} & set(kind) else ""
        kind = "*" if "*" in kind else "&" if {"TensorMap", "Cuts"} & set(kind) else wide
        found.append(Parameter(name, kind))
    return found


def test_all_kernels_are_looked_at():
    assert {kernel.name for kernel in kernels().values()} == set(files())


@pytest.mark.parametrize("name", kernels())
def test_launches_name_what_their_sources_take(name):
    kernel = kernels()[name]
    assert list(kernel.parameters) == declared(kernel)


@pytest.mark.thorough
@COMPILER
@pytest.mark.parametrize("name", kernels())
def test_launches_fit_the_compiled_kernel(name):
    kernel = kernels()[name]
    target = "sm_90a" if files()[kernel.name].startswith("sm90_") else "sm_80"
    code, _ = jit.compile_cubin(kernel.name, kernel.source, target)
    widths = check_compiled(kernel.name, kernel.parameters, code)
    for parameter, width in zip(kernel.parameters, widths, strict=True):
        assert width == {"x": 128, "w": 128, "cuts": 133 * 8}[parameter.name] if parameter.kind == "&" else True


@COMPILER
@pytest.mark.parametrize("target", TARGETS)
def test_a_cubin_tells_its_kernels_parameters(target):
    code, _ = jit.compile_cubin("first", TWO, target)
    assert compiled_widths("first", code) == [8, 8, 12, 4, 1] and compiled_widths("none", code) == []
    assert len(sections(code)[".text.first"]) > 0
    with pytest.raises(TilepressError, match="kernel second does not tell"):
        compiled_widths("second", code)


@COMPILER
@pytest.mark.parametrize(
    "signature", ["x* n:8 pair& by", "x* n pair& by c", "x* n:8 pair& by* c", "x* n:8 pair& by c d"]
)
def test_signatures_that_differ_are_told(signature):
    code, _ = jit.compile_cubin("first", TWO.replace("char c", "int c"), "sm_80")
    assert check_compiled("first", parse("x* n:8 pair& by c"), code) == [8, 8, 12, 4, 4]
    with pytest.raises(
        TilepressError, match="kernel first takes 5 arguments: 8 bytes, 8 bytes, 12 bytes, 4 bytes, 4 bytes"
    ):
        check_compiled("first", parse(signature), code)


def test_every_word_of_a_signature_is_a_parameter():
    assert parse("a* b:8 c d&") == (("a", "*"), ("b", "8"), ("c", ""), ("d", "&"))
    assert [parameter.width for parameter in parse("a* b:8 c d&")] == [8, 8, 4, None]
    assert inspect.signature(jit.Kernel).parameters["takes"].default is inspect.Parameter.empty

"""`tilepress env`: versions, cards, and what would run where."""

import json
import os

from tilepress.cli.flags import Json
from tilepress.cli.terminal import table
from tilepress.version import __version__


def env(json_: Json = False) -> None:
    """Show versions, cards and what would run where."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import torch

    found = {"tilepress": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for name in ("torch", "transformers", "safetensors", "datasets", "typer", "scipy", "cuda-core"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    found["cuda"] = torch.version.cuda
    found["cards"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found["cores"], found["threads"] = os.cpu_count(), torch.get_num_threads()
    from tilepress.formats.kv_int4 import KVFormat
    from tilepress.kernels import arch, decode_attention, tiled_bitmap_spmm, tiled_csl_spmm, w8a8_gemm, w8a16_gemm

    here = torch.device("cuda" if found["cards"] else "cpu"), torch.bfloat16, torch.bfloat16
    found["Tiled-CSL linears run on"] = str(tiled_csl_spmm.path(*here))
    found["tiled bitmap linears run on"] = str(tiled_bitmap_spmm.path(*here))
    found["INT8 linears run on"] = f"{w8a8_gemm.path(*here, 64, 64)}, {w8a16_gemm.path(*here, 64)}"
    form = KVFormat(128)
    found["attention over packed pages runs on"] = str(decode_attention.path(here[0], form))
    found["of several queries or a window, on"] = str(decode_attention.path(here[0], form, extras=("a window",)))
    if (older := arch.forced()) is not None:
        found["TILEPRESS_ARCH takes the card for"] = "sm{}{}".format(*older.capability)
    print(
        json.dumps(found, indent=2)
        if json_
        else table(
            "",
            ["what", "found"],
            [[k, ", ".join(v) or "none" if isinstance(v, list) else str(v or "-")] for k, v in found.items()],
        )
    )

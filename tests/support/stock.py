"""Plain transformers in a process that does not know tilepress, kept for many loads: importing it takes seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, os, sys, traceback
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # libraries print
import torch
from transformers import AutoModelForCausalLM

def load(path):
    AutoModelForCausalLM.from_pretrained(path)

def run(path, ids, out):
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype="auto", output_loading_info=True)
    assert not any(info[key] for key in info), info
    layers, hook = {}, lambda name: lambda _, args, y: layers.__setitem__(name, (args[0], y))
    for name, module in model.named_modules():
        if hasattr(module, "weight_scale"):
            module.register_forward_hook(hook(name))
    with torch.no_grad():
        logits = model(torch.load(ids)).logits
    torch.save((logits, layers), out)

for line in sys.stdin:
    answer = None
    try:
        words = json.loads(line)
        (run if len(words) > 1 else load)(*words)
    except Exception:
        answer = traceback.format_exc()
    answers.write(json.dumps([answer, sorted({name.split(".")[0] for name in sys.modules})]) + "\\n")
    answers.flush()
"""


class Stock:
    """Loads checkpoints one after the other. `package`: a folder whose packages it finds too."""

    def __init__(self, folder: Path, package: Path | None = None):
        env = os.environ | {"PYTHONPATH": "" if package is None else str(package)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            cwd=folder,
        )
        self.package = package
        self.modules: set[str] = set()  # what it has imported

    def load(self, path: Path) -> str | None:
        """Loads a checkpoint and lets go of it; returns the traceback if that failed."""
        return self._ask(path)

    def run(self, path: Path, ids: Path, out: Path) -> str | None:
        """Writes the logits of token ids, and (input, output) of every quantized linear layer by name, to `out`; returns the traceback if it failed."""
        return self._ask(path, ids, out)

    def _ask(self, *words: Path) -> str | None:
        self._process.stdin.write(json.dumps([str(word) for word in words]) + "\n")
        self._process.stdin.flush()
        failure, modules = json.loads(self._process.stdout.readline())
        self.modules = set(modules)
        assert "tilepress" not in self.modules
        return failure

    def close(self) -> None:
        self._process.communicate()

"""Generate with an artifact: a batch of prompts at once, or one streamed token by token.

python examples/generate.py                       compresses the embedded model first
python examples/generate.py int8-kv4 --device cuda --prompt "def main(" --stream
"""

import argparse
import tempfile
import time

import torch
from transformers import AutoTokenizer, TextStreamer

import tilepress
from tilepress import demo

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("artifact", nargs="?", help="folder or hub id, dense or compressed")
parser.add_argument("--prompt", action="append", help="repeatable")
parser.add_argument("--new-tokens", type=int, default=32)
parser.add_argument("--stream", action="store_true", help="show tokens as they come: one prompt")
parser.add_argument("--device", default="auto")


def main(words: list[str] | None = None) -> None:
    how = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as scratch:
        if how.artifact is None:
            how.artifact = f"{scratch}/int8"
            tilepress.compress(demo.MODEL, how.artifact, tilepress.Quantize())
        model = tilepress.load(how.artifact, device=how.device)
        tokenizer = AutoTokenizer.from_pretrained(how.artifact, padding_side="left")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token or tokenizer.bos_token
        prompts = how.prompt or ["import os\n", "The function returns"]
        batch = tokenizer(prompts[:1] if how.stream else prompts, return_tensors="pt", padding=True).to(model.device)

        # transformers' own generate, with its sampling, criteria and streamers, over the lean pass.
        streamer = TextStreamer(tokenizer) if how.stream else None
        started = time.monotonic()
        with torch.inference_mode():
            tokens = model.generate(
                **batch, max_new_tokens=how.new_tokens, streamer=streamer, custom_generate=tilepress.decode
            )
        seconds = time.monotonic() - started
        if not how.stream:
            for text in tokenizer.batch_decode(tokens, skip_special_tokens=True):
                print("---", text, sep="\n")
        made = tokens.numel() - batch["input_ids"].numel()
        print(f"\n{made} tokens in {seconds:.2f} s")


if __name__ == "__main__":
    main()

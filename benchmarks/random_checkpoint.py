"""Writes a random checkpoint of a well-known shape, and text of random tokens beside it: to time on a card what reads a checkpoint, where there is none.

    python benchmarks/random_checkpoint.py llama-3-8b random-8b --device cuda
    tilepress compress prune random-8b -o pruned --sparsity 0.6 --method sparsegpt --device cuda --dataset random-8b.jsonl

Shapes are those of `tilepress demo --shape`. A token is a number, and a text is numbers; nothing is to be learned from them but how long things take.
"""

import argparse
import json
import random
from pathlib import Path

import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from tilepress.bench.shapes import DENSE, Artifact, config_of, random_model

DOCUMENTS, TOKENS = 256, 4096  # of the text


def write(shape: str, folder: Path, device: str, layers: int | None) -> None:
    config = config_of(shape)
    config.num_hidden_layers = layers or config.num_hidden_layers
    model, _ = random_model(config, Artifact.parse(DENSE), device)
    model.save_pretrained(folder, max_shard_size="4GB")
    vocabulary = {str(i): i for i in range(config.vocab_size)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="0").save_pretrained(folder)
    numbers = random.Random(0)
    with open(f"{folder}.jsonl", "w") as file:
        for _ in range(DOCUMENTS):
            words = (str(numbers.randrange(config.vocab_size)) for _ in range(TOKENS))
            file.write(json.dumps({"text": " ".join(words)}) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, help="instead of those of the shape")
    write(**vars(parser.parse_args()))

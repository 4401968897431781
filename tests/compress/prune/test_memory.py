"""What `compress prune --dry-run` says of memory against what a run takes."""

from pathlib import Path

import pytest
import torch

from tilepress import demo

NARROW = {"hidden_size": 128, "intermediate_size": 128}
EXPERTS = {"num_hidden_layers": 1, "num_experts": 24}
MANY, FEW = ("--nsamples", 64, "--seqlen", 512), ("--nsamples", 8, "--seqlen", 64)
AUTO = ("--allocation", "auto")
NOTHING = ("--nsamples", 4, "--seqlen", 64)
SPARE_BYTES = 128 << 20  # that a plan adds for what has no size
CASES = {
    "states of many variants": ("llama", NARROW | {"num_hidden_layers": 3}, ("wanda", *AUTO, "--nsamples", 16, "--seqlen", 512)),
    "allocation to experts": ("qwen3-moe", EXPERTS | {"hidden_size": 512, "moe_intermediate_size": 384}, ("wanda", *AUTO, "--nsamples", 8, "--seqlen", 128)),
    "moments of inputs of experts": ("qwen3-moe", EXPERTS | {"hidden_size": 768, "moe_intermediate_size": 128}, ("wanda", *FEW)),
    "moments of experts' last inputs": ("qwen3-moe", EXPERTS | {"hidden_size": 128, "moe_intermediate_size": 768}, ("sparsegpt", *FEW)),
    "outputs of settled parts": ("biogpt", NARROW | {"num_hidden_layers": 1}, ("sparsegpt", *MANY)),
    "another dtype": ("llama", NARROW | {"num_hidden_layers": 1, "dtype": torch.bfloat16}, ("sparsegpt", *MANY, "--dtype", "float32")),
    "a wide input": ("llama", {"hidden_size": 256, "intermediate_size": 1536, "num_hidden_layers": 1}, ("sparsegpt", *FEW)),
    "written out scores": ("gpt-oss", {"hidden_size": 128, "num_attention_heads": 16, "num_hidden_layers": 1}, ("wanda", "--nsamples", 2, "--seqlen", 1024)),
    "rows": ("llama", {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 1}, ("wanda", *FEW)),
}  # fmt: skip


def words(source: Path, output: Path, method: str, *flags) -> tuple:
    how = ("--sparsity", 0.5, "--method", method, "--format", "dense", "--dataset", demo.TEXT)
    return ("compress", "prune", source, "-o", output, *how, *flags)


@pytest.fixture(scope="module")
def nothing_bytes(checkpoint_of, command, tmp_path_factory) -> int:
    """What torch and transformers take, seen on a model of no size."""
    output = tmp_path_factory.mktemp("nothing") / "out"
    return command(*words(checkpoint_of("llama", torch.float32), output, "wanda", *AUTO, *NOTHING), "-q").peak_bytes()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to read anonymous memory")
@pytest.mark.parametrize("case", CASES)
def test_memory_is_what_the_dry_run_says(checkpoint_of, command, cli, tmp_path, nothing_bytes, case):
    """Memory in float32, which does not depend on the CPU's units."""
    family, changes, settings = CASES[case]
    source = checkpoint_of(family, **{"shard_size": "100MB", "dtype": torch.float32} | changes)
    run = words(source, tmp_path / "out", *settings)
    planned = cli(*run, "--dry-run", "--json").json["peak_memory_bytes"] - SPARE_BYTES
    taken = command(*run, "-q").peak_bytes() - nothing_bytes
    assert taken - (16 << 20) <= planned <= 2 * taken, f"{planned / 1e6:.1f} MB planned, {taken / 1e6:.1f} MB taken"


def test_layers_that_are_left_alone_are_not_in_memory_for_good(checkpoint_of, cli, tmp_path):
    source = checkpoint_of("llama", hidden_size=512, intermediate_size=1536, num_hidden_layers=6)

    def planned(*more) -> int:
        how = ("--sparsity", 0.5, "--method", "sparsegpt", "--dataset", demo.TEXT, *FEW)
        ran = cli("compress", "prune", source, "-o", tmp_path / "out", *how, *more, "--dry-run", "--json")
        return ran.json["peak_memory_bytes"]

    assert planned("--ignore", "*.layers.[2-5].*") == planned()

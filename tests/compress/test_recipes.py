"""Recipes as files: what a manifest tells makes the same artifact again, and a file that is none is refused."""

import itertools
import json

import pytest
import yaml
from support.artifacts import few_words
from support.interruption import digest

import tilepress
from tilepress import Convert, KVCache, Observer, Prune, Quantize, Recover, Text, UsageError, demo
from tilepress.compress.recipes import of_manifest
from tilepress.formats import patterns

TEXT = few_words(4, 64)
WHOLE = Text(str(demo.TEXT), seqlen=64)


@pytest.mark.parametrize(
    "recipe,text",
    [
        (Prune(0.5, scope="global", ignore=("lm_head", "*.0.*"), card="h100"), None),
        (Prune(0.6, method="wanda", format="tiled-bitmap", value_dtype="int8"), TEXT),
        (Quantize(activations="tensor", observer=Observer("percentile", 99.9), smooth="off"), TEXT),
        (Quantize(activations="tensor"), TEXT),
        (Quantize(), None),
        (KVCache(bits="auto", budget=5.0), TEXT),
        (KVCache(group_size=32), TEXT),
        (Recover(2, batch=2, prune=Prune(0.5)), WHOLE),
        (Recover(2, base="other", base_name="other", train="kept"), WHOLE),
        (Convert("dense"), None),
        (Convert("tiled-bitmap", ignore=("*.0.*",), card="h200"), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_manifests_recipe_has_the_same_settings(tmp_path, recipe, text):
    """Every setting that a manifest tells is read back as what it was."""
    manifest = {"command": recipe.command, "settings": recipe.settings(text), "source": {"name": "tiny"}}
    manifest = json.loads(json.dumps(manifest))
    steps = of_manifest(manifest)
    ((again, read),) = steps.recipes()
    settings = again.settings(read)
    if "base" in settings:  # found on the disk when a run begins
        settings["base"] = again.base
    assert again.command == recipe.command and settings == manifest["settings"]
    assert read == text and steps.model == "tiny"
    (tmp_path / "recipe.yaml").write_text(steps.to_yaml())
    assert tilepress.recipe(tmp_path / "recipe.yaml") == steps


def test_a_stack_from_a_file_is_the_artifact_again(checkpoint_of, tmp_path, cli):
    source = checkpoint_of("llama")
    recipes = [Prune(0.6, format="tiled-csl"), Recover(2, batch=2), KVCache()]
    texts = [None, WHOLE, few_words(2, 64)]
    tilepress.compress(source, tmp_path / "first", recipes, dataset=texts, device="cpu")
    printed = cli("inspect", tmp_path / "first", "--recipe")
    (tmp_path / "recipe.yaml").write_text(printed.out)
    words = ("compress", "stack", source, "--device", "cpu", "--recipe")
    for number, recipe in enumerate((tmp_path / "recipe.yaml", tmp_path / "first")):
        out = tmp_path / f"again-{number}"
        ran = cli(*words, recipe, "-o", out)
        assert ran.code == 0 and "recover" in ran.out and "next: tilepress eval perplexity" in ran.err, ran.err
        assert digest(out) == digest(tmp_path / "first")
    planned = cli(*words, tmp_path / "first", "-o", tmp_path / "none", "--dry-run")
    assert planned.code == 0 and yaml.safe_load(printed.out)["steps"][0]["sparsity"] == 0.6
    assert "nothing was written" in planned.out and not (tmp_path / "none").exists()


# Lines that stand for 9^9 words.
LAUGHS = f"model:\n  a: &a [{', '.join('x' * 9)}]\n" + "".join(
    f"  {name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in itertools.pairwise("abcdefghi")
)


@pytest.mark.parametrize(
    "content,message",
    [
        ("steps: [", "no YAML"),
        ("just words", "no recipe"),
        ("steps: 3", "no recipe"),
        ("steps: [prune]", "no recipe"),
        ("steps: []", "no steps"),
        ("stpes: []\nsteps: []", "stpes beside"),
        ("steps:\n- command: squeeze", "step 1 of the recipe has the command 'squeeze'"),
        ("steps:\n- sparsity: 0.5", "command None"),
        ("steps:\n- command: prune\n  sparsity: 2", "step 1: sparsity 2 is not in"),
        ("steps:\n- command: prune\n  sparsity: half", "step 1: "),
        ("steps:\n- command: prune", "missing .* 'sparsity'"),
        ("steps:\n- command: prune\n  sparsity: 0.5\n  sparsty: 1", "sparsty is no setting"),
        ("steps:\n- command: prune\n  sparsity: 0.5\n  dtype: abacus", "dtype 'abacus' is unknown"),
        ("steps:\n- command: prune\n  sparsity: 0.5\n  recover_stepz: 1", "stepz is no setting"),
        ("steps:\n- command: quantize\n  observer: percentile much", "observer 'percentile much'"),
        ("steps:\n- command: kv\n  bits: 4\n  nsamples: 0", "step 1: --nsamples 0"),
        ("a: &a [x, x]\nb: &b [*a, *a]\nsteps: [*b]", "no recipe"),
        ("model: 2001-13-01\nsteps: []", "no YAML .month must be"),
        ("model: 0x" + "f" * 5000 + "\nsteps: []", "a number of 20000 bits"),
        ("steps: &s\n- command: *s", "aliases that stand for much more"),
        (LAUGHS + "steps:\n- command: *i", "aliases that stand for much more"),
    ],
)
def test_what_is_no_recipe_is_told_in_two_lines(tiny, tmp_path, cli, content, message):
    (tmp_path / "recipe.yaml").write_text(content)
    with pytest.raises(UsageError, match=message) as raised:
        tilepress.recipe(tmp_path / "recipe.yaml").recipes()
    assert raised.value.hint
    ran = cli("compress", "stack", tiny, "-o", tmp_path / "out", "--recipe", tmp_path / "recipe.yaml")
    assert ran.code == 2 and ran.err.count("\n") == 2 and not (tmp_path / "out").exists()


def test_a_recipe_whose_pattern_matches_for_years_is_stopped(tiny, tmp_path, cli, monkeypatch):
    monkeypatch.setattr(patterns, "MOST_S", 0.5)
    (tmp_path / "recipe.yaml").write_text("steps:\n- {command: prune, sparsity: 0.5, ignore: ['re:([a-z._0-9]+)+!']}\n")
    ran = cli("compress", "stack", tiny, "-o", tmp_path / "out", "--recipe", tmp_path / "recipe.yaml")
    assert ran.code == 2 and "take more than 5 s to match" in ran.err and not (tmp_path / "out").exists()


def test_folders_without_a_manifest_have_no_recipe(tiny, tmp_path, cli):
    for words in (("inspect", tiny, "--recipe"), ("compress", "stack", tiny, "-o", tmp_path / "x", "--recipe", tiny)):
        ran = cli(*words)
        assert ran.code == 2 and "no tilepress.json, so no recipe" in ran.err and ran.err.count("\n") == 2
    ran = cli("compress", "stack", tiny, "-o", tmp_path / "x", "--recipe", tmp_path / "gone")
    assert ran.code == 2 and "no recipe at" in ran.err


def test_each_recipe_has_its_text(tiny, tmp_path):
    with pytest.raises(UsageError, match="1 texts for 2 recipes"):
        tilepress.compress(tiny, tmp_path / "x", [Prune(0.5), KVCache()], dataset=[TEXT])
    with pytest.raises(UsageError, match="none of the recipes reads text"):
        tilepress.compress(tiny, tmp_path / "x", [Prune(0.5), Convert("dense")], dataset=[None, TEXT])

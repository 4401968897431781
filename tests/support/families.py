"""Random checkpoints of several architectures, in the layout that transformers saves: shapes that are no multiple of a tile."""

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

_COMMON = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300, "bos_token_id": 0, "eos_token_id": 0}
_GQA = _COMMON | {"hidden_size": 128, "intermediate_size": 200, "num_key_value_heads": 2}
FAMILIES = {
    "llama": ("LlamaConfig", _GQA),
    "gpt2-64": (
        "GPT2Config",
        {
            "n_embd": 128,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 128,
            "vocab_size": 300,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
    ),
    "llama-tied": (
        "LlamaConfig",
        _GQA | {"tie_word_embeddings": True, "hidden_size": 120, "intermediate_size": 77, "attention_bias": True},
    ),
    "qwen2": ("Qwen2Config", _GQA),
    "gpt2": (
        "GPT2Config",
        {
            "n_embd": 100,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 128,
            "vocab_size": 300,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
    ),
    "opt": (
        "OPTConfig",
        _COMMON
        | {
            "hidden_size": 128,
            "ffn_dim": 200,
            "word_embed_proj_dim": 128,
            "max_position_embeddings": 128,
            "pad_token_id": 1,
        },
    ),
    "biogpt": ("BioGptConfig", _COMMON | {"hidden_size": 128, "intermediate_size": 128, "pad_token_id": 1}),
    "mistral": ("MistralConfig", _GQA | {"sliding_window": 24}),
    "qwen3": ("Qwen3Config", _GQA | {"head_dim": 32}),
    "phi3": ("Phi3Config", _GQA | {"pad_token_id": 299}),
    "phi3-partial": (
        "Phi3Config",
        _GQA
        | {
            "pad_token_id": 299,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        _GQA
        | {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 128,
            "pad_token_id": 299,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "max_position_embeddings": 512,
        },
    ),
    "gemma2": (
        "Gemma2Config",
        _GQA
        | {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 3.0,
            "sliding_window": 24,
            "pad_token_id": 299,
            "max_position_embeddings": 512,
        },
    ),
    "gemma": ("GemmaConfig", _GQA | {"head_dim": 32}),
    "falcon": ("FalconConfig", _COMMON | {"hidden_size": 128}),
    "granite": ("GraniteConfig", _GQA | {"attention_multiplier": 0.5}),
    "cohere": ("CohereConfig", _GQA),
    "stablelm": ("StableLmConfig", _GQA),
    "diffllama": ("DiffLlamaConfig", _GQA),
    "doge": ("DogeConfig", _GQA),
    "gpt-oss": ("GptOssConfig", _GQA | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}),
    "mixtral": ("MixtralConfig", _GQA | {"num_local_experts": 4}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        _GQA | {"moe_intermediate_size": 72, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32},
    ),
}


def build(path: Path, family: str, dtype: torch.dtype, shard_size: str, changes: dict) -> Path:
    name, settings = FAMILIES[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**settings | changes)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)  # biases and norms that matter
    model.config.dtype = dtype
    model.save_pretrained(path, max_shard_size=shard_size)
    byte_tokenizer().save_pretrained(path)
    return path


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A token for each byte, and one that starts a text: fits any vocabulary of 257 and more."""
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({"<s>": 0} | {letter: 1 + i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")

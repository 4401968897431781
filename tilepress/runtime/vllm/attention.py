"""Attention of vLLM over our pages: its blocks are pages of 64 tokens (formats/kv_pages.py), and all that reads or writes them are our ops.

    keys and values after vLLM's RoPE -> kv_append | queries -> decode_attention_into: single tokens, drafts, short pieces of prompts
                                                   | long pieces of prompts: kv_read, then vLLM's own attention over what it gives

Nothing is read from the card: lengths, tables and where each sequence's queries begin stay there, in memory that stands still, and what is launched
follows from shapes. So a captured graph goes on to hold. Steps with long pieces are in no graph, and the scheduler's own numbers say how long they are.

An artifact's sidecar says that it has a cache, whatever its `quantization_config` says, so no quantization method of vLLM's can bring it. What every
model does is to make attention layers: `watch` wraps their constructors, the one place of vLLM that this package changes. A layer that cache.py has a
cache for is given our backend, by the constructor's own argument, and asks for pages of our size.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tilepress.formats import UsageError
from tilepress.formats.kv_int4 import PAGE_TOKENS
from tilepress.kernels import decode_attention_mma, kv_read
from tilepress.runtime.attention import PackedLayer, attention
from tilepress.runtime.vllm import compat
from tilepress.runtime.vllm.cache import cache_for, calibration_for, check_block_size, why_slow

# Queries of a piece of a prompt from which on its pages are read back for vLLM's attention: on an H100 that took 111 us for 2048 tokens of 32 heads, where
# decode_attention took 282. Shorter ones share a launch. Of longer sequences nothing is read back: it would take too much memory.
LONG = 256
_MOST_READ = 1 << 15  # tokens


def watch() -> None:
    """Give the attention layers that are made from now on the cache of their artifact; calling it again does nothing more."""
    for layer in (Attention, MLAAttention):  # the second for what it is told: that it is not served
        if not getattr(layer.__init__, "gives_caches", False):
            layer.__init__ = _giving_caches(layer.__init__)


def _giving_caches(made: Callable) -> Callable:
    """Return a layer's constructor that gives it a cache where there is one."""

    @functools.wraps(made)
    def make(self: torch.nn.Module, *args, **kwargs) -> None:
        asked = inspect.signature(made).bind(self, *args, **kwargs).arguments
        cache = cache_for(get_current_vllm_config(), asked)
        if cache is None:
            return made(self, *args, **kwargs)
        made(self, *args, **kwargs | {"attn_backend": PackedBackend})
        self.impl.cache = cache
        self.get_kv_cache_spec = functools.partial(spec, self)
        return None

    make.gives_caches = True
    return make


class PackedBackend(AttentionBackend):
    """What vLLM asks of a backend."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return compat.backend_name(PackedBackend)

    @staticmethod
    def get_impl_cls() -> type["PackedAttention"]:
        return PackedAttention

    @staticmethod
    def get_builder_cls() -> type["PackedMetadataBuilder"]:
        return PackedMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(*_) -> list[int]:
        return [PAGE_TOKENS]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Return the shape of a layer's pages; `head_size` is that of `spec`. Versions from 0.31 on lay blocks out themselves."""
        return num_blocks, num_kv_heads, block_size * head_size

    @classmethod
    def supported_kv_cache_layouts(cls):
        """Return the one layout in which the pages of a layer follow one another, heads outside tokens."""
        return compat.layouts()


def spec(layer: torch.nn.Module, vllm_config: VllmConfig) -> FullAttentionSpec:
    """Return what a layer asks of the memory: a token and head is a `head_size` of single bytes, its key's row and its value's.

    It stands in for vLLM's method of a layer. Raises UsageError for blocks that are no whole pages."""
    tokens = vllm_config.cache_config.block_size
    check_block_size(tokens)
    form = layer.impl.cache.layer_form
    size = form.key.row_bytes + form.value.row_bytes
    return FullAttentionSpec(
        block_size=tokens, num_kv_heads=layer.num_kv_heads, head_size=size, head_size_v=0, dtype=torch.uint8
    )


@dataclass
class Piece:
    """A long piece of a prompt: some rows of a batch, the last tokens of one sequence."""

    rows: slice
    length: int  # of its sequence so far
    table: Tensor  # int32 [1, pages]
    seq_lens: Tensor  # int32 [1]
    ends: tuple[Tensor, Tensor]  # int32 [2] each: 0 and the number of queries, 0 and the length


@dataclass
class PackedMetadata(AttentionMetadata):
    """A batch. Queries lie sequence after sequence, and each one's are its last tokens. Long pieces stand behind all others."""

    queries: int  # of those others; rows behind them are those of pieces, or padding
    table: Tensor  # int32 [sequences, pages]
    seq_lens: Tensor  # int32 [sequences], the queries among them; 0 for a sequence that only fills a graph's batch up
    starts: Tensor | None  # int32 [sequences + 1]: the rows of each sequence's queries; None: one each
    pieces: tuple[Piece, ...] = ()


class PackedMetadataBuilder(AttentionMetadataBuilder[PackedMetadata]):
    """Hands a batch on as vLLM has it on the card."""

    reorder_batch_threshold = LONG - 1  # vLLM puts sequences with more queries last

    def __init__(self, *args):
        super().__init__(*args)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec) -> AttentionCGSupport:
        """Return what can be captured: steps with as many queries for each sequence, where kernels serve every layer."""
        device, dtype = torch.device(vllm_config.device_config.device), vllm_config.model_config.dtype
        forms = {layer.form for layer in calibration_for(vllm_config).layers}
        is_slow = any(why_slow(form, device, dtype) is not None for form in forms)
        return AttentionCGSupport.NEVER if is_slow else AttentionCGSupport.UNIFORM_BATCH

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PackedMetadata:
        asked = common_attn_metadata
        table, seq_lens, starts = asked.block_table_tensor, asked.seq_lens, asked.query_start_loc
        if pieces := _pieces(asked):
            count, queries = len(seq_lens) - len(pieces), pieces[0].rows.start
            starts = None if queries == count else starts[: count + 1]
            return PackedMetadata(queries, table[:count], seq_lens[:count], starts, pieces)
        is_single = asked.max_query_len == 1 and asked.num_actual_tokens == asked.num_reqs
        return PackedMetadata(asked.num_actual_tokens, table, seq_lens, None if is_single else starts)


def _pieces(asked: CommonAttentionMetadata) -> tuple[Piece, ...]:
    """Return the long pieces of prompts that a batch ends with. How long they are the scheduler knows."""
    if asked.max_query_len < LONG or asked.seq_lens_cpu_upper_bound is None:
        return ()
    begins, lengths = asked.query_start_loc_cpu.tolist(), asked.seq_lens_cpu_upper_bound.tolist()
    found: list[Piece] = []
    for i in range(asked.num_reqs - 1, -1, -1):
        first, end = begins[i : i + 2]
        if end - first < LONG or lengths[i] > _MOST_READ:
            break
        seq_lens, starts = asked.seq_lens[i : i + 1], asked.query_start_loc[i : i + 2]
        ends = starts - starts[0], torch.nn.functional.pad(seq_lens, (1, 0))
        found.append(Piece(slice(first, end), lengths[i], asked.block_table_tensor[i : i + 1], seq_lens, ends))
    return tuple(reversed(found))


class PackedAttention(AttentionImpl[PackedMetadata]):
    """One layer's attention."""

    cache: PackedLayer  # is set as soon as the layer is made
    flash: Callable | None  # vLLM's own attention over tokens that lie one behind another

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **_,
    ):
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self.seen = self.pages = None  # the layer's memory as vLLM gave it last, and as pages
        self.max_model_len = get_current_vllm_config().model_config.max_model_len

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Compile and load the kernels, on a page of nothing: a graph can do neither, and no request should wait for it."""
        heads, size, device = self.num_kv_heads, self.cache.layer_form.page_bytes, self.cache.device
        self.flash = compat.flash_attention() if act_dtype != torch.float32 else None
        self.reads_back = device.type == "cpu" or not kv_read.path(device, self.cache.layer_form).is_reference
        pages = torch.zeros(1, heads, size, dtype=torch.uint8, device=device)
        row = torch.zeros(1, heads, self.head_size, dtype=act_dtype, device=device)
        query = row.new_zeros(1, self.num_heads, self.head_size)
        table, seq_lens = torch.zeros(2, 1, 1, dtype=torch.int32, device=device)
        self.cache.append(pages, query, row, row, torch.full((1,), -1, device=device), None, False)
        self.cache.decode(pages, query, table, seq_lens[0], self.scale)
        for rows in decode_attention_mma.ROWS:
            queries = query.expand(max(1, rows * heads // self.num_heads), -1, -1)
            starts = torch.tensor([0, len(queries)], dtype=torch.int32, device=device)
            self.cache.decode(pages, queries, table, seq_lens[0], self.scale, starts=starts)
        if self.reads_back:
            self.cache.read(pages, table, seq_lens[0], PAGE_TOKENS, act_dtype)

    def do_kv_cache_update(self, layer, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Store key and value [tokens, KV heads, D] of as many tokens as there are slots; -1 is none."""
        if len(key) > len(slot_mapping):
            key, value = key[: len(slot_mapping)], value[: len(slot_mapping)]
        self.cache.append(self._pages(kv_cache), key, key, value, slot_mapping, None, False)

    def forward(
        self,
        layer,
        query: Tensor,  # [tokens, heads, D]
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PackedMetadata | None,
        output: Tensor,  # [tokens, heads, D]
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:  # the engine measures what a batch takes, before it has pages
            query.new_empty(2, min(self.max_model_len, _MOST_READ), self.num_kv_heads, self.head_size)
            return output.fill_(0)
        batch, pages = attn_metadata, self._pages(kv_cache)
        if rows := batch.queries:
            asked = query[:rows], batch.table, batch.seq_lens, self.scale
            self.cache.decode(pages, *asked, starts=batch.starts, out=output[:rows])
        for piece in batch.pieces:
            self._attend(pages, query[piece.rows], piece, output[piece.rows])
        return output

    def _attend(self, pages: Tensor, query: Tensor, piece: Piece, out: Tensor) -> None:
        """Write the attention of a long piece's queries [rows, heads, D] to out."""
        if not self.reads_back:
            self.cache.decode(pages, query, piece.table, piece.seq_lens, self.scale, starts=piece.ends[0], out=out)
            return
        room = -(-piece.length // PAGE_TOKENS) * PAGE_TOKENS  # so that lengths that are nearly alike are launched alike
        read = self.cache.read(pages, piece.table, piece.seq_lens, room, query.dtype)
        if self.flash is None:
            keys, values = (x[:, :, : piece.length] for x in read)
            out.copy_(attention(query.transpose(0, 1)[None], keys, values, self.scale)[0].transpose(0, 1))
            return
        keys, values = (x[0].transpose(0, 1) for x in read)
        starts, ends = piece.ends
        sizes = {"max_seqlen_q": len(query), "cu_seqlens_q": starts, "max_seqlen_k": room, "cu_seqlens_k": ends}
        self.flash(query, keys, values, **sizes, softmax_scale=self.scale, causal=True, out=out)

    def _pages(self, kv_cache: Tensor) -> Tensor:
        """Return a layer's memory as uint8 [pages, KV heads, page_bytes]. Raises UsageError where vLLM laid it out otherwise."""
        if kv_cache is self.seen:
            return self.pages
        shape = kv_cache.shape[0], self.num_kv_heads, self.cache.layer_form.page_bytes
        if kv_cache.numel() != shape[0] * shape[1] * shape[2] or not kv_cache.is_contiguous():
            raise UsageError(
                f"vLLM gave memory {list(kv_cache.shape)} for pages {list(shape)}", "set TILEPRESS_VLLM_KV=plain"
            )
        self.seen, self.pages = kv_cache, kv_cache.view(torch.uint8).view(shape)
        return self.pages

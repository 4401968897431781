"""Attention of vLLM over our pages: its blocks are pages of 64 tokens (formats/kv_pages.py), and all that reads or writes them are our ops.

    keys and values after vLLM's RoPE -> kv_append | decoding requests: decode_attention | prompts: what the pages hold is read back (kv_read)

The scheduler keeps decoding requests in front. With speculation they bring several queries each; every query is then a sequence of its own, which shares
the block table and ends at the query's position. In a decode step nothing is read from the card: lengths and tables stay there, in memory that
stands still, so that a captured graph goes on to hold.

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
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tilepress.formats import UsageError
from tilepress.formats.kv_int4 import PAGE_TOKENS
from tilepress.kernels import decode_attention
from tilepress.runtime.attention import PackedLayer
from tilepress.runtime.vllm import compat
from tilepress.runtime.vllm.cache import cache_for, calibration_for, check_block_size


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
class PackedMetadata(AttentionMetadata):
    """A batch: `decodes` queries in front, each with a block table and a length, then prompts."""

    decodes: int
    table: Tensor  # int32 [decodes, pages]
    seq_lens: Tensor  # int32 [decodes]: tokens up to the query and with it
    prompts: list["Prompt"]


@dataclass
class Prompt:
    """A request with several queries: its last tokens."""

    rows: slice  # of the batch's queries
    table: Tensor  # int32 [1, pages]
    seq_lens: Tensor  # int32 [1]
    length: int  # of which the host knows that it is not less
    positions: Tensor | None  # int64 [1, rows], where `length` may be more


class PackedMetadataBuilder(AttentionMetadataBuilder[PackedMetadata]):
    """Says of each batch which queries decode, without waiting for the card."""

    def __init__(self, kv_cache_spec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        # Ahead of the card the host does not know how many drafted tokens were taken: lengths are bounds then.
        speculates = vllm_config.speculative_config is not None
        self.knows_lengths = not (speculates and vllm_config.scheduler_config.async_scheduling)
        self._most = vllm_config.scheduler_config.max_num_seqs * self.reorder_batch_threshold
        self._kept: tuple[Tensor, Tensor] | None = None

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec) -> AttentionCGSupport:
        """Return whether decode steps can be captured: where kernels serve every layer."""
        calibration, device = calibration_for(vllm_config), vllm_config.device_config.device
        forms = {layer.form for layer in calibration.layers}
        missing = [
            decode_attention.why_not(torch.device(device), form, vllm_config.model_config.dtype) for form in forms
        ]
        return AttentionCGSupport.NEVER if any(why is not None for why in missing) else AttentionCGSupport.UNIFORM_BATCH

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PackedMetadata:
        asked = common_attn_metadata
        requests, _, decodes, _ = split_decodes_and_prefills(asked, self.reorder_batch_threshold)
        table, seq_lens = asked.block_table_tensor[:requests], asked.seq_lens[:requests]
        if decodes != requests:
            table, seq_lens = self._each_query(asked, table, seq_lens, decodes)
        return PackedMetadata(decodes, table, seq_lens, self._prompts(asked, requests))

    def _each_query(
        self, asked: CommonAttentionMetadata, table: Tensor, seq_lens: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        """Return a block table and a length for each of the first `count` queries, 0 for those that only fill a graph's batch up."""
        if self._kept is None:
            rows = max(self._most, count)
            self._kept = table.new_zeros(rows, table.shape[1]), seq_lens.new_zeros(rows)
        tables, lengths = (kept[:count] for kept in self._kept)
        starts = asked.query_start_loc[: len(seq_lens) + 1]
        query = torch.arange(count, dtype=starts.dtype, device=starts.device)
        request = torch.searchsorted(starts[1:], query, right=True).clamp(max=len(seq_lens) - 1)
        after = starts[1:][request] - 1 - query  # queries of the same request that come behind
        lengths.copy_(torch.where(after >= 0, seq_lens[request] - after, 0))
        torch.index_select(table, 0, request, out=tables)
        return tables, lengths

    def _prompts(self, asked: CommonAttentionMetadata, first: int) -> list[Prompt]:
        starts, bounds = asked.query_start_loc_cpu.tolist(), asked.seq_lens_cpu_upper_bound
        found = []
        for i in range(first, asked.num_reqs):
            rows, seq_lens = slice(starts[i], starts[i + 1]), asked.seq_lens[i : i + 1]
            if (count := rows.stop - rows.start) == 0:
                continue
            is_known = self.knows_lengths and bounds is not None
            places = None if is_known else (seq_lens.long() - count + torch.arange(count, device=seq_lens.device))[None]
            length = asked.max_seq_len if bounds is None else int(bounds[i])
            found.append(Prompt(rows, asked.block_table_tensor[i : i + 1], seq_lens, length, places))
        return found


class PackedAttention(AttentionImpl[PackedMetadata]):
    """One layer's attention."""

    cache: PackedLayer  # is set as soon as the layer is made

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

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Compile and load the kernels, on a page of nothing: a graph can do neither."""
        heads, size, device = self.num_kv_heads, self.cache.layer_form.page_bytes, self.cache.device
        pages = torch.zeros(1, heads, size, dtype=torch.uint8, device=device)
        rows = torch.zeros(1, heads, self.head_size, dtype=act_dtype, device=device)
        query = rows.new_zeros(1, self.num_heads, self.head_size)
        table, seq_lens = torch.zeros(2, 1, 1, dtype=torch.int32, device=device)
        self.cache.append(pages, query, rows, rows, torch.full((1,), -1, device=device), None, False)
        self.cache.decode(pages, query, table, seq_lens[0], self.scale)
        self.cache.prefill(pages, query.transpose(0, 1)[None], table, seq_lens[0], 1, self.scale)

    def do_kv_cache_update(self, layer, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Store key and value [tokens, KV heads, D] of as many tokens as there are slots; -1 is none."""
        rows = slice(len(slot_mapping))
        self.cache.append(self._pages(kv_cache), key[rows], key[rows], value[rows], slot_mapping, None, False)

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
            return output.fill_(0)
        pages, batch = self._pages(kv_cache), attn_metadata
        if batch.decodes:
            rows = slice(batch.decodes)
            output[rows] = self.cache.decode(pages, query[rows], batch.table, batch.seq_lens, self.scale)
        for prompt in batch.prompts:
            queries = query[prompt.rows].transpose(0, 1)[None]
            of_prompt = prompt.table, prompt.seq_lens, prompt.length, self.scale, prompt.positions
            output[prompt.rows] = self.cache.prefill(pages, queries, *of_prompt)[0].transpose(0, 1)
        return output

    def _pages(self, kv_cache: Tensor) -> Tensor:
        """Return a layer's memory as uint8 [pages, KV heads, page_bytes]. Raises UsageError where vLLM laid it out otherwise."""
        shape = kv_cache.shape[0], self.num_kv_heads, self.cache.layer_form.page_bytes
        if kv_cache.numel() != shape[0] * shape[1] * shape[2] or not kv_cache.is_contiguous():
            raise UsageError(
                f"vLLM gave memory {list(kv_cache.shape)} for pages {list(shape)}", "set TILEPRESS_VLLM_KV=plain"
            )
        return kv_cache.view(torch.uint8).view(shape)

"""Chooses the tile sizes and the number of splits of each step's attention.

This module owns the choice, and thereby the number of kernel variants and the size of the scratch
memory. It knows the padded sizes of a step; it must not know lengths of contexts, since a captured
graph serves all lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from shmllm.models.compressed_specs import CompressedAttentionSpec
from shmllm.models.config import ModelConfig
from shmllm.models.mixer_specs import AnyAttention, LatentAttentionSpec
from shmllm.worker.gpu.graph_dispatcher import BatchDescriptor
from shmllm_kernels.gpu.configs import (
    AttentionConfig,
    attention_config,
    latent_config,
    num_splits,
    verify_config,
)
from shmllm_kernels.gpu.decode_attention import MAX_TOKENS
from shmllm_kernels.gpu.latent_attention import heads_per_program

DETERMINISTIC_SPLITS = 8
"""The number of splits of every decode whose bits must not depend on the other requests."""


def max_verified(most_drafted: int) -> int:
    """Return `BatchDescriptor.max_verified` of steps in which a request has at most so many drafted
    tokens: one more, if `decode_attention` takes them."""
    return most_drafted + 1 if 0 < most_drafted < MAX_TOKENS else 0


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The heads of a layer's attention, by which its launches differ.

    Attributes:
        num_heads: the number of query heads.
        num_kv_heads: the number of key-value heads.
        head_dim: the width of a query; of a latent attention, that of a latent.
        value_dim: the width of a head's output, before a latent one is projected to values.
        is_latent: whether a key is its own value: in a latent attention, and a compressed one.
        is_chosen: whether each token attends to what was chosen for it, as a request of its own.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    is_latent: bool = False
    is_chosen: bool = False

    @classmethod
    def of(cls, spec: AnyAttention) -> HeadShape:
        """Return the heads of a layer."""
        if isinstance(spec, CompressedAttentionSpec):
            sizes = spec.num_heads, 1, spec.head_dim, spec.head_dim
            return cls(*sizes, is_latent=True, is_chosen=True)
        if isinstance(spec, LatentAttentionSpec):
            sizes = spec.num_heads, 1, spec.rank, spec.rank
            return cls(*sizes, is_latent=True, is_chosen=spec.indexer is not None)
        sizes = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_head_dim
        return cls(*sizes, is_chosen=spec.indexer is not None)


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """What the launches of a step's attention in layers of the same heads have in common.

    Attributes:
        config: the tile sizes.
        num_splits: the number of parts that each context is split into.
        masks_all: see `paged_attention`.
        max_tokens: the most tokens of a request, if it is so few that `decode_attention` takes
            them; 0: it does not.
    """

    config: AttentionConfig
    num_splits: int
    masks_all: bool
    max_tokens: int = 0

    @property
    def loads_first(self) -> bool:
        """Whether programs of `decode_attention` load their first keys and values before their
        queries: those of several tokens do, which are few if they are split."""
        return self.max_tokens > 1 and self.num_splits > 1


@dataclass(frozen=True, slots=True)
class AttentionLaunches:
    """The choice for a model on a device.

    Attributes:
        model: the model's configuration.
        dtype: the dtype of queries, and of keys and values unless they are in FP8.
        device: the device.
        deterministic: whether the bits of a decode's attention are independent of the number of
            decodes, and those of a prompt's attention independent of its chunks: each decode step
            has the same number of splits, as has each step that verifies drafts, and other steps
            are not split.
        max_verified: the descriptors' number of this name for steps that verify drafts.
    """

    model: ModelConfig
    dtype: torch.dtype
    device: torch.device
    deterministic: bool
    max_verified: int = 0

    @property
    def head_shapes(self) -> tuple[HeadShape, ...]:
        """The different heads of the model's layers."""
        return tuple(dict.fromkeys(map(HeadShape.of, self.model.all_attentions)))

    def choose(
        self, descriptor: BatchDescriptor, max_query_len: int
    ) -> dict[HeadShape, AttentionLaunch]:
        """Return the choice for a step, for each of `head_shapes`.

        Args:
            descriptor: the padded sizes of the step.
            max_query_len: the largest number of tokens of a request; ignored for uniform steps.
        """
        return {heads: self._choose(heads, descriptor, max_query_len) for heads in self.head_shapes}

    def _choose(
        self, shape: HeadShape, descriptor: BatchDescriptor, max_query_len: int
    ) -> AttentionLaunch:
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        if shape.is_chosen:
            descriptor = replace(descriptor, num_reqs=descriptor.num_tokens, uniform=True)
        few = self._few_tokens(shape, descriptor)
        if shape.is_latent:
            longest = few or max_query_len
            config = latent_config(self.device, heads, longest, self.dtype)
            per_program = heads_per_program(heads, config)
            kv_heads = -(-heads // per_program)  # a group of heads has programs of its own
            heads = kv_heads * per_program
        else:
            config = self._config(shape, few, max_query_len, is_split=self.deterministic)
        if self.deterministic:
            is_split = few > 0 and not shape.is_chosen
            return AttentionLaunch(config, DETERMINISTIC_SPLITS if is_split else 1, True, few)
        tokens = descriptor.num_reqs if few == 1 else descriptor.num_tokens
        # Padded requests have no programs to speak of: those with tokens are no fewer than this.
        requests = -(-tokens // few) if few else descriptor.num_reqs
        splits = num_splits(self.device, config, tokens, requests, heads, kv_heads)
        if splits > 1 and not shape.is_latent:
            config = self._config(shape, few, max_query_len, is_split=True)
        return AttentionLaunch(config, splits, few > 0, few)

    def _few_tokens(self, shape: HeadShape, descriptor: BatchDescriptor) -> int:
        """Return `AttentionLaunch.max_tokens`."""
        if descriptor.uniform:
            return 1
        if shape.is_latent or not descriptor.max_verified:
            return 0
        sizes = shape.head_dim, shape.num_heads // shape.num_kv_heads, descriptor.max_verified
        fits = verify_config(self.device, *sizes, self.dtype) is not None
        return descriptor.max_verified if fits else 0

    def _config(
        self, shape: HeadShape, few: int, max_query_len: int, is_split: bool
    ) -> AttentionConfig:
        sizes = self.device, shape.head_dim, shape.num_heads // shape.num_kv_heads
        if few > 1:
            config = verify_config(*sizes, few, self.dtype, is_split)
            assert config is not None, "it fits with and without splits"
            return config
        return attention_config(*sizes, few or max_query_len, self.dtype, is_split)

    def scratch_sizes(self, max_tokens: int, max_requests: int) -> tuple[int, int]:
        """Return the numbers of elements of `AttentionScratch.sums` and `stats` that serve every
        launch. The first is the number of tokens, heads, splits and elements of a head multiplied;
        of tokens times splits there are at most PROGRAMS_PER_PROCESSOR * multiprocessors * block_m,
        or DETERMINISTIC_SPLITS times the tokens of the largest step of decodes or drafts."""
        sums = stats = 0
        for step in _steps(max_tokens, max_requests, self.max_verified):
            for shape, launch in self.choose(step, step.num_tokens).items():
                if launch.num_splits > 1:
                    parts = step.num_tokens * launch.num_splits * shape.num_heads
                    sums, stats = max(sums, parts * shape.value_dim), max(stats, parts * 2)
        return sums, stats

    def variants(
        self,
        max_tokens: int,
        max_requests: int,
        other: Callable[[BatchDescriptor], object] = lambda step: None,
    ) -> list[BatchDescriptor]:
        """Return a small step for each choice of this and, for the same step, of other kernels."""
        found = {
            (*self.choose(step, step.num_tokens).values(), other(step)): step
            for step in _steps(max_tokens, max_requests, self.max_verified)
        }
        return list(found.values())


def _steps(max_tokens: int, max_requests: int, max_verified: int) -> Iterator[BatchDescriptor]:
    """Yield a step of every number of programs, large steps before small ones: the decodes, one
    prompt of any length, decodes beside a prompt, and drafts to verify."""
    most = min(max_requests, max_tokens)
    for count in range(most, 0, -1):
        yield BatchDescriptor(count, count, True)
    for count in range(max_tokens, 1, -1):
        yield BatchDescriptor(count, 1, False)
    for count in range(min(most, max_tokens - 1), 0, -1):
        yield BatchDescriptor(count + 1, count, False)
    for count in range(min(max_requests * max_verified, max_tokens), 1, -1):
        yield BatchDescriptor(count, min(count, max_requests), False, 0, max_verified)

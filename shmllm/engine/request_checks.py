"""Whether an engine can serve a request, by what the request alone says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shmllm.config.info import EngineInfo
from shmllm.config.items import ItemInfo
from shmllm.engine.runner import Runner
from shmllm.params.items import COUNTED, Item
from shmllm.params.pooling import Pooling, PoolingType
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams


def refusal_of(request: EngineCoreRequest, info: EngineInfo) -> str | None:
    """Return why an engine cannot serve a request; None if it can."""
    ids, longest = request.prompt_token_ids, info.max_model_len
    params = request.params
    is_generating = isinstance(params, SamplingParams)
    if not 0 < len(ids) <= longest - is_generating:  # one token of room for the output
        return f"a prompt of {len(ids):,} tokens does not fit max_model_len {longest:,}"
    num_encoded = info.items.num_encoded
    if num_encoded and not _is_at_the_beginning(request.items):
        return "the model needs one item, whose positions are the first ones"
    if problem := _refusal_of_items(request.items, num_encoded + len(ids), info.items):
        return problem
    if not all(_are_known(each, info) for each in (ids, request.encoder_token_ids) if each):
        return f"a token id lies outside the vocabulary of {info.vocab_size:,}"
    if isinstance(params, SamplingParams):
        return _refusal_of_params(params, len(ids), info)
    return _refusal_of_pooling(params, info)


def _is_at_the_beginning(items: Sequence[Item]) -> bool:
    return len(items) == 1 and items[0].start == 0 and len(items[0].spans) == 1


def check_tensors(request: EngineCoreRequest, runner: Runner) -> None:
    """Check the embeddings and the items of a request, and convert the embeddings for the runner.

    Raises:
        RequestError: they do not suit the model.
    """
    if request.embeds is not None:
        request.embeds = runner.check_embeds(request.embeds, len(request.prompt_token_ids))
    for item in request.items:
        runner.check_item(item)


def _refusal_of_items(items: Sequence[Item], num_tokens: int, info: ItemInfo) -> str | None:
    before = 0
    for item in items:
        kind = item.modality
        if kind not in info.modalities:
            return f"the model takes no {COUNTED[kind]}"
        if not before <= item.start < item.end <= num_tokens:
            return "the items of the prompt overlap, or lie behind its end"
        before = item.end
        if item.num_embeds > info.most_embeds:
            return (
                f"an item ({kind}) has {item.num_embeds:,} embeddings, the engine has room for "
                f"{info.most_embeds:,}: raise max_num_batched_tokens, or prepare it smaller "
                "(mm_processor_kwargs)"
            )
        longest = max(end - begin for begin, end in item.spans)
        if item.looks_ahead and 0 < info.longest_span < longest:
            return (
                f"an item ({kind}) has {longest:,} embeddings in a row that attend to each other, "
                f"a step has room for {info.longest_span:,}: raise max_num_batched_tokens, or "
                "prepare it smaller (mm_processor_kwargs)"
            )
    return None


def _refusal_of_pooling(pooling: Pooling, info: EngineInfo) -> str | None:
    if pooling.uses_head and not info.pooling.head:
        return "the model has neither a projection nor a classifier"
    is_sparse = pooling.uses_head and info.pooling.head == "sparse" and info.pooling.both_ways
    if pooling.type is PoolingType.MAX and not is_sparse:
        return "the model computes no sparse vectors"
    if pooling.second_segment and not info.pooling.token_types:
        return "the tokens of the model have no types, so a prompt has no second segment"
    return None


def _are_known(token_ids: Sequence[int], info: EngineInfo) -> bool:
    array = np.asarray(token_ids)
    return bool(0 <= array.min() <= array.max() < info.vocab_size)


def _refusal_of_params(params: SamplingParams, num_tokens: int, info: EngineInfo) -> str | None:
    if not info.pooling.generates:
        return "the engine generates no tokens: ask it for vectors or scores"
    for name in ("logprob_token_ids", "trace_decode_token_ids"):
        token_ids = getattr(params, name)
        if token_ids is not None and not _are_known(token_ids, info):
            return f"{name} has an id outside the vocabulary of {info.vocab_size:,}"
    table = params.prompt_logprob_token_ids
    if table is not None:
        if max(table.ids) >= info.vocab_size:
            return (
                f"prompt_logprob_token_ids has an id outside the vocabulary of {info.vocab_size:,}"
            )
        if len(table) + (params.prompt_logprob_start or 0) != num_tokens - 1:
            return f"prompt_logprob_token_ids has {len(table):,} rows, which do not suit the prompt"
    of_outputs = params.logprobs if params.logprob_token_ids is None else None
    asked = (of_outputs, params.prompt_logprobs, None if table is None else table.width)
    wanted = max(number or 0 for number in asked)
    if -1 in asked:
        wanted = info.vocab_size
    if wanted > info.max_logprobs:
        return f"{wanted:,} logprobs exceed max_logprobs {info.max_logprobs:,}"
    return None

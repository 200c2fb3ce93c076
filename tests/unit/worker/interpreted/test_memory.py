"""The memory of a device that the engine's start leaves nothing of: no request needs more."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.gpu_draft_heads import HEAD, with_head
from conformance.gpu_drafting_models import with_further, with_model
from conformance.gpu_drafts import RIGHT, SPECULATIVE, ScriptedDrafter, draft_with
from conformance.gpu_engine import BLOCK_SIZE, PROMPTS, SHAPE, Engine, make_config
from support.draft_heads import EagleHead
from support.fake_gpu import FakeGpu, eager
from support.further_layers import make, save_both
from support.model_helpers import reference_model, save

import shmllm
from shmllm.config.engine import CacheConfig, EngineConfig, LogprobsConfig
from shmllm.config.speculative import SpeculativeConfig
from shmllm.params.pooling import Pooling, PoolingType
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams

TOTAL_BYTES = 4 * 2**20
OF_DRAFTER_BYTES = 2**20
VOCAB = 4096
NUM_ROWS = 4
REQUESTS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.7, "presence_penalty": 0.9},
    "allowed ids": {"allowed_token_ids": [3, 50, 60]},
    "grammar": {"grammar": 'start: "a" | "b"'},
    "filters": {"temperature": 1.0, "top_k": 3000, "top_p": 0.9, "seed": 5},
    "bias": {"logit_bias": {7: 30.0}, "bad_words": [(0, 1), (2,)]},
    "logprobs": {"logprobs": 20},
    "prompt logprobs": {"prompt_logprobs": 5},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the bundled tokenizer, and a head that drafts for it in a directory below."""
    reference = reference_model("llama", vocab_size=VOCAB, **SHAPE)
    made = save(reference, tmp_path_factory.mktemp("llama"))
    EagleHead(reference, levels=(0, 1, 2), num_drafted=VOCAB - 1).save(made / HEAD)
    return with_tokenizer(made)


@pytest.fixture(scope="module")
def further(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a layer behind it that predicts a further token."""
    models = make("deepseek_v3", vocab_size=VOCAB, hidden_size=SHAPE["hidden_size"])
    return with_tokenizer(save_both(*models, tmp_path_factory.mktemp("deepseek")))


def with_tokenizer(made: Path) -> Path:
    assets = Path(shmllm.__file__).parent / "assets/tiny"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(assets / name, made)
    return made


def with_drafter(config: EngineConfig, drafter: str | None) -> EngineConfig:
    """The configuration with this method of drafting."""
    if drafter == "draft_model":
        return with_model(config, Path(config.load.directory))
    if drafter == "mtp":
        return with_further(config, 2)
    if drafter == "eagle3":
        return with_head(config, Path(config.load.directory) / HEAD)
    return replace(config, speculative=SPECULATIVE if drafter else SpeculativeConfig())


def add(engine: Engine, number: int, grammar: str = "", **options: Any) -> None:
    if not grammar:
        engine.add(number, PROMPTS[0], **options)
        return
    params = SamplingParams(temperature=0.0, max_tokens=4)
    request = EngineCoreRequest(number, PROMPTS[0], params, grammar=grammar)
    assert engine.core.add(0, request) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("max_logprobs", "drafter"),
    [(20, None), (-1, None), (20, "ngram"), (20, "draft_model"), (20, "mtp"), (20, "eagle3")],
)
def test_no_request_needs_memory_that_the_cache_has(
    directory: Path, further: Path, max_logprobs: int, drafter: str | None
) -> None:
    model = further if drafter == "mtp" else directory
    config = make_config(model, mode="NONE", overlaps=False, num_seqs=NUM_ROWS)
    config = replace(
        config,
        cache=CacheConfig(BLOCK_SIZE, gpu_memory_utilization=1.0),
        logprobs=LogprobsConfig(max_logprobs),
    )
    is_model = drafter in ("draft_model", "mtp", "eagle3")
    total_bytes = TOTAL_BYTES + (OF_DRAFTER_BYTES if is_model else 0)
    with FakeGpu(eager, total_bytes) as device:
        engine = Engine(with_drafter(config, drafter), device)
        assert engine.runner.info.kv_cache_bytes > TOTAL_BYTES / 8
        if drafter == "ngram":
            draft_with(engine, ScriptedDrafter(dict.fromkeys(range(21), [3, 50] * 9), RIGHT))
        names = list(REQUESTS)
        for first in range(0, len(names), NUM_ROWS):
            for number, name in enumerate(names[first : first + NUM_ROWS], first):
                add(engine, number, **REQUESTS[name])
            engine.run()
        for number in range(10, 10 + NUM_ROWS - 1):
            engine.add(number, PROMPTS[1], logprobs=max_logprobs, prompt_logprobs=max_logprobs)
        engine.add(20, [0] * 5, embeds=torch.ones(5, SHAPE["hidden_size"]))
        pooling = EngineCoreRequest(21, PROMPTS[0], Pooling(PoolingType.MEAN))
        assert engine.core.add(0, pooling) is None
        engine.run()
        generated = [*range(len(names)), *range(10, 10 + NUM_ROWS - 1), 20]
        assert all(engine.tokens[number] for number in generated)
        assert (engine.core.scheduler.stats.draft_tokens > 20) == bool(drafter)
        assert len(engine.vectors[21]) == 4 * SHAPE["hidden_size"]

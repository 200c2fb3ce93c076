"""The tests of drafted tokens in a whole engine on a device: whatever is drafted, an engine gives
the tokens that it gives without drafts.

Each folder has a fixture `gpu_device`: the fake GPU, or a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conformance.gpu_engine import (
    PROMPTS,
    SCALE,
    SHAPE,
    VOCAB,
    Engine,
    assert_same_logprobs,
    make_config,
)
from conformance.gpu_program import SHAPE as PROGRAM_SHAPE
from conformance.gpu_program import VARIANTS
from support.model_helpers import reference_model, save
from support.processors import FavourOne
from support.variants import slow
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from shmllm.config.engine import EngineConfig
from shmllm.config.graphs import GraphConfig
from shmllm.config.speculative import SpeculativeConfig
from shmllm.core.request import Request
from shmllm.engine.drafting.drafter import Drafter
from shmllm.engine.drafting.drafting import Drafting
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams
from shmllm.params.thinking import ThinkingBudget
from shmllm.worker.gpu.device import Device

NUM_ROWS = 6
MOST_DRAFTED = 4
SPECULATIVE = SpeculativeConfig("ngram", MOST_DRAFTED, adaptive=False)
COUNT = 12
"""The largest number of tokens of an output."""
RIGHT, WRONG, MIXED, ANY = 1.0, 0.0, 0.7, -1.0
"""The probability that a drafted token is right; ANY: any token is drafted."""
PENALTIES = {"repetition_penalty": 1.6, "frequency_penalty": 0.7, "presence_penalty": 0.4}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"logprobs": 3, "prompt_logprobs": 1},
    "drawn": {"temperature": 1.0, "seed": 3},
    "filtered": {
        "temperature": 1.3,
        "top_k": 9,
        "top_p": 0.9,
        "min_p": 0.01,
        "seed": 1,
        "logprobs": 0,
    },
    "penalties": {**PENALTIES, "logprobs": 2},
    "drawn with penalties": {"temperature": 1.5, "top_k": 20, "seed": 8, **PENALTIES},
    "few tokens, repeated": {"allowed_token_ids": [3, 50, 60, 61], "frequency_penalty": 2.0},
    "bad words": {
        "bad_words": [(first, last) for first in range(VOCAB) for last in range(0, 90, 2)]
    },
    "biases": {"logit_bias": {7: 30.0, 8: 29.0, 9: 28.0}, "presence_penalty": 0.8},
    "min_tokens": {"min_tokens": 7, "stop_token_ids": [8, 9], "logit_bias": {8: 25.0, 9: 30.0}},
    "thinking": {
        "thinking": ThinkingBudget(2, (31,), (20, 21), (20, 21)),
        "allowed_token_ids": [31, 20, 21, 40],
        "temperature": 2.0,
        "presence_penalty": 1.0,
        "seed": 4,
    },
    "grammar": {"grammar": "start: /([a-m][n-z])*/"},
    "drawn by a grammar": {"grammar": "start: /([ab]c?){15}/", "temperature": 1.0, "seed": 2},
    "trace": {"trace_decode_token_ids": list(range(5, 5 + COUNT))},
}


class ScriptedDrafter:
    """Drafts the tokens that an engine without drafts gives, or others.

    Args:
        wanted: by number of a request, the tokens of its output.
        right: the probability of a right token, or ANY. If it is neither 0 nor 1, there are
            drafts of any length.
    """

    catches_up = False

    def __init__(self, wanted: dict[int, list[int]], right: float) -> None:
        self._wanted = wanted
        self._right = right
        self._random = random.Random(7)

    def draft(self, request: Request, most: int) -> Sequence[int]:
        known = request.num_output_tokens
        ahead = self._wanted[request.number][known : known + most]
        if self._right not in (RIGHT, WRONG):
            ahead = ahead[: self._random.randint(0, most)]
        return [self._one(token) for token in ahead]

    def _one(self, token: int) -> int:
        if self._right == ANY:
            return self._random.randrange(VOCAB)
        return token if self._random.random() < self._right else (token + 1) % VOCAB


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer of single characters."""
    made = save(reference_model("llama", SCALE, **SHAPE), tmp_path_factory.mktemp("llama"))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCAB - 1]
    tokenizer = Tokenizer(
        models.BPE({letter: number for number, letter in enumerate(letters, 1)} | {"<s>": 0}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(made / "tokenizer.json"))
    return made


def drafting_config(
    directory: Path, mode: str, *, sizes: tuple[int, ...] = (2, 4, 8, 24), **options: Any
) -> EngineConfig:
    config = make_config(directory, mode=mode, num_seqs=NUM_ROWS, **{"budget": 32} | options)
    return replace(
        config,
        graphs=GraphConfig(mode, None if mode == "NONE" else sizes),
        speculative=SPECULATIVE,
    )


def without_drafts(config: EngineConfig) -> EngineConfig:
    return replace(config, speculative=SpeculativeConfig())


def add(engine: Engine, number: int, name: str) -> None:
    options = {"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True} | REQUESTS[name]
    own = {key: options.pop(key) for key in ("bad_words", "grammar", "thinking") if key in options}
    params = SamplingParams(**options)
    request = EngineCoreRequest(number, PROMPTS[number % 3], params, **own)
    assert engine.core.add(0, request) is None


def draft_with(engine: Engine, drafter: Drafter) -> None:
    scheduler, runner = engine.core.scheduler, engine.runner
    engine.core.drafting = Drafting(SPECULATIVE, drafter, scheduler, runner.keeps_state_of)


def run_all(engine: Engine, names: Sequence[str]) -> None:
    for number, name in enumerate(names):
        add(engine, number, name)
    engine.run()


def num_drafted(engine: Engine) -> tuple[int, int]:
    """How many drafted tokens were computed, and accepted."""
    stats = engine.core.scheduler.stats
    return stats.draft_tokens, stats.accepted_tokens


def assert_same(ours: Engine, other: Engine) -> None:
    assert ours.tokens == other.tokens
    assert ours.ends == other.ends
    assert_same_logprobs(ours, other)


class DraftsConformance:
    @pytest.mark.parametrize(
        ("mode", "drafted"),
        [
            slow("FULL_AND_PIECEWISE", [RIGHT, WRONG, MIXED, ANY]),
            *(
                slow(mode, [RIGHT, WRONG, MIXED, ANY])
                for mode in ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY")
            ),
        ],
    )
    def test_drafts_change_no_output(
        self, directory: Path, gpu_device: Device, mode: str, drafted: list[float]
    ) -> None:
        config = drafting_config(directory, mode)
        plain, names = Engine(without_drafts(config), gpu_device), list(REQUESTS)
        run_all(plain, names)
        assert all(len(tokens) > 3 for tokens in plain.tokens.values())
        ours = Engine(config, gpu_device)
        assert ours.runner.max_in_flight == 1
        for right in drafted:
            ours.tokens, ours.ends, ours.logprobs = {}, {}, {}
            before = num_drafted(ours)
            draft_with(ours, ScriptedDrafter(plain.tokens, right))
            run_all(ours, names)
            assert_same(ours, plain)
            drafts, accepted = (b - a for a, b in zip(before, num_drafted(ours), strict=True))
            assert drafts > 50
            if right in (RIGHT, WRONG):
                assert accepted == (drafts if right == RIGHT else 0)
            else:
                assert (-1 if right == ANY else drafts / 4) < accepted < drafts

    @pytest.mark.slow
    def test_drafts_for_a_module_of_transformers(self, directory: Path, gpu_device: Device) -> None:
        names = ["greedy", "drawn with penalties", "penalties"]
        config = drafting_config(directory, "NONE")
        config = replace(config, load=replace(config.load, model_impl="transformers"))
        plain, ours = (Engine(each, gpu_device) for each in (without_drafts(config), config))
        run_all(plain, names)
        draft_with(ours, ScriptedDrafter(plain.tokens, MIXED))
        run_all(ours, names)
        assert num_drafted(ours)[1] > 5
        assert_same(ours, plain)

    @pytest.mark.slow
    def test_preempted_requests_with_drafts(self, directory: Path, gpu_device: Device) -> None:
        names = ["greedy", "drawn with penalties", "penalties", "drawn"]
        config = drafting_config(directory, "NONE", num_blocks=5)
        plain, ours = (Engine(each, gpu_device) for each in (without_drafts(config), config))
        run_all(plain, names)
        draft_with(ours, ScriptedDrafter(plain.tokens, MIXED))
        run_all(ours, names)
        assert ours.core.scheduler.stats.preemptions > 0
        assert num_drafted(ours)[1] > 5
        assert_same(ours, plain)

    @pytest.mark.slow
    def test_a_custom_processor_changes_its_request_alone(
        self, directory: Path, gpu_device: Device
    ) -> None:
        """Nothing is drafted for it, but for those beside it."""
        names = ["drawn with penalties", "greedy", "drawn by a grammar"]
        config = drafting_config(directory, "NONE")
        plain, ours = (Engine(each, gpu_device) for each in (without_drafts(config), config))
        for engine in (plain, ours):
            engine.runner.use_processors({"FavourOne": FavourOne})
            options = {"temperature": 1.5, "seed": 1, "max_tokens": COUNT, **PENALTIES}
            engine.add(len(names), PROMPTS[0], extra_args={"one": 7, "bias": 20.0}, **options)
        run_all(plain, names)
        draft_with(ours, ScriptedDrafter(plain.tokens, MIXED))
        run_all(ours, names)
        assert num_drafted(ours)[1] > 5
        assert 7 in ours.tokens[len(names)]
        assert_same(ours, plain)

    @pytest.mark.slow
    def test_states_go_back_behind_wrong_drafts(self, gpu_device: Device, tmp_path: Path) -> None:
        made = save(reference_model("mamba", **PROGRAM_SHAPE | VARIANTS["mamba"]), tmp_path)
        names = ["greedy", "drawn with penalties"]
        config = drafting_config(made, "NONE")
        plain, ours = (Engine(each, gpu_device) for each in (without_drafts(config), config))
        run_all(plain, names)
        draft_with(ours, ScriptedDrafter(plain.tokens, MIXED))
        run_all(ours, names)
        drafts, accepted = num_drafted(ours)
        assert drafts > accepted > 5
        assert_same(ours, plain)

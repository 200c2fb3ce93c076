"""The tests of a whole engine on a device, compared with transformers and with the CPU's engine.

Each folder has a fixture `gpu_device`: the fake GPU, or a GPU. The model is as small as possible,
since the interpreter takes milliseconds for each program of a launch.
"""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conformance.device import no_waits
from conformance.gpu_program import SHAPE as PROGRAM_SHAPE
from conformance.gpu_program import VARIANTS
from support.model_helpers import reference_model, save
from support.processors import BatchCount, FavourOne, FlattenDraws
from support.variants import slow

from shmllm.config.engine import CacheConfig, EngineConfig, LogprobsConfig, SchedulerConfig
from shmllm.config.graphs import GraphConfig
from shmllm.config.load import LoadConfig
from shmllm.engine.calls import run_method
from shmllm.engine.core import EngineCore
from shmllm.errors import RequestError
from shmllm.frontend.weights.push import WeightPush
from shmllm.ipc.device_memory import LocalSharing
from shmllm.outputs.columns import FinishReason
from shmllm.outputs.logprobs import LogprobColumns, PromptLogprobs
from shmllm.params.pooling import Pooling, PoolingType
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams
from shmllm.wire.messages import Method
from shmllm.worker.cpu.runner import CpuRunner
from shmllm.worker.gpu.device import Device
from shmllm.worker.gpu.runner import GpuRunner

BLOCK_SIZE, HEAD_DIM, NUM_LAYERS, VOCAB = 8, 16, 2, 97
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 64,
}
BLOCK_BYTES = 2 * NUM_LAYERS * BLOCK_SIZE * HEAD_DIM * 4
OTHER_CACHES = (
    *("qwen3_5", "mamba2", "granite_moe_hybrid", "deepseek_v3", "deepseek_v4", "gemma4"),
)
SCALE = 4.0
"""The scale of the matrices, so large that the best token of a random model is clear."""
PROMPTS = [[(7 * n + 3 * i) % 90 + 1 for i in range(length)] for n, length in enumerate((11, 3, 1))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    made = reference_model("llama", SCALE, **SHAPE)
    return made, save(made, tmp_path_factory.mktemp("llama"))


def make_config(
    directory: Path,
    *,
    mode: str = "FULL_AND_PIECEWISE",
    overlaps: bool = True,
    num_blocks: int = 40,
    budget: int = 8,
    num_seqs: int = 4,
) -> EngineConfig:
    return EngineConfig(
        LoadConfig(str(directory), dtype="float32"),
        CacheConfig(BLOCK_SIZE, (num_blocks + 1) * BLOCK_BYTES),
        SchedulerConfig(
            num_seqs, budget, async_scheduling=overlaps, scheduler_reserve_full_isl=False
        ),
        logprobs=LogprobsConfig(-1),
        graphs=GraphConfig(mode, None if mode == "NONE" else (2, 4)),
        num_threads=1,
    )


class Engine:
    """An EngineCore, and the outputs of its requests.

    Args:
        config: the engine's configuration.
        device: the device; None for the CPU's runner.
    """

    def __init__(self, config: EngineConfig, device: Device | None) -> None:
        self.use(config, CpuRunner(config) if device is None else GpuRunner(config, device))

    def use(self, config: EngineConfig, runner: Any) -> None:
        """Run requests with a runner."""
        self.runner = runner
        self.core = EngineCore(config, runner)
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, FinishReason] = {}
        self.logprobs: dict[int, list[tuple[int, float, list[int], list[float]]]] = {}
        self.prompt_logprobs: dict[int, list[PromptLogprobs]] = {}
        self.vectors: dict[int, bytes] = {}

    def add(
        self,
        number: int,
        prompt: list[int],
        bad_words: Any = (),
        embeds: torch.Tensor | None = None,
        **options: Any,
    ) -> None:
        params = SamplingParams(
            **{"temperature": 0.0, "max_tokens": 4, "ignore_eos": True} | options
        )
        seed = number if params.seed is None else params.seed
        request = EngineCoreRequest(
            number, prompt, params, bad_words=bad_words, embeds=embeds, seed=seed
        )
        assert self.core.add(0, request) is None

    def call(self, method: Method, argument: Any = None) -> Any:
        answered = run_method(self.core, 0, method, argument)
        self._take(self.core.take_outputs())
        return answered

    def step(self) -> None:
        self._take(self.core.step().items())

    def run(self) -> None:
        while self.core.has_unfinished:
            self.step()
            self.core.scheduler.check_integrity()

    def _take(self, outputs: Any) -> None:
        for _, columns in outputs:
            for scored in columns.prompt_logprobs:
                self.prompt_logprobs.setdefault(scored.number, []).append(scored)
            if columns.embeddings is not None:
                for number, piece in zip(
                    columns.embeddings.numbers, columns.embeddings.pieces, strict=True
                ):
                    before = self.vectors.get(number, b"")[: piece.offset]
                    self.vectors[number] = before + piece.data
            if columns.logprobs is not None:
                self._take_logprobs(columns.numbers, columns.counts, columns.logprobs)
            tokens = iter(columns.token_ids)
            rows = zip(columns.numbers, columns.counts, columns.finishes, strict=True)
            for number, count, finish in rows:
                self.tokens.setdefault(number, []).extend(next(tokens) for _ in range(count))
                if finish:
                    self.ends[number] = FinishReason(finish)

    def _take_logprobs(
        self, numbers: list[int], counts: list[int], columns: LogprobColumns
    ) -> None:
        end = 0
        of_tokens = [
            (row, k)
            for row, k in zip(columns.rows, columns.ks, strict=True)
            for _ in range(counts[row])
        ]
        for index, (row, k) in enumerate(of_tokens):
            begin, end = end, end + k
            self.logprobs.setdefault(numbers[row], []).append(
                (
                    int(columns.ranks[index]),
                    float(columns.logprobs[index]),
                    columns.top_ids[begin:end].tolist(),
                    columns.top_logprobs[begin:end].tolist(),
                )
            )


class EngineCalls:
    """The methods of a `Dispatcher` that an update needs: no bucket in host memory is one.

    Args:
        engine: answers the calls.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def call(self, method: Method, argument: Any = None) -> Any:
        return self._engine.call(method, json.loads(json.dumps(argument)))


class DeviceMemorySharing(LocalSharing):
    """Hands over memory of a device, which may be the fake GPU, within this process."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def uuid(self, device: torch.device) -> str:
        return self._device.uuid if device == self._device.torch_device else ""

    def synchronize(self, device: torch.device) -> None:
        self._device.synchronize()


@torch.inference_mode()
def expected(model: Any, prompt: list[int], count: int) -> list[int]:
    """Return the greedy tokens of transformers."""
    made = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = made[0, len(prompt) :].tolist()
    return tokens


@torch.inference_mode()
def chosen(model: Any, prompt: list[int], count: int) -> list[int]:
    """Return the greedy tokens of transformers' forward pass. With its cache of states its
    `generate` chooses other ones."""
    tokens: list[int] = []
    for _ in range(count):
        logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


def assert_same_logprobs(ours: Engine, other: Engine) -> None:
    """The same tokens and ranks, and numbers that differ by rounding alone."""
    assert ours.logprobs.keys() == other.logprobs.keys()
    for number, rows in other.logprobs.items():
        for mine, row in zip(ours.logprobs[number], rows, strict=True):
            assert mine[0] == row[0]
            assert mine[1] == pytest.approx(row[1], abs=1e-4)
            assert mine[2] == row[2]
            assert mine[3] == pytest.approx(row[3], abs=1e-4)


def launches_of_a_step(engine: Engine, device: Any) -> list[str]:
    """Compute a step in which the host waits for nothing but tokens, and return its launches on the
    fake GPU."""
    device.launched.clear()
    with no_waits(device):
        engine.step()
    return list(device.launched)


def other_model(**shape: Any) -> Any:
    """Return a model of the same shapes as `model`, or of these, with other weights and tokens."""
    other = reference_model("llama", SCALE, **SHAPE | {"rope_theta": 10000.0} | shape)
    for name, weight in other.named_parameters():
        weight.data = weight.detach().flip(0) if "proj" in name else weight.detach()
    return other


def pusher(engine: Engine, device: Device) -> WeightPush:
    """Return what sends an engine weights through memory of its device."""
    sharing = engine.core.weights.sharing = DeviceMemorySharing(device)
    return WeightPush(EngineCalls(engine), engine.runner.info, sharing)


def check_sleep_and_new_weights(engine: Engine, reference: Any, other: Any) -> None:
    """Check that an engine has the tokens of a model after a sleep within a request, and those of
    another one, whose weights it gets after a sleep without weights.

    Args:
        engine: the engine.
        reference: the model of transformers that it has.
        other: one with other weights.
    """
    wanted = expected(reference, PROMPTS[1], 4)
    engine.add(0, PROMPTS[1])
    engine.step()
    engine.core.settle()
    before = engine.runner.memory.measure()
    engine.call(Method.SLEEP, {"level": 1, "mode": "keep"})
    asleep = engine.runner.memory.measure()
    assert before.weights > asleep.weights == 0
    assert before.kv_cache > asleep.kv_cache == 0
    engine.call(Method.WAKE_UP)
    engine.run()
    assert engine.tokens[0] == wanted

    engine.call(Method.SLEEP, {"level": 2, "mode": "keep"})
    engine.call(Method.WAKE_UP)
    engine.core.settle()
    names = engine.runner.model.load_weights(other.state_dict().items())
    engine.core.weights.weights_changed()
    assert len(names) == len(engine.runner.model.named_weights())
    engine.add(1, PROMPTS[1])
    engine.run()
    assert engine.tokens[1] == expected(other, PROMPTS[1], 4) != wanted


class EngineConformance:
    @pytest.mark.parametrize(
        ("mode", "overlaps"),
        [
            ("FULL_AND_PIECEWISE", True),
            *(
                slow(mode, overlaps)
                for mode, overlaps in (
                    ("FULL_AND_PIECEWISE", False),
                    ("NONE", False),
                    ("NONE", True),
                    ("PIECEWISE", True),
                    ("FULL", True),
                    ("FULL_DECODE_ONLY", True),
                )
            ),
        ],
    )
    def test_greedy_tokens_equal_those_of_transformers(
        self, model: Any, gpu_device: Device, mode: str, overlaps: bool
    ) -> None:
        reference, directory = model
        wanted = [expected(reference, prompt, 4) for prompt in PROMPTS]
        engine = Engine(make_config(directory, mode=mode, overlaps=overlaps), gpu_device)
        for number, prompt in enumerate(PROMPTS):
            engine.add(number, prompt)
        engine.run()
        assert [engine.tokens[number] for number in range(len(PROMPTS))] == wanted

    @pytest.mark.parametrize("family", [slow(family) for family in OTHER_CACHES])
    def test_families_with_other_caches_equal_transformers(
        self, gpu_device: Device, family: str, tmp_path: Path
    ) -> None:
        """Recurrent states, latents, and layers with different heads, in captured steps and with
        hits of the prefix cache."""
        reference = reference_model(family, SCALE, **PROGRAM_SHAPE | VARIANTS[family])
        config = make_config(save(reference, tmp_path), num_blocks=40)
        cache = replace(config.cache, memory_bytes=2**21, mamba_block_size=BLOCK_SIZE)
        engine = Engine(replace(config, cache=cache), gpu_device)
        wanted = [chosen(reference, prompt, 4) for prompt in PROMPTS]
        for attempt in range(2):
            numbers = range(attempt * len(PROMPTS), (attempt + 1) * len(PROMPTS))
            for number, prompt in zip(numbers, PROMPTS, strict=True):
                engine.add(number, prompt)
            engine.run()
            assert [engine.tokens[number] for number in numbers] == wanted
        assert engine.core.scheduler.stats.prefix_hit_tokens > 0

    @pytest.mark.slow
    @pytest.mark.parametrize("mode", ["NONE", "FULL_AND_PIECEWISE"])
    def test_entries_survive_short_chunks_hits_and_preemption(
        self, gpu_device: Device, tmp_path: Path, mode: str
    ) -> None:
        """Windows end in other steps than they begin in, and the requests are too many for the
        cache; the CPU has room for all."""
        family = "deepseek_v4"
        reference = reference_model(family, SCALE, **PROGRAM_SHAPE | VARIANTS[family])
        directory, prompts = save(reference, tmp_path), [each * 3 for each in PROMPTS]
        engines = []
        for device, num_blocks, budget in ((gpu_device, 28, 7), (None, 100, 40)):
            config = make_config(directory, mode=mode, budget=budget)
            cache = replace(config.cache, memory_bytes=None, num_blocks=num_blocks)
            engine = Engine(replace(config, cache=cache), device)
            for first, asked in ((0, prompts), (3, prompts[1:2]), (4, prompts[1:2])):
                for number, prompt in enumerate(asked, first):
                    engine.add(number, prompt, max_tokens=12, logprobs=2)
                engine.run()
            engines.append(engine)
        ours, other = engines
        assert ours.tokens == other.tokens
        assert_same_logprobs(ours, other)
        stats = ours.core.scheduler.stats, other.core.scheduler.stats
        assert [each.preemptions > 0 for each in stats] == [True, False]
        assert [each.prefix_hit_tokens > 0 for each in stats] == [True, True]

    def test_a_module_of_transformers_has_its_greedy_tokens(
        self, tmp_path: Path, gpu_device: Device
    ) -> None:
        """One with sinks and windows, in chunks; a prompt of embeddings is as one of tokens."""
        reference = reference_model("granite_swa", SCALE, sliding_window=8, **SHAPE)
        directory = save(reference, tmp_path)
        wanted = [expected(reference, prompt, 4) for prompt in PROMPTS]
        config = make_config(directory)
        config = replace(config, load=replace(config.load, model_impl="transformers"))
        engine = Engine(config, gpu_device)
        assert not engine.runner.info.graphs
        embeds = reference.get_input_embeddings()(torch.tensor(PROMPTS[0])).detach()
        for number, prompt in enumerate(PROMPTS):
            engine.add(number, prompt)
        engine.add(3, PROMPTS[0], embeds=embeds)
        engine.run()
        assert [engine.tokens[number] for number in range(4)] == [*wanted, wanted[0]]

    @pytest.mark.slow
    def test_other_requests_do_not_change_a_requests_tokens(
        self, model: Any, gpu_device: Device
    ) -> None:
        """Preemption, a stop token, an abort and a prefix-cache hit, each while a step runs."""
        reference, directory = model
        prompts = {0: [5] * 9, 1: [9, 8, 7, 6], 2: [11] * 7, 3: [5] * 9 + [4]}
        wanted = {n: expected(reference, prompt, 8) for n, prompt in prompts.items()}
        stop = wanted[1][2]
        engine = Engine(make_config(directory, num_blocks=5, num_seqs=3), gpu_device)
        engine.add(0, prompts[0], max_tokens=8)
        engine.add(1, prompts[1], max_tokens=8, stop_token_ids=[stop])
        engine.add(2, prompts[2], max_tokens=8)
        for _ in range(4):
            engine.step()
        engine.core.abort(0, [2])
        engine.add(3, prompts[3], max_tokens=5)
        engine.run()
        assert engine.tokens[0] == wanted[0]
        assert engine.tokens[1] == wanted[1][: wanted[1].index(stop) + 1]
        assert engine.tokens[3] == wanted[3][:5]
        assert engine.core.scheduler.stats.prefix_hit_tokens > 0

    def test_sampling_parameters_and_logprobs_work_as_on_a_cpu(
        self, model: Any, gpu_device: Device
    ) -> None:
        _, directory = model
        embeds = torch.randn(5, SHAPE["hidden_size"], generator=torch.Generator().manual_seed(2))
        engines = [
            Engine(make_config(directory, num_seqs=8, budget=16), device)
            for device in (gpu_device, None)
        ]
        for engine in engines:
            engine.add(0, PROMPTS[0], logprobs=3, prompt_logprobs=2)
            engine.add(1, PROMPTS[1], repetition_penalty=1.7, presence_penalty=0.9)
            pairs = [(first, last) for first in range(VOCAB) for last in range(0, VOCAB, 2)]
            engine.add(2, PROMPTS[2], bad_words=pairs, logprobs=0)
            engine.add(3, PROMPTS[0][:5], logit_bias={7: 30.0, 8: 29.0}, frequency_penalty=2.0)
            engine.add(4, PROMPTS[0][:7], allowed_token_ids=[3, 50, 60], logprobs=97)
            engine.add(5, [0] * 5, embeds=embeds.clone())
            asked = [[5, -1, 96]] * (len(PROMPTS[0]) - 3)
            engine.add(6, PROMPTS[0], prompt_logprob_token_ids=asked, prompt_logprob_start=2)
            engine.run()
        ours, other = engines
        assert ours.tokens == other.tokens
        assert other.logprobs.keys() == {0, 2, 4}
        assert_same_logprobs(ours, other)
        for number in (0, 6):
            both = ours.prompt_logprobs[number], other.prompt_logprobs[number]
            for name in ("ranks", "top_ids", "logprobs", "top_logprobs"):
                found = [np.concatenate([getattr(p, name) for p in part]) for part in both]
                assert found[0] == pytest.approx(found[1], abs=1e-4)

    @pytest.mark.slow
    def test_custom_processors_work_as_on_a_cpu(self, model: Any, gpu_device: Device) -> None:
        """Each is the only one or beside others, with penalties and masks; one request fails, and
        two are as they are without processors. A sharpened draw is the most likely token."""
        _, directory = model
        processors = {each.__name__: each for each in (FavourOne, BatchCount, FlattenDraws)}
        config = make_config(directory, num_seqs=8, budget=16)
        engines = [Engine(config, device) for device in (gpu_device, None, gpu_device)]
        for engine in engines[:2]:
            engine.runner.use_processors(processors)
        for engine in engines:
            engine.add(0, PROMPTS[0], logprobs=3)
            engine.add(1, PROMPTS[1], temperature=0.8, seed=4)
            engine.add(2, PROMPTS[2], extra_args={"count": 20}, max_tokens=6)
            favoured = {"one": 7, "bias": 500.0}
            penalty, bias = {"repetition_penalty": 2.0}, {"logit_bias": {8: 300.0}}
            engine.add(3, PROMPTS[0][:5], extra_args=favoured, **penalty, **bias)
            allowed = {"allowed_token_ids": [3, 8, 50], "logprobs": 2}
            engine.add(4, PROMPTS[0][:7], extra_args={"one": 50, "bias": 400.0}, **allowed)
            drawn = {"temperature": 1.5, "top_k": 9, "presence_penalty": 0.5, "seed": 1}
            engine.add(5, PROMPTS[0][:4], extra_args={"factor": 1e6}, **drawn)
        for engine in engines[:2]:
            engine.add(6, PROMPTS[1], extra_args={"one": 200, "bias": 1.0})
        for engine in engines:
            engine.run()
        ours, other, plain = engines
        (failure,) = ours.core.take_failures()
        assert failure.number == 6
        assert failure.message.startswith("the logits processor FavourOne failed: IndexError")
        assert [each.number for each in other.core.take_failures()] == [6]
        assert ours.tokens[2] == [20, 21, 22, 23, 24, 25]
        for number in (0, 2, 3, 4, 5):
            assert ours.tokens[number] == other.tokens[number], number
        for number in (0, 1):
            assert ours.tokens[number] == plain.tokens[number]
        assert ours.logprobs[0] == plain.logprobs[0]
        assert ours.tokens[5] != plain.tokens[5]

    def test_logits_that_a_class_changes_are_sampled(self, model: Any, gpu_device: Device) -> None:
        """No token below 40 is sampled, nor has a probability, with and without a penalty."""
        _, directory = model
        engines = [Engine(make_config(directory), device) for device in (gpu_device, None)]
        for engine in engines:
            own = engine.runner.model

            def without_tokens(logits: torch.Tensor, made: Any = own) -> torch.Tensor:
                changed: torch.Tensor = type(made).compute_logits(made, logits)
                changed[..., :40] = -inf
                return changed

            own.compute_logits = without_tokens
            engine.add(0, PROMPTS[0], logprobs=VOCAB)
            engine.add(1, PROMPTS[1], temperature=1.0, max_tokens=9, repetition_penalty=1.5)
            engine.run()
        ours, other = engines
        assert ours.tokens[0] == other.tokens[0]
        assert min(ours.tokens[0] + ours.tokens[1] + other.tokens[1]) >= 40
        for _, _, tokens, logprobs in ours.logprobs[0]:
            found = dict(zip(tokens, logprobs, strict=True))
            assert all((found[token] == -inf) == (token < 40) for token in range(VOCAB))

    @pytest.mark.slow
    def test_the_cache_gets_what_the_largest_step_leaves(
        self, model: Any, gpu_device: Device
    ) -> None:
        reference, directory = model
        config = make_config(directory, mode="NONE")
        config = replace(config, cache=CacheConfig(BLOCK_SIZE, gpu_memory_utilization=1 / 64))
        engine = Engine(config, gpu_device)
        info = engine.runner.info
        share = gpu_device.total_bytes() / 64
        assert 100 * BLOCK_BYTES < info.kv_cache_bytes < share - info.weight_bytes
        engine.add(0, PROMPTS[1])
        engine.run()
        assert engine.tokens[0] == expected(reference, PROMPTS[1], 4)
        assert engine.core.timings.device_ns > 0

    def test_graphs_work_after_sleep_and_with_new_weights(
        self, model: Any, gpu_device: Device
    ) -> None:
        reference, directory = model
        engine = Engine(make_config(directory, num_seqs=2), gpu_device)
        check_sleep_and_new_weights(engine, reference, other_model())

    @pytest.mark.parametrize("level", [slow(0), 2])
    def test_new_weights_come_through_memory_of_the_device(
        self, model: Any, gpu_device: Device, level: int
    ) -> None:
        reference, directory = model
        engine = Engine(make_config(directory, num_seqs=2), gpu_device)
        engine.add(0, PROMPTS[1])
        engine.step()
        other = other_model()
        where = gpu_device.torch_device
        weights = {name: each.detach().to(where) for name, each in other.named_parameters()}
        if level:
            engine.call(Method.SLEEP, {"level": level, "mode": "abort"})
            engine.call(Method.WAKE_UP)
        push = pusher(engine, gpu_device)
        wrong = {**weights, "model.norm.weight": torch.full_like(weights["model.norm.weight"], inf)}
        with pytest.raises(RequestError, match="finite"):
            push.update(wrong)
        if not level:
            engine.run()
            assert engine.tokens[0] == expected(reference, PROMPTS[1], 4)
        assert len(push.update(weights)) == len(engine.runner.model.named_weights())
        engine.add(1, PROMPTS[1])
        engine.run()
        assert engine.tokens[1] == expected(other, PROMPTS[1], 4)
        assert engine.tokens[1] != expected(reference, PROMPTS[1], 4)

    def test_vectors_equal_those_of_a_cpu(self, model: Any, gpu_device: Device) -> None:
        _, directory = model
        engines = [
            Engine(make_config(directory, mode="NONE"), device) for device in (gpu_device, None)
        ]
        for engine in engines:
            for number, kind in enumerate((PoolingType.LAST, PoolingType.MEAN)):
                request = EngineCoreRequest(number, PROMPTS[0], Pooling(kind))
                assert engine.core.add(0, request) is None
            engine.run()
        for number in (0, 1):
            ours, other = (np.frombuffer(e.vectors[number], np.float32) for e in engines)
            assert ours == pytest.approx(other, abs=1e-4)

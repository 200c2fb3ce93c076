"""The tests of encoders on a device, compared with transformers, by steps and in a whole engine.

Each folder has a fixture `gpu_device`: the fake GPU, or a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conformance.gpu_engine import Engine
from support.gpu_steps import GpuSteps
from support.pooling_models import make_pooling_model
from support.reference_models import draw_weights
from support.variants import slow
from transformers import BertConfig, BertForSequenceClassification, BertModel

from shmllm.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from shmllm.config.graphs import CudaGraphMode, GraphConfig
from shmllm.config.load import LoadConfig
from shmllm.models.config import ModelConfig
from shmllm.models.head_specs import DenseSpec, HeadActivation, HeadNormSpec, HeadSpec
from shmllm.models.heads import Head
from shmllm.models.layers import Linear, Norm, Storage
from shmllm.models.specs import NormSpec
from shmllm.params.pooling import Pooling, PoolingType
from shmllm.params.request import EngineCoreRequest
from shmllm.worker.fit_to_model import fit_to_model
from shmllm.worker.gpu.heads import GpuHead, make_head

NONE, PIECEWISE, FULL = CudaGraphMode.NONE, CudaGraphMode.PIECEWISE, CudaGraphMode.FULL
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "num_labels": 3,
}
TEXTS = {0: 11, 1: 1, 2: 9}
SECOND_SEGMENTS = {0: 6, 2: 1}
"""By row, where the second text begins."""
LONGER_TEXTS = {0: 33, 1: 1, 3: 20}
FAMILIES = ["roberta", *map(slow, ("distilbert", "modernbert", "gemma3", "llama"))]
FAMILIES += map(
    slow, ("jina_bert", "electra", "eurobert", "mpnet", "nomic_bert", "gte", "jina_embeddings_v3")
)
FAMILIES += map(slow, ("nomic_moe", "t5_encoder", "deberta_v2", "albert", "electra_small", "ernie"))
FAMILIES += map(slow, ("privacy_filter", "deberta", "lfm2_bidirectional"))
TOLERANCE = 1e-5
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}


@pytest.fixture(autouse=True, scope="module")
def _inference_mode() -> Any:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], tuple[Any, Path]]:
    """Return random models by their class, and where they are."""
    made: dict[Any, tuple[Any, Path]] = {}

    def get(kind: Any) -> tuple[Any, Path]:
        if kind not in made:
            torch.manual_seed(3)
            model = kind(BertConfig(**SIZES)).eval()
            draw_weights(model)
            directory = tmp_path_factory.mktemp(kind.__name__)
            model.save_pretrained(directory)
            made[kind] = model, directory
        return made[kind]

    return get


def tokens_of(row: int, length: int) -> list[int]:
    return [(7 * row + 3 * index) % 90 + 5 for index in range(length)]


def types_of(length: int, second_segment: int) -> torch.Tensor:
    types = torch.zeros(1, length, dtype=torch.long)
    types[:, second_segment or length :] = 1
    return types


def add_texts(steps: GpuSteps, texts: dict[int, int]) -> None:
    steps.second_segments = SECOND_SEGMENTS
    for row, length in texts.items():
        steps.add(row, tokens_of(row, length))


def hidden_of(model: Any, row: int, length: int) -> torch.Tensor:
    """Return what transformers computes of a text, without others, [length, hidden]."""
    types = types_of(length, SECOND_SEGMENTS.get(row, 0))
    ids = torch.tensor([tokens_of(row, length)])
    hidden: torch.Tensor = model(ids, token_type_ids=types).last_hidden_state[0]
    return hidden


def assert_equal_texts(found: torch.Tensor, wanted: list[torch.Tensor]) -> None:
    for part, want in zip(found.split([len(each) for each in wanted]), wanted, strict=True):
        torch.testing.assert_close(part, want, atol=TOLERANCE, rtol=TOLERANCE)


def visible(length: int, window: int | None, ahead: int | None) -> torch.Tensor:
    """Return which keys tokens attend to, as a mask that transformers adds to scores."""
    distance = torch.arange(length)[None] - torch.arange(length)[:, None]
    is_seen = torch.ones(length, length, dtype=torch.bool)
    if window is not None:
        is_seen &= distance > -window
    if ahead is not None:
        is_seen &= distance <= ahead
    return torch.zeros(1, 1, length, length).masked_fill(~is_seen, -torch.inf)


class EncoderStepsConformance:
    @pytest.mark.parametrize("mode", [slow(NONE), PIECEWISE, slow(FULL)])
    def test_hidden_states_equal_those_of_transformers(self, gpu_device, encoders, mode) -> None:
        """Texts of a step do not see each other; replays equal launches bit for bit."""
        model, directory = encoders(BertModel)
        steps = GpuSteps(gpu_device, directory, mode.name, (8, 24))
        steps.program.capture()
        for texts in (TEXTS, {1: 1}, {2: 4, 3: 3}):
            add_texts(steps, texts)
            step = steps.prepare(texts)
            assert step.mode is mode
            if mode is FULL:
                step.max_query_len = step.descriptor.num_tokens  # as in the captured graph
            steps.poison()
            launched = steps.run(step, NONE)[0]
            steps.poison()
            assert torch.equal(steps.run(step)[0], launched)
            assert_equal_texts(launched, [hidden_of(model, *text) for text in texts.items()])

    def test_layers_that_attend_to_some_tokens_behind(self, gpu_device, encoders) -> None:
        """A local layer and a global one have ends of their own."""
        model, directory = encoders(BertModel)
        config = ModelConfig.from_directory(directory)
        rules = [(3, 2), (None, None)]
        layers = [
            replace(layer, mixer=replace(layer.mixer, window=window, ahead=ahead))
            for layer, (window, ahead) in zip(config.layers, rules, strict=True)
        ]
        config = replace(config, layers=tuple(layers))
        steps = GpuSteps(gpu_device, directory, "PIECEWISE", (24,), config=config)
        steps.program.capture()
        add_texts(steps, TEXTS)
        wanted = []
        for row, length in TEXTS.items():
            types = types_of(length, SECOND_SEGMENTS.get(row, 0))
            x = model.embeddings(torch.tensor([tokens_of(row, length)]), types)
            for layer, rule in zip(model.encoder.layer, rules, strict=True):
                x = layer(x, visible(length, *rule))
                x = x if isinstance(x, torch.Tensor) else x[0]
            wanted.append(x[0])
        assert_equal_texts(steps.run(steps.prepare(TEXTS))[0], wanted)


@pytest.fixture(scope="module")
def of_family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[torch.Tensor]]:
    """Return the directory of a model of a family, and what transformers computes of the texts."""
    directory = tmp_path_factory.mktemp(request.param)
    model = make_pooling_model(request.param, "Model", directory)
    with torch.inference_mode():
        ids = [torch.tensor([tokens_of(*text)]) for text in LONGER_TEXTS.items()]
        return directory, [model(each).last_hidden_state[0] for each in ids]


class EncoderFamiliesConformance:
    @pytest.mark.parametrize("of_family", FAMILIES, indirect=True)
    def test_hidden_states_equal_those_of_transformers(self, of_family, gpu_device) -> None:
        """Positions that do not begin with 0, and local layers beside global ones."""
        directory, wanted = of_family
        steps = GpuSteps(gpu_device, directory, "PIECEWISE", (64,), max_tokens=64)
        steps.program.capture()
        for row, length in LONGER_TEXTS.items():
            steps.add(row, tokens_of(row, length))
        assert_equal_texts(steps.run(steps.prepare(LONGER_TEXTS))[0], wanted)


def encoder_config(directory: Path, mode: str = "FULL_AND_PIECEWISE") -> EngineConfig:
    config = EngineConfig(
        LoadConfig(str(directory), dtype="float32"),
        CacheConfig(8, 2**18),
        SchedulerConfig(4, 16),
        graphs=GraphConfig(mode, None if mode == "NONE" else (4, 32)),
        num_threads=1,
    )
    return fit_to_model(config)


def vectors_of(engine: Engine, **options: Any) -> list[torch.Tensor]:
    """Return what an engine computes of the texts."""
    for row, length in TEXTS.items():
        pooling = Pooling(second_segment=SECOND_SEGMENTS.get(row, 0), **options)
        request = EngineCoreRequest(row, tokens_of(row, length), pooling)
        assert engine.core.add(0, request) is None
    engine.vectors.clear()
    engine.run()
    found = [engine.vectors[row] for row in TEXTS]
    return [torch.from_numpy(np.frombuffer(vector, np.float32).copy()) for vector in found]


class EncoderEngineConformance:
    @pytest.mark.parametrize(
        "mode", ["FULL_AND_PIECEWISE", *map(slow, ("NONE", "FULL", "FULL_DECODE_ONLY"))]
    )
    def test_vectors_equal_those_of_transformers(self, gpu_device, encoders, mode) -> None:
        model, directory = encoders(BertModel)
        engine = Engine(encoder_config(directory, mode), gpu_device)
        hidden = [hidden_of(model, *text) for text in TEXTS.items()]
        for kind, wanted in (
            (PoolingType.CLS, [each[0] for each in hidden]),
            (PoolingType.LAST, [each[-1] for each in hidden]),
            (PoolingType.MEAN, [each.mean(0) for each in hidden]),
            (PoolingType.ALL, [each.flatten() for each in hidden]),
        ):
            found = vectors_of(engine, type=kind, normalize=False)
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other, atol=TOLERANCE, rtol=TOLERANCE)

    @pytest.mark.slow
    def test_scores_equal_those_of_transformers(self, gpu_device, encoders) -> None:
        model, directory = encoders(BertForSequenceClassification)
        engine = Engine(encoder_config(directory), gpu_device)
        options: dict[str, Any] = {"type": PoolingType.CLS, "normalize": False, "uses_head": True}
        for found, (row, length) in zip(vectors_of(engine, **options), TEXTS.items(), strict=True):
            types = types_of(length, SECOND_SEGMENTS.get(row, 0))
            want = model(torch.tensor([tokens_of(row, length)]), token_type_ids=types).logits[0]
            torch.testing.assert_close(found, want, atol=TOLERANCE, rtol=TOLERANCE)

    def test_results_of_a_head_do_not_depend_on_other_rows(self, gpu_device, encoders) -> None:
        _, directory = encoders(BertForSequenceClassification)
        head = make_head(GpuSteps(gpu_device, directory).model, gpu_device)
        assert head is not None
        rows = torch.randn(70, SIZES["hidden_size"], generator=torch.Generator().manual_seed(1))
        every = head(rows)
        assert every.shape == (70, 3)
        for row in (0, 5, 69):
            assert torch.equal(head(rows[row : row + 1])[0], every[row])

    def test_operations_of_heads(self, gpu_device) -> None:
        """Each activation, and both norms, with weights of another dtype than that of the rows."""
        bias = NormSpec(kind="layer", eps=1e-3, bias=True)
        norms = [HeadNormSpec(name="norm", width=6, norm=kind) for kind in (bias, NormSpec())]
        torch.manual_seed(5)
        rows = torch.randn(3, 6)
        for number, activation in enumerate(get_args(HeadActivation)):
            dense = DenseSpec(name="it", inputs=6, outputs=6, bias=True, activation=activation)
            spec = HeadSpec(kind="classifier", steps=(dense, norms[number % 2]))

            def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
                return torch.randn(shape).to(gpu_device.torch_device, dtype)

            head = Head(spec, 97, Storage(allocate, torch.float16))
            product, norm = head.steps
            assert isinstance(product, Linear)
            assert isinstance(norm, Norm)
            assert product.bias is not None
            gpu_device.synchronize()
            want = F.linear(rows, product.weight.cpu().float(), product.bias.cpu().float())
            want = ACTIVATIONS[activation](want)
            weight = norm.weight.cpu().float()
            if norm.bias is None:
                want = F.rms_norm(want, (6,), weight, norm.spec.eps)
            else:
                want = F.layer_norm(want, (6,), weight, norm.bias.cpu().float(), norm.spec.eps)
            found = GpuHead(head, gpu_device)(rows)
            torch.testing.assert_close(found, want, atol=TOLERANCE, rtol=TOLERANCE)

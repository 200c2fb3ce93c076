"""What an engine's options and other requests do to the logits of encoders and classifiers."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import lora_adapters
from support.pooling_models import (
    Vectors,
    assert_vectors_close,
    make_pooling_model,
    pool,
    pooling_prompts,
)
from support.variants import diagonal, slow

from shmllm import LLM, EngineStartError, LoRARequest, PoolingParams
from shmllm.params.pooling import Pooling, PoolingType

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

PROMPTS = pooling_prompts(count=24)
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "num_threads": 1,
    "kv_cache_memory_bytes": 2**24,
}
LOCAL = OPTIONS | {"multiprocess": False}
TWO_RANKS = {"tensor_parallel_size": 2, "num_threads": 2}
POOLINGS = {"modernbert": PoolingType.CLS, "bert": PoolingType.CLS, "qwen3": PoolingType.LAST}
KINDS = list(POOLINGS)
OTHERS = ["electra", "eurobert", "mpnet", "nomic_bert", "gte", "jina_embeddings_v3", "deberta_v2"]
OTHERS += ["deberta"]
NARROW = ["albert", "electra_small"]


class Classifier:
    """A random classifier of texts: its directory, and transformers' model."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.directory = str(directory)
        self.model = make_pooling_model(kind, "ForSequenceClassification", directory, num_labels=5)
        self.pooling = Pooling(POOLINGS.get(kind, PoolingType.CLS), normalize=False, uses_head=True)

    def logits(self, **options: Any) -> Vectors:
        """Those of PROMPTS by an engine with these options."""
        with LLM(self.directory, **options) as llm:
            return self.ask(llm)

    def ask(self, llm: LLM, prompts: list[list[int]] = PROMPTS) -> Vectors:
        return pool(llm, prompts, self.pooling)


def of_all(settings: dict[str, Any]) -> list[Any]:
    """Each setting, of one model in the default suite."""
    return [
        *diagonal(list(settings), KINDS),
        *itertools.starmap(slow, itertools.product(settings, [*OTHERS, "ernie"])),
        *itertools.starmap(slow, itertools.product(settings.keys() - {"two stages"}, NARROW)),
    ]


@pytest.fixture(scope="module", params=[*KINDS, *map(slow, [*OTHERS, *NARROW, "ernie"])])
def classifier(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Classifier:
    return Classifier(request.param, tmp_path_factory.mktemp(request.param))


def assert_same_bits(ours: Vectors, others: Vectors) -> None:
    for one, other in zip(ours, others, strict=True):
        assert one.tobytes() == other.tobytes()


def distance(ours: Vectors, others: Vectors) -> float:
    """The largest difference, relative to the largest number."""
    pairs = list(zip(ours, others, strict=True))
    return float(
        max(np.abs(a - b).max() for a, b in pairs) / max(np.abs(b).max() for _, b in pairs)
    )


def test_bits_do_not_depend_on_the_batch(classifier: Classifier) -> None:
    with LLM(classifier.directory, **LOCAL) as llm:
        together = classifier.ask(llm)
        order = random.Random(5).sample(range(len(PROMPTS)), len(PROMPTS))
        shuffled = classifier.ask(llm, [PROMPTS[i] for i in order])
        alone = [classifier.ask(llm, [prompt])[0] for prompt in PROMPTS]
    assert_same_bits(together, alone)
    assert_same_bits([together[i] for i in order], shuffled)


SAME_BITS: dict[str, dict[str, Any]] = {
    "two threads": {"multiprocess": False, "num_threads": 2},
    "a process": {},
    "small steps": {"multiprocess": False, "max_num_batched_tokens": 16, "max_num_seqs": 3},
    "overlapped": {"multiprocess": False, "async_scheduling": True},
    "two stages": {"pipeline_parallel_size": 2, "num_threads": 2},
    "two engines": {"data_parallel_size": 2, "num_threads": 2},
}


@pytest.mark.parametrize(("setting", "classifier"), of_all(SAME_BITS), indirect=["classifier"])
def test_bits_are_those_of_other_settings(setting: str, classifier: Classifier) -> None:
    others = classifier.logits(**(OPTIONS | SAME_BITS[setting]))
    assert_same_bits(classifier.logits(**LOCAL), others)


NEAR: dict[str, tuple[dict[str, Any], float]] = {
    "two ranks": (TWO_RANKS, 1e-5),
    "bfloat16": ({"dtype": "bfloat16", "multiprocess": False}, 0.05),
    "int8": ({"quantization": "int8", "multiprocess": False}, 0.1),
    "int4": ({"quantization": "int4", "multiprocess": False}, 0.9),
}


@pytest.mark.parametrize(("setting", "classifier"), of_all(NEAR), indirect=["classifier"])
def test_logits_are_near_those_of_other_settings(setting: str, classifier: Classifier) -> None:
    options, tolerance = NEAR[setting]
    drift = distance(classifier.logits(**(OPTIONS | options)), classifier.logits(**LOCAL))
    assert 0 < drift < tolerance


def test_random_weights_are_finite(classifier: Classifier) -> None:
    for logits in classifier.logits(**LOCAL, load_format="dummy"):
        assert np.isfinite(logits).all()
        assert logits.any()


@pytest.mark.parametrize("ranks", [1, slow(2)])
def test_logits_after_a_sleep(classifier: Classifier, ranks: int) -> None:
    options = LOCAL | {"tensor_parallel_size": ranks, "num_threads": ranks}
    with LLM(classifier.directory, **options) as llm:
        wanted = classifier.ask(llm)
        for level in (1, 2):
            llm.sleep(level=level)
            llm.wake_up()
            if level == 2:
                llm.collective_rpc("reload_weights")
            assert_same_bits(classifier.ask(llm), wanted)
        llm.sleep(level=2)
        llm.wake_up()
        llm.update_weights(list(classifier.model.state_dict().items()))
        assert_same_bits(classifier.ask(llm), wanted)


@torch.inference_mode()
def test_an_update_of_an_encoder(tmp_path: Path) -> None:
    encoder = Classifier("bert", tmp_path)
    with LLM(encoder.directory, **LOCAL) as llm:
        encoder.model.classifier.weight.mul_(2)
        encoder.model.bert.embeddings.LayerNorm.bias.mul_(2)
        names = ("classifier.weight", "bert.embeddings.LayerNorm.bias")
        weights = encoder.model.state_dict()
        llm.update_weights([(name, weights[name]) for name in names])
        wanted = [encoder.model(torch.tensor([each])).logits[0] for each in PROMPTS]
        assert_vectors_close(encoder.ask(llm), wanted, 1e-5)


@pytest.mark.parametrize("options", [{"multiprocess": False}, slow(TWO_RANKS)])
@torch.inference_mode()
def test_an_adapter_of_a_classifier(
    classifier: Classifier, options: dict[str, Any], tmp_path: Path
) -> None:
    """Adapters change layers, not heads."""
    model, heads = classifier.model, ["pooler", "classifier", "score", "head."]
    heads += ["embeddings_project", "embedding_hidden_mapping_in"]  # nor projections of embeddings
    if model.config.model_type == "deberta-v2":
        heads += ["query_proj", "key_proj"]
    heads += ["pos_proj", "pos_q_proj"]  # nor of distances
    shapes = {
        name: shape
        for name, shape in lora_adapters.linear_modules(model).items()
        if name != "dense" and not any(each in name for each in heads)
    }
    tensors = lora_adapters.draw(shapes)
    adapter = LoRARequest("a", 1, str(lora_adapters.write(tmp_path, tensors)))
    changed = lora_adapters.merged(model, tensors, 2.0)
    with LLM(classifier.directory, **(OPTIONS | options), enable_lora=True) as llm:
        for lora, reference in ((adapter, changed), (None, model)):
            wanted = [reference(torch.tensor([each])).logits[0] for each in PROMPTS]
            assert_vectors_close(pool(llm, PROMPTS, classifier.pooling, lora), wanted, 1e-5)
        adapters = [adapter if index % 2 else None for index in range(len(PROMPTS))]
        outputs = llm.classify(
            PROMPTS,
            pooling_params=PoolingParams(use_activation=False),
            lora_request=adapters,
            use_tqdm=False,
        )
        wanted = [
            (model if lora is None else changed)(torch.tensor([each])).logits[0]
            for lora, each in zip(adapters, PROMPTS, strict=True)
        ]
        found = [np.array(output.outputs.probs, np.float32) for output in outputs]
        assert_vectors_close(found, wanted, 1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runner": "generate"}, "runner='generate' is not possible: Bert.* attends both ways"),
        ({"shared_kv_cache_bytes": 2**24}, "shared_kv_cache_bytes is not possible with Bert"),
        ({"model_impl": "transformers"}, "BertForSequenceClassification"),
        ({"max_model_len": 129}, "max_model_len 129 exceeds the 128 positions"),
    ],
)
@pytest.mark.parametrize("classifier", ["bert"], indirect=True)
def test_what_an_encoder_does_not_allow(
    classifier: Classifier, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineStartError, match=message):
        LLM(classifier.directory, **LOCAL, **options)

"""`llm.llm_engine`: the attributes that programs written for vLLM read, without an engine."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from support.fakes import info

from shmllm.config.items import ItemInfo
from shmllm.config.views import ModelConfigView, ParallelConfigView
from shmllm.frontend.engine_view import EngineView
from shmllm.frontend.model_files import resolve_model


class Host:
    """A fake LLM."""

    def __init__(self):
        directory = str(resolve_model("tiny"))
        self.facts = info(
            model_directory=directory,
            max_model_len=77,
            dtype="bfloat16",
            hidden_size=256,
            enable_prefix_caching=False,
            gpu_memory_utilization=0.5,
        )
        self.model_defaults = {"top_k": 5}

    def get_tokenizer(self):
        return "tokenizer"

    def _load_weights(self, weights):
        return {name for name, _ in weights}

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        return [method]

    def apply_model(self, func):
        return [func(1)]

    def reset_prefix_cache(self):
        return True

    def reset_mm_cache(self):
        return "images"

    def reset_encoder_cache(self):
        return "embeddings"

    def add_lora(self, lora_request):
        return lora_request

    def remove_lora(self, lora_id):
        return -lora_id

    def list_loras(self):
        return {1, 2}

    def pin_lora(self, lora_id):
        return lora_id

    def sleep(self, level=1, mode="abort"):
        return level, mode

    def wake_up(self, tags=None):
        return tags

    def is_sleeping(self):
        return True

    def close(self):
        self.is_closed = True

    def _num_unfinished(self):
        return 3


def test_the_attributes_that_programs_for_vllm_read():
    engine = EngineView(Host())
    config = engine.model_config
    assert (config.max_model_len, config.dtype, config.quantization) == (77, torch.bfloat16, None)
    assert config.model == config.tokenizer == str(resolve_model("tiny"))
    assert config.get_vocab_size() == 50
    assert config.get_diff_sampling_param() == {"top_k": 5}
    written = json.loads((resolve_model("tiny") / "config.json").read_text())
    assert config.hf_config is config.hf_text_config
    assert config.get_hidden_size() == config.hf_config.hidden_size == written["hidden_size"]
    assert (config.max_logprobs, config.seed) == (20, 0)
    assert (config.architecture, config.architectures) == ("Fake", ["Fake"])
    num_layers = config.get_total_num_hidden_layers()
    assert config.get_num_layers(engine.parallel_config) == num_layers
    assert num_layers == written["num_hidden_layers"]
    assert config.get_num_layers(ParallelConfigView(pipeline_parallel_size=num_layers)) == 1
    assert config.get_head_size() * written["num_attention_heads"] == written["hidden_size"]
    heads = written["num_attention_heads"], written["num_key_value_heads"]
    two = ParallelConfigView(tensor_parallel_size=2)
    assert config.get_num_attention_heads(two) == heads[0] // 2
    assert config.get_num_kv_heads(engine.parallel_config) == heads[1]
    assert config.get_num_kv_heads(two) == max(1, heads[1] // 2)
    assert config.get_sliding_window() is None
    assert not config.is_multimodal_model
    assert not config.is_encoder_decoder
    assert engine.vllm_config.model_config is config
    assert engine.cache_config.block_size == 4
    assert not engine.vllm_config.cache_config.enable_prefix_caching
    assert engine.vllm_config.cache_config.gpu_memory_utilization == 0.5
    assert config.embedding_size == written["hidden_size"]
    assert engine.get_num_unfinished_requests() == 3
    assert engine.scheduler_config.max_num_seqs == 8
    assert engine.scheduler_config.policy == "fcfs"
    assert engine.cache_config.cache_dtype == "float32"
    assert engine.parallel_config.world_size == 1
    assert engine.get_tokenizer() == engine.tokenizer == "tokenizer"
    assert engine.collective_rpc("x") == engine.model_executor.collective_rpc("x") == ["x"]
    assert engine.apply_model(lambda model: model + 1) == [2]
    assert engine.reset_prefix_cache()
    assert (engine.reset_mm_cache(), engine.reset_encoder_cache()) == ("images", "embeddings")
    assert engine.sleep(2) == (2, "abort")
    assert engine.wake_up(["weights"]) == ["weights"]
    assert engine.is_sleeping()


def test_load_weights_at_the_end_of_the_attribute_chain():
    host = Host()
    model = EngineView(host).model_executor.driver_worker.model_runner.model
    assert model.load_weights([("a", torch.ones(2))]) == {"a"}
    worker = EngineView(host).model_executor.driver_worker.worker
    assert worker.model_runner.model.load_weights([("c", torch.ones(2))]) == {"c"}
    assert model.load_weights(weights=[("b", torch.ones(2))]) == {"b"}


def test_the_engine_core_ends_the_engine():
    host = Host()
    EngineView(host).engine_core.shutdown(timeout=5.0)
    assert host.is_closed


def test_adapters_are_those_of_the_llm():
    engine = EngineView(Host())
    assert (engine.add_lora("a"), engine.remove_lora(3), engine.pin_lora(4)) == ("a", -3, 4)
    assert engine.list_loras() == {1, 2}


@pytest.mark.parametrize(
    ("items", "reads", "encodes"),
    [
        (ItemInfo(modalities=("image", "video")), True, False),
        (ItemInfo(modalities=("audio",), num_encoded=9), True, True),
        (ItemInfo(modalities=("text",)), False, True),
    ],
)
def test_the_model_says_what_its_prompts_may_have(
    items: ItemInfo, reads: bool, encodes: bool
) -> None:
    config = ModelConfigView(replace(Host().facts, items=items), {})
    assert (config.is_multimodal_model, config.is_encoder_decoder) == (reads, encodes)

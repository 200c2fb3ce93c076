"""`llm.llm_engine`: the chains that clients of vLLM read, over a host without an engine."""

from __future__ import annotations

import json

import pytest
import torch
from fakes import facts

from shmllm.errors import RequestError
from shmllm.frontend.engine_view import EngineView
from shmllm.frontend.weight_push import push_weights
from shmllm.model_files import resolve_model


class Host:
    """What a view is of, and the calls that it makes."""

    def __init__(self):
        directory = str(resolve_model("tiny"))
        self.facts = facts(model_directory=directory, max_model_len=77, dtype="bfloat16")
        self.model_defaults = {"top_k": 5}
        self.calls = []

    def get_tokenizer(self):
        return "tokenizer"

    def run_on_worker(self, call, timeout_s=None):
        self.calls.append(call)
        return [name for name, _ in call.args[0]]

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        return [method]

    def apply_model(self, func):
        return [func(1)]

    def reset_prefix_cache(self):
        return True

    def sleep(self, level=1, mode="abort"):
        return level, mode

    def wake_up(self, tags=None):
        return tags

    def is_sleeping(self):
        return True


def test_what_clients_read_of_the_engine():
    engine = EngineView(Host())
    config = engine.model_config
    assert (config.max_model_len, config.dtype, config.quantization) == (77, torch.bfloat16, None)
    assert config.model == config.tokenizer == str(resolve_model("tiny"))
    assert config.get_vocab_size() == 50
    assert config.get_diff_sampling_param() == {"top_k": 5}
    written = json.loads((resolve_model("tiny") / "config.json").read_text())
    assert config.hf_config is config.hf_text_config
    assert config.get_hidden_size() == config.hf_config.hidden_size == written["hidden_size"]
    assert engine.vllm_config.model_config is config
    assert engine.cache_config.block_size == 4
    assert engine.scheduler_config.max_num_seqs == 8
    assert engine.parallel_config.world_size == 1
    assert engine.get_tokenizer() == engine.tokenizer == "tokenizer"
    assert engine.collective_rpc("x") == engine.model_executor.collective_rpc("x") == ["x"]
    assert engine.apply_model(lambda model: model + 1) == [2]
    assert engine.reset_prefix_cache()
    assert engine.sleep(2) == (2, "abort")
    assert engine.wake_up(["weights"]) == ["weights"]
    assert engine.is_sleeping()


def parts_of(host):
    """[(names, update, part, is_last)] of the calls."""
    return [([name for name, _ in c.args[0]], *c.args[1:]) for c in host.calls]


def test_a_small_update_is_one_call():
    host = Host()
    model = EngineView(host).model_executor.driver_worker.model_runner.model
    assert model.load_weights([("a", torch.ones(2)), ("b", torch.ones(2))]) == {"a", "b"}
    ((names, _, part, is_last),) = parts_of(host)
    assert (names, part, is_last) == (["a", "b"], 0, True)
    model.load_weights([])
    assert parts_of(host)[1][0] == []


def test_a_large_update_is_cut_between_tensors(monkeypatch):
    monkeypatch.setattr("shmllm.frontend.weight_push.PART_BYTES", 100)
    host = Host()
    sizes = {"a": 10, "b": 15, "c": 5, "d": 200, "e": 1}
    push_weights(host.run_on_worker, ((n, torch.ones(size)) for n, size in sizes.items()))
    calls = parts_of(host)
    assert [(names, part, last) for names, _, part, last in calls] == [
        (["a", "b"], 0, False),
        (["c"], 1, False),
        (["d"], 2, False),
        (["e"], 3, True),
    ]
    assert len({update for _, update, _, _ in calls}) == 1
    push_weights(host.run_on_worker, [("a", torch.ones(1))])
    assert parts_of(host)[-1][1] != calls[0][1]


def test_an_update_that_breaks_off_is_dropped_by_the_engine(monkeypatch):
    monkeypatch.setattr("shmllm.frontend.weight_push.PART_BYTES", 4)
    host = Host()

    def weights():
        yield "a", torch.ones(1)
        yield "b", torch.ones(1)
        raise KeyError("c")

    with pytest.raises(KeyError):
        push_weights(host.run_on_worker, weights())
    assert parts_of(host)[-1][0] == []
    assert parts_of(host)[-1][2:] == (0, True)


@pytest.mark.parametrize("weights", [[(1, torch.ones(1))], [("a", [1.0])], [("a", None)]])
def test_what_are_no_weights_is_refused_before_anything_is_sent(weights):
    host = Host()
    with pytest.raises(RequestError, match=r"\(name, tensor\) pairs"):
        push_weights(host.run_on_worker, weights)
    assert host.calls == []

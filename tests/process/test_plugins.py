"""Plugins of an installed package, in front ends and real engine processes."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import command
from support.engines import attached, named_engine
from support.model_helpers import reference_model, save
from support.plugin_package import install_plugins

from shmllm import LLM, AsyncLLM, EngineStartError, RequestError, SamplingParams
from shmllm.frontend.model_files import resolve_model
from shmllm.models import registry
from shmllm.plugins import entry_points
from shmllm.plugins.logits_processor import BatchUpdate, LogitsProcessor

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

SMALL = {"kv_cache_memory_bytes": 2**27, "num_threads": 1, "max_num_seqs": 4}
VOCAB_SIZE = 4096
PROMPTS = ["def add(a, b):", "import os", "class Queue:"]


def params(**extra_args: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=6, ignore_eos=True, logprobs=2, extra_args=extra_args or None
    )


def results(llm: LLM, given: list[SamplingParams]) -> list[tuple[Any, ...]]:
    """Tokens and the exact log-probabilities of each prompt's output."""
    done = [output.outputs[0] for output in llm.generate(PROMPTS, given, use_tqdm=False)]
    return [(list(out.token_ids), list(out.logprobs or ())) for out in done]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of the installed package, which the front end imports from."""
    monkeypatch.delenv("SHMLLM_PLUGINS", raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(registry, "REGISTERED", {})
    target = tmp_path / "packages"
    target.mkdir()
    install_plugins(target)
    monkeypatch.syspath_prepend(target)
    entry_points.load_general_plugins.cache_clear()
    yield target
    entry_points.load_general_plugins.cache_clear()
    for name in [name for name in sys.modules if name.startswith("shmllm_test_plugins")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with the tokenizer of the bundled model."""
    tokenizer = resolve_model("tiny") / "tokenizer.json"
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 8192}
    model = reference_model("llama", 4.0, vocab_size=VOCAB_SIZE, **shape, **heads)
    directory = save(model, tmp_path_factory.mktemp("llama"))
    (directory / tokenizer.name).symlink_to(tokenizer)
    return directory


def copy_of(model: Path, directory: Path, architecture: str) -> Path:
    """The same model under another architecture's name."""
    directory.mkdir()
    for source in model.iterdir():
        if source.name != "config.json":
            (directory / source.name).symlink_to(source)
    config = json.loads((model / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    changed = config | {"architectures": [architecture]}
    (directory / "config.json").write_text(json.dumps(changed))
    return directory


def test_plugins_of_all_kinds_work_in_a_private_engine(
    installed: Path,
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("SHMLLM_PLUGINS", "")
    with LLM(str(llama), **SMALL, multiprocess=False) as llm:
        expected = results(llm, [params()] * 3)
        assert llm.facts.logits_processors == ()
        results(llm, [params(count=2)] * 3)  # ignored
    monkeypatch.delenv("SHMLLM_PLUGINS")
    entry_points.load_general_plugins.cache_clear()
    statistics = tmp_path / "statistics.jsonl"
    monkeypatch.setenv("SHMLLM_TEST_STATISTICS", str(statistics))
    model = copy_of(llama, tmp_path / "copy", "CopyForCausalLM")
    with (
        caplog.at_level(logging.WARNING),
        LLM(str(model), **SMALL, io_processor_plugin="lines", stat_interval=0.05) as llm,
    ):
        assert llm.facts.model_type == "CopyForCausalLM"
        names = [name.partition(":")[2] for name in llm.facts.logits_processors]
        assert names == ["Count", "Identity", "Second"]
        # The identity processor runs on all of these.
        assert results(llm, [params()] * 3) == expected
        found = results(llm, [params(), params(count=40), params()])
        assert (found[0], found[2]) == (expected[0], expected[2])
        assert found[1][0] == [40, 41, 42, 43, 44, 45]
        prompt = llm.front_end.tokenizer.encode(PROMPTS[1])
        assert results(llm, [params(), params(second=True), params()])[1][0] == [prompt[1]] * 6
        asked = [params(), params(count=40, fails_at=3), params(fails_at_first=1)]
        done = list(llm.stream(PROMPTS, asked, on_error="yield", ordered=True))
        assert list(done[0].outputs[0].token_ids) == expected[0][0]
        assert "shmllm_test_plugins.processors:Count failed: ValueError: no further" in str(
            done[1].error
        )
        assert "Count failed: ValueError: no such request" in str(done[2].error)
        assert results(llm, [params()] * 3) == expected
        refused = next(iter(llm.stream(PROMPTS[:1], params(count="x"), on_error="yield")))
        assert "Count refuses the request: ValueError: count must be an int" in str(refused.error)
        with pytest.raises(RequestError, match="extra_args cannot be sent"):
            llm.generate(PROMPTS, params(count=...), use_tqdm=False)
        with pytest.raises(RequestError, match="65,536"):
            llm.generate(PROMPTS, params(text="x" * 2**16), use_tqdm=False)
        lengths = [len(output.prompt_token_ids) for output in llm.generate(PROMPTS, use_tqdm=False)]
        for call in (llm.generate, llm.encode):
            (output,) = call({"data": "\n".join(PROMPTS)}, use_tqdm=False)
            assert output.outputs == lengths
        with pytest.raises(RequestError, match="Lines refuses the data: ValueError"):
            llm.generate({"data": 3})
        llm.sleep(1)
        llm.wake_up()
        generated = llm.get_metrics()["generated_tokens"]
    broken = [r.getMessage() for r in caplog.records if "is not used" in r.getMessage()]
    assert len(broken) == 3
    assert not any("\n" in line for line in broken)
    for name in ("failing", "missing", "no_class"):
        assert any(f"the plugin {name} " in line for line in broken), broken
    records = [json.loads(line) for line in statistics.read_text().splitlines()]
    assert records[0] == {"length": llm.facts.max_model_len}
    assert sum(record.get("generated", 0) for record in records) == generated


def test_an_async_llm_runs_requests_of_data(installed: Path, llama: Path, tmp_path: Path) -> None:
    async def run() -> None:
        model = str(llama)
        async with AsyncLLM(model, **SMALL, io_processor_plugin="lines") as llm:

            async def result(call: Any, data: str, **options: Any) -> Any:
                (output,) = [output async for output in call({"data": data}, **options)]
                return output.outputs

            lines = ["def add(a, b):", "import os"]
            lengths = []
            for line in lines:
                (output,) = [o async for o in llm.encode(line)]
                lengths.append(len(output.prompt_token_ids))
            calls = [llm.generate, llm.encode] * 2
            results = [result(call, "\n".join(lines)) for call in calls]
            assert await asyncio.gather(*results) == [lengths] * 4
            with pytest.raises(RequestError, match="Lines refuses the data: ValueError"):
                await result(llm.encode, 3)  # type: ignore[arg-type]
            endless = SamplingParams(max_tokens=8000, ignore_eos=True)
            task = asyncio.create_task(result(llm.generate, "a\nb", sampling_params=endless))
            while not llm.get_metrics()["running"]:
                await asyncio.sleep(0.001)
            task.cancel()
            while llm.get_metrics()["running"]:
                await asyncio.sleep(0.001)
            assert (await result(llm.encode, lines[0])) == lengths[:1]

    asyncio.run(asyncio.wait_for(run(), 120))


@pytest.mark.slow
def test_ranks_have_families_of_plugins_and_the_front_end_s_modules(
    installed: Path, llama: Path, tmp_path: Path
) -> None:
    (installed / "shmllm_test_plugins" / "calls.py").write_text(
        "from shmllm_test_plugins.others import lines\n"
        "def call(worker):\n"
        "    import vllm\n"
        "    return worker.rank, lines()\n"
    )
    model = copy_of(llama, tmp_path / "copy", "CopyForCausalLM")
    options = SMALL | {"num_threads": 2, "tensor_parallel_size": 2}
    with LLM(str(model), **options) as llm:
        assert llm.facts.model_type == "CopyForCausalLM"
        function = importlib.import_module("shmllm_test_plugins.calls").call
        name = "shmllm_test_plugins.others.Lines"
        assert llm.collective_rpc(function) == [(0, name), (1, name)]


def test_two_front_ends_share_the_processors_of_a_named_engine(
    installed: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "from shmllm_test_plugins.processors import Count\nclass Mine(Count): pass\n"
    )
    (installed / "shmllm_test_plugins-1.0.dist-info" / "entry_points.txt").unlink()
    entry_points._installed.cache_clear()
    sys.path.append(str(tmp_path))
    try:
        with (
            named_engine(tmp_path, max_num_seqs=4, logits_processors=["mine:Mine"]) as (name, _),
            attached(name) as one,
            LLM.attach(name) as two,
        ):
            assert one.facts.logits_processors == ("mine:Mine",)
            numbers = [one.enqueue(PROMPTS, params(count=30)), two.enqueue(PROMPTS, params())]
            assert all(numbers)
            counted = [list(o.outputs[0].token_ids) for o in one.wait_for_completion()]
            assert counted == [list(range(30, 36))] * 3
            plain = [list(o.outputs[0].token_ids) for o in two.wait_for_completion()]
            assert plain == [tokens for tokens, _ in results(one, [params()] * 3)]
    finally:
        sys.path.remove(str(tmp_path))


def test_the_command_lists_plugins(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHMLLM_PLUGINS", "copy,count, second,missing,other_copy")
    monkeypatch.setenv("VLLM_PLUGINS", "other_copy")
    done = command("plugins", "--json")
    found = {record["name"]: record for record in json.loads(done.stdout)}
    assert found["copy"] == {
        "group": "shmllm.general_plugins",
        "name": "copy",
        "value": "shmllm_test_plugins.general:register",
        "package": "shmllm-test-plugins",
        "state": "loaded",
    }
    assert found["identity"]["state"] == found["lines"]["state"] == "excluded by SHMLLM_PLUGINS"
    assert found["second"]["state"] == "excluded by VLLM_PLUGINS"
    assert found["count"]["state"] == found["other_copy"]["state"] == "loaded"
    assert found["missing"]["state"].startswith("ModuleNotFoundError: ")
    shown = command("plugins").stdout.decode()
    assert shown.splitlines()[0].split() == ["group", "name", "value", "package", "state"]


def test_a_family_of_another_package_is_found_before_config_json_is_read(
    installed: Path, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = copy_of(llama, tmp_path / "other", "OtherCopyForCausalLM")
    shown = command("models", str(other)).stdout.decode()
    assert "runs here     yes" in shown
    theirs = copy_of(llama, tmp_path / "theirs", "TheirsForCausalLM")
    with pytest.raises(EngineStartError, match=r"general:register, which has no configure"):
        LLM(str(theirs), **SMALL)
    monkeypatch.setenv("SHMLLM_PLUGINS", "count")
    monkeypatch.setattr(registry, "REGISTERED", {})
    entry_points.load_general_plugins.cache_clear()
    with pytest.raises(EngineStartError, match="unknown architecture 'OtherCopyForCausalLM'"):
        LLM(str(other), **SMALL)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["nothing"], "logits_processors must be a list of 'module:Class', got 'nothing'"),
        (["shmllm.absent:Own"], "shmllm.absent:Own cannot be imported: ModuleNotFoundError"),
        (["json:loads"], "json:loads is no subclass of shmllm.plugins.logits_processor:"),
        (3, "logits_processors must be a list of 'module:Class', got 3"),
    ],
)
def test_a_wrong_processor_is_refused_by_name(given: Any, message: str) -> None:
    with pytest.raises(EngineStartError) as refusal:
        LLM("tiny", **SMALL, multiprocess=False, logits_processors=given)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def chooses(token: int) -> type[LogitsProcessor]:
    """A class that an engine cannot import: each row's likeliest token is `token`."""

    class Chosen(LogitsProcessor):
        def __init__(self, config: Any, device: Any, is_pinned: bool) -> None:
            pass

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: BatchUpdate | None) -> None:
            pass

        def apply(self, logits: Any) -> Any:
            logits[:, token] = 1000
            return logits

    return Chosen


@pytest.mark.parametrize("module", [None, "__main__"])
def test_classes_of_the_program_itself_are_sent(module: str | None) -> None:
    own = chooses(7)
    if module is not None:
        own.__module__, own.__qualname__ = module, "Chosen"
    with LLM("tiny", **SMALL, logits_processors=[own]) as llm:
        ((output,),) = [each.outputs for each in llm.generate("a", params(), use_tqdm=False)]
        assert list(output.token_ids) == [7] * 6
        (name,) = llm.facts.logits_processors
    assert name == f"__main__:{own.__qualname__}"


def test_a_class_that_cannot_be_sent_is_refused() -> None:
    class Locked(LogitsProcessor):
        lock = threading.Lock()

    with pytest.raises(EngineStartError, match=r"Locked .* cannot be pickled .*lock.*") as refusal:
        LLM("tiny", **SMALL, logits_processors=[Locked])
    assert "\n" not in str(refusal.value)


def test_two_processors_of_one_name_are_refused() -> None:
    with pytest.raises(EngineStartError, match="two logits processors are named"):
        LLM("tiny", **SMALL, multiprocess=False, logits_processors=[chooses(1), chooses(2)])

"""KV connectors in real engines: the example that stores blocks in a directory, and failures."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.connectors import METHODS
from support.engines import assert_idle

from shmllm import LLM, SamplingParams
from shmllm.frontend.model_files import bundled_model

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 2**26, "num_threads": 1, "dtype": "float32"}
PREFIX = "def add(a, b):\n    return a + b\n\n\n" * 5
PROMPTS = [PREFIX + ending for ending in ("def sub(a, b):", "class Queue:", "import os\n")]
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2)


def results(llm: LLM) -> list[tuple[Any, ...]]:
    """Tokens and the exact log-probabilities of each prompt's output."""
    done = [output.outputs[0] for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    return [(list(out.token_ids), list(out.logprobs or ())) for out in done]


def cached(llm: LLM) -> int:
    """How many tokens of the first prompt need not be computed."""
    output = llm.generate([PROMPTS[0]], PARAMS, use_tqdm=False)[0]
    return output.num_cached_tokens or 0


@pytest.fixture(scope="module")
def plain(compiled_kernels: None) -> list[tuple[Any, ...]]:
    """What an engine without a connector computes."""
    with LLM("tiny", **SMALL, multiprocess=False) as llm:
        return results(llm)


@pytest.fixture
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options of an engine with the example's connector."""
    monkeypatch.syspath_prepend(REPOSITORY / "examples")
    return SMALL | {
        "kv_connector": "disk_connector:DiskConnector",
        "kv_connector_extra_config": {"path": str(tmp_path / "blocks")},
    }


def files_of(options: dict[str, Any]) -> list[Path]:
    found = Path(options["kv_connector_extra_config"]["path"]).glob("*/*")
    return sorted(found, key=lambda path: path.name)


def test_a_new_engine_finds_the_blocks_of_an_old_one(
    on_disk: dict[str, Any], plain: list[tuple[Any, ...]]
) -> None:
    with LLM("tiny", **on_disk) as llm:
        assert results(llm) == plain
        files = files_of(on_disk)
        assert len(files) > 5
        (directory,) = {path.parent for path in files}
        elsewhere = directory.rename(directory.with_name("elsewhere"))
        for salt in "ab":  # what cannot be saved ends no request
            prompt = {"prompt": PROMPTS[0], "cache_salt": salt}
            assert llm.generate([prompt], PARAMS, use_tqdm=False)[0].error is None
        texts = [error.text for error in llm.engine_errors()]
        assert all("DiskConnector failed in save_kv_layer: FileNot" in text for text in texts)
        assert texts
        elsewhere.rename(directory)
    of_vllm = {
        "kv_connector": "DiskConnector",
        "kv_connector_module_path": "disk_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": on_disk["kv_connector_extra_config"],
    }
    with LLM("tiny", **SMALL, multiprocess=False, kv_transfer_config=of_vllm) as llm:
        assert cached(llm) >= 64
        llm.reset_prefix_cache()
        assert results(llm) == plain
        assert_idle(llm)
    assert len(files_of(on_disk)) >= len(files)


@pytest.mark.parametrize("overlaps", [False, True])
def test_damaged_files_are_computed_again(
    on_disk: dict[str, Any], plain: list[tuple[Any, ...]], overlaps: bool
) -> None:
    options = on_disk | {"multiprocess": False, "async_scheduling": overlaps}
    with LLM("tiny", **options) as llm:
        assert results(llm) == plain
        llm.reset_prefix_cache()
        whole = cached(llm)
        files = files_of(on_disk)
        for path in files:
            damaged = bytearray(path.read_bytes())
            damaged[-1] ^= 1
            path.write_bytes(damaged)
        llm.reset_prefix_cache()
        assert (whole > 0, cached(llm)) == (True, 0)
        llm.reset_prefix_cache()
        assert results(llm) == plain


def test_blocks_of_other_dtypes_and_weights_are_other_blocks(
    on_disk: dict[str, Any], tmp_path: Path
) -> None:
    options = on_disk | {"multiprocess": False}
    with LLM("tiny", **options) as llm:
        cached(llm)
        before = len(files_of(on_disk))
        llm.collective_rpc("reload_weights")
        assert cached(llm) > 0  # the same weights
        weights = llm.collective_rpc(_a_weight)[0]
        llm.update_weights([weights])
        assert cached(llm) == 0
        assert len(files_of(on_disk)) == before
    with LLM("tiny", **options | {"dtype": "bfloat16"}) as llm:
        assert cached(llm) == 0
    copy = shutil.copytree(bundled_model("tiny"), tmp_path / "copy")
    with LLM(str(copy), **options) as llm:
        assert cached(llm) > 0


def _a_weight(worker: Any) -> Any:
    name, (tensor, *_) = next(iter(worker.model_runner.model.named_weights().items()))
    return name, tensor.clone()


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_role_is_half_of_the_work(on_disk: dict[str, Any], role: str) -> None:
    with LLM("tiny", **on_disk, multiprocess=False, kv_role=role) as llm:
        cached(llm)
        llm.reset_prefix_cache()
        assert cached(llm) == 0
    assert bool(files_of(on_disk)) == (role == "kv_producer")


ENDING = ("get_num_new_matched_tokens", "update_state_after_alloc")
LOADING = ("build_connector_meta", "start_load_kv", "wait_for_layer_load")


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_method_that_raises_is_one_error(
    plain: list[tuple[Any, ...]], caplog: pytest.LogCaptureFixture, overlaps: bool
) -> None:
    from support import connectors

    options = SMALL | {"async_scheduling": overlaps, "kv_connector": connectors.InMemory}
    connectors.fails_in = ""
    with LLM("tiny", **options, multiprocess=False) as llm, caplog.at_level(logging.WARNING):
        assert results(llm) == plain
        for method in METHODS:
            caplog.clear()
            llm.reset_prefix_cache()
            connectors.fails_in = method
            words = f"support.connectors:InMemory failed in {method}: ValueError: broken"
            if method in (*ENDING, *LOADING):
                output = llm.generate([PROMPTS[0]], PARAMS, use_tqdm=False)[0]
                assert words in str(output.error)
                assert not caplog.records
            else:
                connectors.blocks.clear()
                output = llm.generate([PROMPTS[0]], PARAMS, use_tqdm=False)[0]
                assert output.error is None
                assert [words in each.getMessage() for each in caplog.records] == [True]
            connectors.fails_in = ""
            assert_idle(llm)
            assert results(llm) == plain, method


def test_others_go_on_when_a_load_fails(plain: list[tuple[Any, ...]]) -> None:
    from support import connectors

    connectors.fails_in = ""
    with LLM("tiny", **SMALL, multiprocess=False, kv_connector=connectors.InMemory) as llm:
        llm.generate([PROMPTS[0]], PARAMS, use_tqdm=False)
        llm.reset_prefix_cache()
        connectors.fails_in = "start_load_kv"
        other = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2)
        prompts = [PROMPTS[0], "x = 1"]
        outputs = llm.generate(prompts, other, use_tqdm=False)
        connectors.fails_in = ""
        assert "start_load_kv" in str(outputs[0].error)
        alone = llm.generate(["x = 1"], other, use_tqdm=False)[0].outputs[0]
        assert outputs[1].outputs[0].token_ids == alone.token_ids
        assert results(llm) == plain

"""Engines that are started for one property of images: their ends, their options, their memory."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.engines import assert_idle
from support.pools import await_engines, immortal_pools, kills_running
from support.programs import result_of
from support.small_shm import numbers_of, on_shm_of
from support.vision_models import make_vision_model

from shmllm import LLM, EngineDeadError, EngineStartError, RequestError, SamplingParams

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
BASE: dict[str, Any] = {
    "max_model_len": 512,
    "num_threads": 1,
    "dtype": "float32",
    "kv_cache_memory_bytes": 2**26,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing is kept": {"mm_processor_cache_gb": 0},
    "one is kept": {"mm_processor_cache_gb": 20_000 / 2**30},
    "one request": {"max_num_seqs": 1},
    "few blocks": {
        "num_gpu_blocks_override": 20,
        "scheduler_reserve_full_isl": False,
        "max_model_len": 256,
    },
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "overlapped": {"async_scheduling": True},
    "chunks": {"max_num_batched_tokens": 32, "long_prefill_token_threshold": 5},
    "tensor parallel": {"tensor_parallel_size": 2, "num_threads": 2},
    "pipeline": {"pipeline_parallel_size": 2, "num_threads": 2},
    "pool": {"data_parallel_size": 2, "num_threads": 2},
    "private": {},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: Any) -> Path:
    found: Path = tmp_path_factory.mktemp("models") / "llava"
    make_vision_model("llava", found)
    return found


def picture(number: int) -> Any:
    pixels = np.random.default_rng(number).integers(0, 256, (90, 130, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def prompt(text: str, *numbers: int) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": [picture(each) for each in numbers]}}


PROMPTS = [
    *(prompt("Is <image> or <image> it?", n % 5, n) for n in range(12)),
    prompt("<image>", 3),
    prompt("Nothing"),
]


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def wanted(directory: Path) -> list[list[int]]:
    """What an engine in this process gives."""
    with LLM(str(directory), multiprocess=False, **BASE) as llm:
        return tokens(llm)


@pytest.mark.slow
@pytest.mark.parametrize("option", [*OPTIONS])
def test_no_option_changes_a_token(option: str, directory: Path, wanted: list[list[int]]) -> None:
    with LLM(str(directory), **BASE | OPTIONS[option]) as llm:
        assert [tokens(llm) for _ in range(2)] == [wanted] * 2
        assert_idle(llm)
        assert llm.engine_errors() == []
        if option == "few blocks":
            assert llm.get_metrics()["preemptions"] > 0


@pytest.mark.slow
def test_images_start_over_at_another_engine(directory: Path, wanted: list[list[int]]) -> None:
    options = BASE | {"data_parallel_size": 2, "num_threads": 2}
    with immortal_pools(), LLM(str(directory), **options) as llm:
        for index in (0, 1, 0):
            with kills_running(llm, index):
                assert tokens(llm) == wanted
            await_engines(llm, 2)
        assert tokens(llm) == wanted, "the new engines have none of the images"


@pytest.mark.slow
def test_the_death_of_the_only_engine_is_an_error(directory: Path) -> None:
    with LLM(str(directory), **BASE) as llm:
        tokens(llm)
        os.kill(llm._client.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            tokens(llm)


FULL = """
import json, os, sys
import numpy as np
from PIL import Image
from shmllm import LLM, NoSpaceError, SamplingParams
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
def answer(*numbers, text=""):
    images = [
        Image.fromarray(np.random.default_rng(n).integers(0, 256, (99, 99, 3), dtype=np.uint8))
        for n in numbers
    ]
    prompt = {"prompt": text + "<image>" * len(images), "multi_modal_data": {"image": images}}
    try:
        return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
    except NoSpaceError as error:
        return str(error)
with LLM(sys.argv[1], max_model_len=512, num_threads=1, kv_cache_memory_bytes=2**26) as llm:
    found = [answer(text="x")]
    with open("/dev/shm/filler", "wb", buffering=0) as filler:
        try:
            while filler.write(bytes(4096)):
                pass
        except OSError:
            pass
    found += [answer(1), answer(1, 2), answer(text="x")]
    os.unlink("/dev/shm/filler")
    found += [answer(1), answer(1, 2), answer(1), answer(text="x")]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_images_without_room_in_shared_memory_fail_alone(directory: Path) -> None:
    before, *refused, text, one, two, again, after = result_of(
        on_shm_of("3m", FULL, str(directory))
    )
    for message in refused:
        needed, free = numbers_of(message)
        assert needed > free
    assert before == text == after
    assert one == again != two
    assert len(two) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_impl": "transformers"}, "model_impl='transformers': LlavaFor"),
        ({"language_model_only": True}, "the model takes no images"),
    ],
)
def test_an_engine_without_a_tower_says_so(
    directory: Path, options: dict[str, Any], message: str
) -> None:
    with (
        pytest.raises((EngineStartError, RequestError), match=message),
        LLM(str(directory), multiprocess=False, **BASE, **options) as llm,
    ):
        tokens(llm)


def resident_mib(pid: int) -> int:
    """The memory of a process that is no file, in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) // 1024


@pytest.mark.slow
def test_requests_that_end_leave_no_image(directory: Path) -> None:
    options = BASE | {"enable_prefix_caching": False, "mm_processor_cache_gb": 2 / 1024}
    with LLM(str(directory), **options) as llm:
        pids = os.getpid(), llm._client.pid  # type: ignore[attr-defined]
        params = SamplingParams(max_tokens=2)

        def ask(*numbers: int) -> None:
            for number in numbers:
                llm.generate([prompt("<image>", number)], params, use_tqdm=False)

        ask(*range(300), *[1] * 1000)
        before = [resident_mib(pid) for pid in pids]
        ask(*[1] * 3000, *range(300, 600))
        after = [resident_mib(pid) for pid in pids]
        print(f"MiB of the front end and the engine: {before}, {after}")
        assert all(late - early < 8 for early, late in zip(before, after, strict=True))

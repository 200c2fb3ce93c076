"""No sound that a front end sends ends the engine, or changes what others get."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.audio_models import RATE, make_audio_model
from support.engines import assert_unused, named_engine
from support.hostile_items import GREEDY, REFUSED, SERVED, Hostile
from support.programs import is_running
from support.raw_front_end import CUT_OFF

from shmllm import LLM, EngineDeadError
from shmllm.params.items import Item

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

NOISE = (np.random.default_rng(5).standard_normal(RATE) * 0.1).astype(np.float32)


def changed(item: Item) -> dict[str, tuple[Item, str]]:
    """What is done to a sound, and what the engine has to answer."""
    begin, count, data = item.start, item.num_embeds, item.data
    frames = item.grid[0]
    broken = data.copy()
    broken[5, 3] = np.nan
    return {
        "nothing": (item, SERVED),
        "other features under its name": (replace(item, data=data[::-1].copy()), SERVED),
        "features that are no numbers": (replace(item, data=broken), REFUSED),
        "a frame less": (replace(item, data=data[:-1]), REFUSED),
        "a feature less": (replace(item, data=data[:, :-1].copy()), REFUSED),
        "another grid": (replace(item, grid=(frames - 4, 1, 1)), REFUSED),
        "rows": (replace(item, grid=(frames // 2, 2, 1)), REFUSED),
        "no frames": (replace(item, grid=(0, 1, 1)), REFUSED),
        "huge": (replace(item, grid=(2**32 - 1, 1, 1)), REFUSED),
        "fewer embeddings": (replace(item, spans=((begin, begin + count - 1),)), REFUSED),
        "behind the prompt": (replace(item, spans=((500, 500 + count),)), REFUSED),
        "an image": (replace(item, modality="image"), CUT_OFF),
        "a video": (replace(item, modality="video"), CUT_OFF),
        "bytes": (replace(item, data=data.astype(np.uint8)), CUT_OFF),
        "a number": (replace(item, data=data[:, :, None]), CUT_OFF),
        "nothing at all": (replace(item, data=data[:0]), CUT_OFF),
        "a name that nobody sent": (replace(item, identity=bytes(32), data=None), CUT_OFF),
    }


def test_no_sound_ends_the_engine(tmp_path: Path) -> None:
    make_audio_model(tmp_path / "model")
    options: dict[str, Any] = {"model": str(tmp_path / "model"), "max_model_len": 512}
    with named_engine(tmp_path, **options) as (name, pid):
        with LLM.attach(name) as llm:
            mark = llm.front_end.items.mark("audio")
            prompt = {"prompt": f"Hear {mark}!", "multi_modal_data": {"audio": (NOISE, RATE)}}
            (prepared,) = llm.front_end.prepare([prompt])
            (item,) = prepared.submitted.items
            token_ids = list(prepared.submitted.prompt_token_ids)

            def tokens() -> list[int]:
                (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
                llm.reset_prefix_cache()
                return list(output.outputs[0].token_ids)

            wanted = tokens()
            for what, (sent, expected) in changed(item).items():
                assert answer(name, sent, token_ids) == expected, what
                assert tokens() == wanted, what
            assert is_running(pid)
        assert_unused(name)


def answer(name: str, item: Item, token_ids: list[int]) -> str:
    """What a front end gets for a sound. CUT_OFF: the engine has ended the connection."""
    front_end = Hostile(name)
    front_end.enter()
    try:
        return front_end.ask([item], token_ids)
    except EngineDeadError as error:
        return CUT_OFF if CUT_OFF in str(error) else str(error)
    finally:
        front_end.client.close()

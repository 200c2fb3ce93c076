"""Memory of engines with int8 matrices, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.reference_models import make_model

from shmllm import LLM, SamplingParams

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

MIB = 2**20
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
PROMPT = [5, 7, 11, 13] * 9
MOMENTS = ("started", "updated", "updated one by one", "asleep", "written again")


def rss_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * int(text.split("Rss:")[1].split()[0])


def answer(llm: LLM) -> tuple[list[int], float]:
    output = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0]
    return output.token_ids, output.cumulative_logprob


def walk(llm: LLM, weights: list[tuple[str, Any]]) -> tuple[dict[str, int], list[Any]]:
    """Resident bytes at each moment, and the outputs with the same weights."""
    sizes, answers = [], [answer(llm)]

    def look() -> None:
        sizes.append(rss_bytes(llm.engine_pid))

    look()
    llm.update_weights(weights)
    answers.append(answer(llm))
    look()
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    for named in weights:
        model.load_weights([named])
    answers.append(answer(llm))
    look()
    report = llm.sleep(level=2)
    assert report.before["weights"] == pytest.approx(llm.facts.weight_bytes, rel=0.01)
    assert report.after["weights"] == 0
    look()
    llm.wake_up()
    llm.update_weights(weights)
    answers.append(answer(llm))
    look()
    return dict(zip(MOMENTS, sizes, strict=True)), answers


@pytest.mark.slow
def test_a_quantized_engine_holds_a_quarter_of_its_matrices(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path, hidden_size=1024, intermediate_size=4096)
    weights = list(model.named_parameters())
    matrices = sum(4 * w.numel() for n, w in weights if w.ndim == 2 and "embed" not in n)
    assert matrices > 180 * MIB
    options: dict[str, Any] = {"kv_cache_memory_bytes": 2**24, "num_threads": 1}
    with LLM(str(tmp_path), **options) as llm:
        whole, answers = walk(llm, weights)
        plain = llm.facts.weight_bytes
        assert all(each == answers[0] for each in answers)
    with LLM(str(tmp_path), quantization="int8", **options) as llm:
        rounded, answers = walk(llm, weights)
        assert all(each == answers[0] for each in answers)
        assert plain - llm.facts.weight_bytes == pytest.approx(0.75 * matrices, rel=0.01)
        name = "model.layers.1.mlp.up_proj.weight"
        read = llm.collective_rpc("get_weight", args=(name,))[0]
        assert read.dtype == torch.float32
        llm.update_weights({name: read})
        assert answer(llm) == answers[0]
    for moment in MOMENTS:
        less = whole[moment] - rounded[moment]
        print(f"{moment}: {whole[moment] / MIB:.0f} and {rounded[moment] / MIB:.0f} MiB")
        if moment != "asleep":
            assert less == pytest.approx(0.75 * matrices, abs=16 * MIB), moment

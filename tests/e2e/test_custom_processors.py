"""Custom logits processors in a whole engine: what they see and change, and whom a failure ends."""

from __future__ import annotations

from typing import Any

import pytest

from shmllm import LLM, SamplingParams

SMALL = {"num_threads": 1, "multiprocess": False, "dtype": "float32", "max_model_len": 128}
STEPS = pytest.mark.parametrize("overlaps", [False, True], ids=["alone", "overlapped"])


def params(max_tokens: int = 6, **extra_args: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra_args or None
    )


def engine(name: str, **options: Any) -> LLM:
    given = SMALL | {"kv_cache_memory_bytes": 2**26} | options
    return LLM("tiny", **given, logits_processors=[f"support.processors:{name}"])


def run(llm: LLM, prompts: list[Any], given: list[SamplingParams]) -> list[Any]:
    return list(llm.stream(prompts, given, on_error="yield", ordered=True))


def tokens(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


@STEPS
def test_a_batch_with_state_sees_each_request_come_go_move_and_return(overlaps: bool) -> None:
    """Requests of different lengths, more than there are rows, and so few blocks that some are
    preempted; every third one uses no processor."""
    prompts = [[1 + (7 * n + i) % 90 for i in range(3 + 5 * (n % 4))] for n in range(14)]
    lengths = [3 + (11 * n) % 40 for n in range(14)]
    given = [
        params(length) if n % 3 == 0 else params(length, count=100 * n)
        for n, length in enumerate(lengths)
    ]
    with LLM("tiny", **SMALL, kv_cache_memory_bytes=2**26) as plain:
        expected = [tokens(o) for o in run(plain, prompts, [params(n) for n in lengths])]
    options = {
        "num_gpu_blocks_override": 11,
        "scheduler_reserve_full_isl": False,
        "max_num_seqs": 5,
        "async_scheduling": overlaps,
    }
    with engine("BatchCount", **options, max_num_batched_tokens=16) as llm:
        done = run(llm, prompts, given)
        assert llm.get_metrics()["preemptions"] > 0
        (named,) = llm._client._core.runner.processors.all
        moves = [update for update in named.processor.updates if update and update.moved]
        assert moves, "no request moved, so the test shows less than it should"
        returned = [a for u in named.processor.updates if u for a in u.added if a[3]]
        assert returned, "no request returned"
    for n, output in enumerate(done):
        counted = list(range(100 * n, 100 * n + lengths[n]))
        assert tokens(output) == (expected[n] if n % 3 == 0 else counted), n


@STEPS
def test_requests_with_arguments_end_if_it_is_unknown_whose_failure_it_is(overlaps: bool) -> None:
    with engine("BatchCount", async_scheduling=overlaps) as llm:
        alone = [tokens(output) for output in run(llm, [[5, 6], [7, 8]], [params(), params()])]
        given = [params(), params(count=50, fails=3), params(), params(count=70)]
        done = run(llm, [[5, 6], [9], [7, 8], [10]], given)
        assert [tokens(done[0]), tokens(done[2])] == alone
        for index in (1, 3):
            assert done[index].outputs[0].finish_reason == "error"
            assert done[index].error == (
                "the logits processor support.processors:BatchCount failed: ValueError: a request "
                "asked for this"
            )
        assert tokens(run(llm, [[10]], [params(count=70)])[0]) == list(range(70, 76))


def test_a_processor_that_always_fails_ends_all_its_requests_and_not_the_engine() -> None:
    with engine("AlwaysFails") as llm:
        for _ in range(2):
            done = run(llm, [[5, 6], [7]], [params(), params(any=1)])
            assert ["always" in str(output.error) for output in done] == [True, True]
        assert llm.embed([[5, 6]], use_tqdm=False)[0].error is None


def test_processors_come_before_penalties_and_behind_biases() -> None:
    """The bias makes a token the best one, and the presence penalty exceeds the rest."""
    favoured = {"one": 7, "bias": 1000.0}
    with engine("FavourOne") as llm:
        plain = tokens(run(llm, [[5, 6]], [params(3, **favoured)])[0])
        assert plain == [7, 7, 7]
        halved = params(2, **favoured)
        halved.repetition_penalty = 2.0
        halved.logit_bias = {8: 600.0}
        # 7: 1000, then 1000 / 2; 8: 600 throughout.
        assert tokens(run(llm, [[5, 6]], [halved])[0]) == [7, 8]
        banned = params(1, **favoured)
        banned.allowed_token_ids = [8, 9]
        assert tokens(run(llm, [[5, 6]], [banned])[0])[0] in (8, 9)


def test_argmax_invariant_processors_act_on_draws_only() -> None:
    with engine("FlattenDraws") as llm:
        sharp = {"factor": 1e6}
        greedy, same = run(llm, [[5, 6]] * 2, [params(), params(**sharp)])
        assert tokens(greedy) == tokens(same)
        drawn = SamplingParams(temperature=1.5, seed=3, max_tokens=6, ignore_eos=True)
        sharpened = SamplingParams(
            temperature=1.5, seed=3, max_tokens=6, ignore_eos=True, extra_args=sharp
        )
        alone = tokens(run(llm, [[5, 6]], [drawn])[0])
        other, made_greedy = run(llm, [[5, 6]] * 2, [drawn, sharpened])
        assert tokens(other) == alone != tokens(greedy)
        assert tokens(made_greedy) == tokens(greedy)

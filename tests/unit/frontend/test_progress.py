"""Progress bars: their counts. The last state is written without a terminal, too."""

from __future__ import annotations

from typing import ClassVar

import pytest

from shmllm.frontend.progress import BatchProgress, TextProgress, shown_count
from shmllm.outputs.pooling import PoolingRequestOutput
from shmllm.outputs.request import CompletionOutput, RequestOutput


def output(num_tokens, num_prompt, num_cached):
    one = CompletionOutput(0, "", [0] * num_tokens, finish_reason="stop")
    return RequestOutput(
        "", None, [0] * num_prompt, None, [one], True, num_cached_tokens=num_cached
    )


@pytest.mark.parametrize(
    ("total", "num_done", "shown"), [(10, 0, "3/10"), (10, 7, "10/10"), (None, 0, "3/?")]
)
def test_requests_of_this_run_and_of_earlier_runs_are_counted(capsys, total, num_done, shown):
    with BatchProgress(total, True, num_done=num_done) as progress:
        progress.finish(output(4, 10, 5))
        progress.finish(output(2, 10, 0))
        progress.finish(None)
    message = capsys.readouterr().err
    assert shown in message
    assert "prefix hits 25 %" in message
    assert "tokens/s" in message


def test_a_disabled_progress_bar_writes_nothing(capsys):
    with BatchProgress(1, False) as progress:
        progress.finish(output(1, 1, 0))
    assert capsys.readouterr().err == ""


def test_texts_are_counted(capsys):
    with TextProgress(9, True, num_done=6, label="embedding") as progress:
        progress.finish(PoolingRequestOutput("", None, [1, 2, 3]))
        progress.finish(None)
    message = capsys.readouterr().err
    assert message.startswith("embedding ")
    assert "8/9" in message
    assert "texts/s" in message
    assert "tokens/s" in message


def test_other_things_are_counted(capsys):
    with shown_count(5, True, label="transcribing", unit="parts") as add:
        add(3)
    message = capsys.readouterr().err
    assert message.startswith("transcribing ")
    assert "3/5" in message
    assert "parts/s" in message
    assert "tokens" not in message


class Bar:
    """A caller's bar."""

    made: ClassVar[list[Bar]] = []

    def __init__(self, **options):
        self.options, self.num_done, self.is_closed = options, 0, False
        Bar.made.append(self)

    def update(self, number):
        assert not self.is_closed
        self.num_done += number

    def close(self):
        self.is_closed = True


@pytest.mark.parametrize("is_queued", [False, True])
def test_a_function_of_the_caller_s_makes_the_bar(make_llm, capsys, is_queued):
    Bar.made.clear()
    llm, _ = make_llm()
    if is_queued:
        llm.enqueue([[5], [6]])
        llm.wait_for_completion(use_tqdm=Bar)
    else:
        llm.generate([[5], [6]], use_tqdm=Bar)
    (bar,) = Bar.made
    assert bar.options == {"total": 2, "desc": "Processed prompts"}
    assert (bar.num_done, bar.is_closed) == (2, True)
    assert capsys.readouterr().err == ""


def test_a_caller_s_bar_is_closed_by_an_error(make_llm):
    Bar.made.clear()
    llm, engine = make_llm()
    engine.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5]], use_tqdm=Bar)
    assert Bar.made[0].is_closed
    Bar.made.clear()
    assert llm.generate([], use_tqdm=Bar) == Bar.made == []

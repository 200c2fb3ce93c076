"""The calls of `LLM.embed` and `LLM.score` that commands make, and what their results mean."""

from __future__ import annotations

import click
import numpy as np
import pytest
from support.batch_helpers import json_rows, write_rows

from shmllm.batch.embeddings import EmbeddingFormat
from shmllm.batch.pieces import Refused
from shmllm.batch.ranking import Ranking, ScoreFormat
from shmllm.cli.embed import embed
from shmllm.cli.embedding import make_plan, options_of_embed, work_on
from shmllm.cli.score import score
from shmllm.cli.scoring import Scoring
from shmllm.errors import EnginePausedError, RequestError
from shmllm.outputs.pooling import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from shmllm.params.pooling import PoolingParams


class FakeLLM:
    """Records its calls. It refuses the text "wrong", and aborts "aborted"."""

    def __init__(self, error=None):
        self.calls = []
        self._error = error

    def embed(self, prompts, **options):
        return self._run(prompts, options, EmbeddingRequestOutput, lambda text: self._vector(text))

    def score(self, query, documents, **options):
        return self._run(
            documents, options, ScoringRequestOutput, lambda text: ScoringOutput(float(len(text)))
        )

    def _vector(self, text):
        return EmbeddingOutput(np.full(2, len(text), np.float32))

    def _run(self, texts, options, kind, result):
        self.calls.append((list(texts), options))
        if self._error is not None:
            raise self._error
        if "wrong" in texts:
            raise RequestError(f"prompt {[*texts].index('wrong') + 1} is wrong")
        return [
            kind("", result(text), [1], error="was aborted", is_aborted=True)
            if text == "aborted"
            else kind("", result(text), [1])
            for text in texts
        ]


def parsed(command, *arguments):
    return command.make_context(command.name, list(arguments)).params


@pytest.mark.parametrize(
    ("arguments", "params", "others"),
    [
        ((), PoolingParams(), {}),
        (("--no-normalize",), PoolingParams(use_activation=False), {}),
        (
            ("--dimensions", "8", "--pooling-type", "MEAN"),
            PoolingParams(dimensions=8, pooling_type="MEAN"),
            {},
        ),
        (("--prompt-name", "query"), PoolingParams(), {"prompt_name": "query"}),
        (("--truncate-prompt-tokens", "-1"), PoolingParams(), {"truncate_prompt_tokens": -1}),
    ],
    ids=str,
)
def test_options_become_keyword_arguments_if_they_are_given(arguments, params, others):
    options = options_of_embed(parsed(embed, *arguments))
    assert options == {"pooling_params": params, **others}
    llm = FakeLLM()
    work = work_on(llm, **options)
    list(work.stream(iter(["ab"])))
    assert llm.calls == [(["a"], {"use_tqdm": False} | options), (["ab"], llm.calls[0][1])]


def test_a_refused_text_and_an_aborted_one_are_told_apart():
    texts = ["ab", "wrong", "aborted", "abc"]
    results = dict(work_on(FakeLLM()).stream(iter(texts)))
    assert results[1] == Refused("prompt 1 is wrong")
    assert results[2] is None
    assert [results[i].outputs.embedding for i in (0, 3)] == [[2, 2], [3, 3]]


@pytest.mark.parametrize("error", [RequestError("no such prompt"), EnginePausedError("sleeps")])
def test_what_the_engine_refuses_of_any_text_is_not_the_text_s_fault(error):
    with pytest.raises(type(error), match=str(error)):
        work_on(FakeLLM(error))


def scored(tmp_path, *texts, llm=None, top=None):
    rows = json_rows(write_rows(tmp_path / "in.jsonl", texts), ScoreFormat())
    scoring = Scoring("query", Ranking(top), ScoreFormat())
    scoring.run(llm or FakeLLM(), rows, len(texts))
    return scoring


def test_documents_are_ranked_and_failures_reported(tmp_path, capsys):
    texts = [{"text": text} for text in ("ab", "wrong", "abcd", "abc")]
    scoring = scored(tmp_path, *texts, "no JSON", top=2)
    assert [record["line"] for record in scoring.ranking.best_first()] == [3, 4]
    assert scoring.report() == 1
    message = capsys.readouterr().err
    assert "shmllm: line 2: the document is wrong" in message
    assert "shmllm: line 5: not JSON" in message
    assert "2 of 5 documents failed" in message


def test_an_aborted_document_has_no_score(tmp_path, capsys):
    scoring = scored(tmp_path, {"text": "ab"}, {"text": "aborted"})
    assert [record["line"] for record in scoring.ranking.best_first()] == [1]
    assert scoring.report() == 3
    assert "aborted requests; 1 of 2 documents were not scored" in capsys.readouterr().err


def test_the_query_is_named(tmp_path):
    with pytest.raises(RequestError, match=r"^the query is too long$"):
        scored(tmp_path, {"text": "ab"}, llm=FakeLLM(RequestError("prompt 0 is too long")))
    with pytest.raises(EnginePausedError):
        scored(tmp_path, {"text": "ab"}, llm=FakeLLM(EnginePausedError("sleeps")))


@pytest.mark.parametrize(
    ("target", "is_journal"), [("-", False), ("out.jsonl", False), ("out.npy", True)]
)
def test_the_records_of_an_array_are_in_a_journal(tmp_path, target, is_journal):
    source = write_rows(tmp_path / "in.jsonl", [{"text": "x"}])
    plan = make_plan(parsed(embed, "-i", str(source), "-o", target))
    assert plan.path == (f"{target}.partial.jsonl" if is_journal else target)
    assert plan.ordered
    assert isinstance(plan.form, EmbeddingFormat)


@pytest.mark.parametrize("target", ["out", "out.csv", "out.txt", "out.npz"])
def test_another_suffix_is_refused(tmp_path, target):
    source = write_rows(tmp_path / "in.jsonl", [{"text": "x"}])
    with pytest.raises(click.UsageError, match=r"written to \.jsonl, \.parquet or \.npy"):
        make_plan(parsed(embed, "-i", str(source), "-o", target))


def test_the_commands_have_the_options_of_engines():
    for command in (embed, score):
        names = {option.name for option in command.params}
        assert {"model", "attach", "dtype", "num_threads", "metrics_port"} <= names

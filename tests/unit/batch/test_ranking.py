"""A ranking is the sorted beginning of all records."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shmllm.batch.ranking import Ranking, ScoreFormat


@given(st.lists(st.sampled_from([-0.5, 0.0, 0.25, 1.0])), st.one_of(st.none(), st.integers(1, 9)))
def test_the_best_come_first_and_ties_by_line(scores, most):
    ranking = Ranking(most)
    records = [{"line": line, "score": score} for line, score in enumerate(scores, 1)]
    for record in records:
        ranking.add(record)
    expected = sorted(records, key=lambda record: (-record["score"], record["line"]))[:most]
    best = ranking.best_first()
    assert best == [{"rank": i} | record for i, record in enumerate(expected, 1)]


def test_a_record_has_the_row_s_fields():
    form = ScoreFormat()
    row = form.row(3, {"id": 7, "prompt": "a text", "score": 5, "k": [1]})
    record = {"id": 7, "line": 3, "score": 0.5, "text": "a text", "input_score": 5, "k": [1]}
    assert form.record(row, 0.5) == record
    line = form.text_row(4, 2, "b")
    assert form.record(line, 0.5) == {"line": 4, "score": 0.5, "text": "b", "index": 2}

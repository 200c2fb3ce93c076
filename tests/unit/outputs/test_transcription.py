"""The text of a transcript."""

from __future__ import annotations

import pytest

from shmllm.outputs.transcription import Segment, Transcript


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([], ""),
        (["Hello.", "There."], "Hello. There."),
        (["你好。", "再见"], "你好。再见"),
        (["こんにちは", "カタカナ", "漢字"], "こんにちはカタカナ漢字"),
        (["สวัสดี", "ครับ"], "สวัสดีครับ"),
        (["안녕하세요.", "네."], "안녕하세요. 네."),
        (["他说", "hello", "world", "再见"], "他说 hello world 再见"),
        (["a", "b"], "a b"),
    ],
)
def test_segments_have_blanks_between_them_where_their_scripts_have(
    texts: list[str], expected: str
) -> None:
    segments = [Segment(i, i + 1, text) for i, text in enumerate(texts)]
    assert Transcript("", len(texts), segments).text == expected

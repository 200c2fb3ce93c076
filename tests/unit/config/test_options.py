"""The kinds of options, and the table in docs/python.md, which is made from OPTIONS."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shmllm.config.engine import OPTIONS
from shmllm.config.front_end import FrontEndConfig
from shmllm.config.options import parse_bytes
from shmllm.config.shared_kv import SharedKVConfig
from shmllm.errors import EngineStartError

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1),
        ("4096", 4096),
        ("12B", 12),
        ("1K", 2**10),
        ("512M", 2**29),
        ("1GiB", 2**30),
        ("1gib", 2**30),
        ("2 TiB", 2**41),
        ("1.5G", 3 * 2**29),
        ("1kB", 1000),
        ("2GB", 2 * 10**9),
        ("", None),
        ("M", None),
        ("-1G", None),
        ("1e9", None),
        ("1XB", None),
        ("1G extra", None),
    ],
)
def test_a_number_of_bytes_may_have_a_unit(text: str, expected: int | None):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("engines", "prefills", "words"),
    [
        (1, 1, "prefill_engines 1 leaves no engine that decodes: with data_parallel_size 1 only 0"),
        (3, 3, "with data_parallel_size 3 0 to 2 are possible"),
    ],
)
def test_one_engine_of_a_pool_has_to_decode(engines: int, prefills: int, words: str):
    with pytest.raises(EngineStartError, match=words):
        FrontEndConfig(data_parallel_size=engines, prefill_engines=prefills)
    FrontEndConfig(data_parallel_size=engines + 1, prefill_engines=prefills)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"revision": 3}, "revision must be None or a text, got 3"),
        ({"tokenizer_revision": ""}, "tokenizer_revision must be None or a text, got ''"),
        ({"hf_token": 3}, "hf_token must be None, True, False or a text, got 3"),
        ({"download_dir": 3}, "download_dir must be the path of a directory, got 3"),
    ],
)
def test_options_of_the_hub_are_texts(options: dict[str, Any], words: str):
    with pytest.raises(EngineStartError, match=re.escape(words)):
        FrontEndConfig(**options)


def test_a_token_of_the_hub_may_be_a_flag(tmp_path: Path):
    given = FrontEndConfig(hf_token=True, revision="main", download_dir=tmp_path)
    assert (given.hf_token, given.revision) == (True, "main")
    assert given.download_dir == str(tmp_path)


def test_a_role_needs_a_shared_cache():
    SharedKVConfig(role="prefill", num_bytes=1).check_role()
    SharedKVConfig().check_role()
    with pytest.raises(EngineStartError, match="the role 'decode' needs a cache"):
        SharedKVConfig(role="decode").check_role()


def test_option_names_and_flags_are_unique_and_help_is_a_sentence():
    assert len({each.name for each in OPTIONS}) == len(OPTIONS)
    flags = [each.flag for each in OPTIONS if each.flag]
    assert len(set(flags)) == len(flags)
    for each in OPTIONS:
        assert each.help.endswith("."), each.name


def test_the_table_in_the_documentation_is_up_to_date():
    command = [sys.executable, str(REPOSITORY / "tools" / "option_table.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr

"""Which engines tools/compare.py runs, with which precision, and its table; without an engine."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import pytest
from compare import parse_load, table_head
from compare_peers import PEERS, Peer, Precision, candidates, find_peers, missing

NAMES = ["shmllm", "vllm", "openvino_genai", "llama_cpp", "transformers"]
EVERY = dict.fromkeys(NAMES, sys.executable)


def by_name(precision: Precision) -> dict[str, Peer]:
    return {peer.name: peer for peer in candidates(EVERY, precision)}


def test_every_peer_has_a_module() -> None:
    assert list(by_name(Precision("float32"))) == NAMES
    assert all((PEERS / f"run_{name}.py").is_file() for name in NAMES)


def test_a_peer_without_interpreter_or_package_is_left_out_with_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pythons = {"shmllm": sys.executable, "vllm": "/no/python", "llama_cpp": None}
    assert [peer.name for peer in find_peers(pythons, Precision("float32"))] == ["shmllm"]
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "without vllm: /no/python: No such file or directory"
    assert said[2].startswith("without llama_cpp: no --llama-cpp PYTHON; --help says how")
    assert missing(Peer("no_such_package", sys.executable, {}), Precision("float32")) == (
        f"{sys.executable} has no package no_such_package"
    )


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantization_leaves_out_those_that_do_not_quantize(
    quantization: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pythons = {"shmllm": sys.executable, "vllm": sys.executable, "transformers": sys.executable}
    found = find_peers(pythons, Precision("float32", quantization))
    assert [peer.name for peer in found] == ["shmllm"]
    reason = f"it is compared only without --quantization, which is {quantization}"
    said = capsys.readouterr().err
    assert f"without vllm: {reason}\n" in said
    assert f"without transformers: {reason}\n" in said


def test_all_peers_that_quantize_get_the_same_precision() -> None:
    peers = by_name(Precision("bfloat16", "int4", "int8"))
    ours = peers["shmllm"].options
    assert (ours["dtype"], ours["quantization"], ours["activation_dtype"]) == (
        "bfloat16",
        "int4",
        "int8",
    )
    assert peers["openvino_genai"].options["quantization"] == "int4"
    assert peers["llama_cpp"].options == {"weights": "Q4_0"}


@pytest.mark.parametrize(
    ("precision", "kind"),
    [
        (Precision("float32"), "F32"),
        (Precision("bfloat16"), "BF16"),
        (Precision("bfloat16", "int8"), "Q8_0"),
    ],
)
def test_llama_cpp_gets_a_file_in_that_precision(
    precision: Precision, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cached(model: Path, kind: str) -> Path:
        return model.with_suffix(f".{kind}")

    monkeypatch.setattr("gguf_model.cached", cached)
    assert by_name(precision)["llama_cpp"].prepare(Path("m")) == Path(f"m.{kind}")


def test_other_peers_load_the_models_directory() -> None:
    assert by_name(Precision("float32"))["shmllm"].prepare(Path("m")) == Path("m")


def test_the_table_names_the_precision_of_weights_and_of_keys_and_values() -> None:
    facts = {
        "shmllm": {"weights": "int4", "kv_cache": "bfloat16"},
        "llama_cpp": {"weights": "Q4_0", "kv_cache": "f16"},
    }
    assert [line.split() for line in table_head(facts).splitlines()] == [
        ["requests", "in", "out", "shmllm", "llama_cpp", "(tokens/s)"],
        ["weights", "int4", "Q4_0"],
        ["keys", "and", "values", "bfloat16", "f16"],
    ]


def test_a_load_is_read() -> None:
    assert parse_load(None, None, ("16x128,64",)) == [(16, 128, 64)]
    with pytest.raises(click.BadParameter, match="'16' is not like 16x128,64"):
        parse_load(None, None, ("16",))

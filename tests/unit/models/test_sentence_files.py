"""sentence_files and sentence_modules: what sentence-transformers leaves in a model's directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmllm.errors import EngineStartError
from shmllm.models.sentence_files import SentenceFiles, read_sentence_files
from shmllm.models.sentence_modules import DenseFile

OLD, NEW = "sentence_transformers.models", "sentence_transformers"
OLD_TYPES = {
    "Transformer": f"{OLD}.Transformer",
    "Pooling": f"{OLD}.Pooling",
    "Dense": f"{OLD}.Dense",
    "Normalize": f"{OLD}.Normalize",
}
NEW_TYPES = {
    "Transformer": f"{NEW}.base.modules.transformer.Transformer",
    "Pooling": f"{NEW}.sentence_transformer.modules.pooling.Pooling",
    "Dense": f"{NEW}.base.modules.dense.Dense",
    "Normalize": f"{NEW}.base.modules.normalize.Normalize",
    "MultiVectorMask": f"{NEW}.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask",
    "LogitScore": f"{NEW}.cross_encoder.modules.logit_score.LogitScore",
}
TANH = "torch.nn.modules.activation.Tanh"
OF_SENTENCES = {
    "module_input_name": "sentence_embedding",
    "module_output_name": "sentence_embedding",
}
OF_TOKENS = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
OLD_MEAN = {
    "word_embedding_dimension": 384,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": True,
    "pooling_mode_max_tokens": False,
    "pooling_mode_mean_sqrt_len_tokens": False,
}
NEW_MEAN = {"embedding_dimension": 64, "pooling_mode": "mean", "include_prompt": True}


def dense(in_features: int = 64, out_features: int = 32, **fields: Any) -> dict[str, Any]:
    return {
        "in_features": in_features,
        "out_features": out_features,
        "bias": True,
        "activation_function": TANH,
    } | fields


def write(directory: Path, name: str, content: Any) -> None:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def model(directory: Path, *modules: tuple[str, Any], types: dict[str, str] = NEW_TYPES) -> Path:
    """A directory with a Transformer and these modules: their classes and files, None for none."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": types["Transformer"]}]
    for number, (name, content) in enumerate(modules, 1):
        place = f"{number}_{name.rpartition('.')[2]}"
        listed.append(
            {"idx": number, "name": str(number), "path": place, "type": types.get(name, name)}
        )
        if content is not None:
            write(directory, f"{place}/config.json", content)
            if name.endswith("Dense"):
                (directory / place / "model.safetensors").touch()
    write(directory, "modules.json", listed)
    return directory


def read(directory: Path) -> SentenceFiles:
    found = read_sentence_files(directory)
    assert found is not None
    return found


def refused(directory: Path, *parts: str) -> None:
    """One line, with all of these parts."""
    with pytest.raises(EngineStartError) as caught:
        read_sentence_files(directory)
    for part in (str(directory), *parts):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_without_such_files_has_none(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {"model_type": "bert", "hidden_size": 64})
    write(tmp_path, "tokenizer_config.json", {"model_max_length": 512})
    assert read_sentence_files(tmp_path) is None


def test_the_old_generation(tmp_path: Path) -> None:
    """The files of all-MiniLM-L6-v2."""
    model(tmp_path, ("Pooling", OLD_MEAN), ("Normalize", None), types=OLD_TYPES)
    write(tmp_path, "sentence_bert_config.json", {"max_seq_length": 256, "do_lower_case": False})
    versions = {"sentence_transformers": "2.0.0", "transformers": "4.6.1", "pytorch": "1.8.1"}
    write(tmp_path, "config_sentence_transformers.json", {"__version__": versions})
    write(tmp_path, "tokenizer_config.json", {"model_max_length": 512})
    assert read(tmp_path) == SentenceFiles(
        task="embed", pooling="MEAN", normalize=True, max_seq_length=256, prompts={}
    )


def test_the_new_generation(tmp_path: Path) -> None:
    """The files that version 6.2 writes."""
    model(
        tmp_path,
        ("Pooling", NEW_MEAN | {"pooling_mode": "lasttoken", "include_prompt": False}),
        ("Dense", dense() | OF_SENTENCES),
        (
            "Dense",
            dense(32, 16, bias=False, activation_function="torch.nn.modules.activation.GELU")
            | OF_SENTENCES,
        ),
        ("Normalize", OF_SENTENCES),
    )
    transformer = {"transformer_task": "feature-extraction", "module_output_name": "x"}
    write(tmp_path, "sentence_bert_config.json", transformer)
    write(tmp_path, "tokenizer_config.json", {"model_max_length": 100})
    prompts = {"query": "q: ", "document": ""}
    of_model = {"model_type": "SentenceTransformer", "similarity_fn_name": "cosine"}
    of_model |= {"prompts": prompts, "default_prompt_name": "query"}
    write(tmp_path, "config_sentence_transformers.json", of_model)
    first, second = tmp_path / "2_Dense", tmp_path / "3_Dense"
    assert read(tmp_path) == SentenceFiles(
        task="embed",
        pooling="LAST",
        include_prompt=False,
        dense=(
            DenseFile(
                path=first / "model.safetensors",
                prefix="2_Dense",
                in_features=64,
                out_features=32,
                bias=True,
                activation="tanh",
            ),
            DenseFile(
                path=second / "model.safetensors",
                prefix="3_Dense",
                in_features=32,
                out_features=16,
                bias=False,
                activation="gelu",
            ),
        ),
        normalize=True,
        max_seq_length=100,
        prompts=prompts,
        default_prompt="query",
        similarity="cosine",
    )


@pytest.mark.parametrize(
    ("content", "pooling"),
    [
        ({"pooling_mode": "cls"}, "CLS"),
        ({"pooling_mode": ["mean"]}, "MEAN"),
        ({"pooling_mode": "lasttoken", "pooling_mode_cls_token": True}, "LAST"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "CLS"),
        ({"pooling_mode_lasttoken": True}, "LAST"),
        ({"pooling_mode_cls_token": False}, "MEAN"),
        ({}, "MEAN"),
    ],
)
def test_poolings(tmp_path: Path, content: dict[str, Any], pooling: str) -> None:
    assert read(model(tmp_path, ("Pooling", content))).pooling == pooling


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ({"pooling_mode": "max"}, "'max'"),
        ({"pooling_mode": "weightedmean"}, "'weightedmean'"),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "'mean_sqrt_len_tokens'"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "'cls+mean'"),
        ({"pooling_mode": ["cls", "max"]}, "'cls+max'"),
        ({"pooling_mode": []}, "''"),
        ({"pooling_mode": 3}, "'pooling_mode'"),
    ],
)
def test_other_poolings_are_refused_by_name(
    tmp_path: Path, content: dict[str, Any], shown: str
) -> None:
    refused(model(tmp_path, ("Pooling", content)), "1_Pooling/config.json", shown)


@pytest.mark.parametrize(
    "kind", ["WordWeights", "CNN", "LSTM", "Router", "SparseAutoEncoder", "mine.Whitening"]
)
def test_unknown_modules_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    name = kind if "." in kind else f"{OLD}.{kind}"
    refused(model(tmp_path, ("Pooling", NEW_MEAN), (name, {})), "modules.json", name)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("modules.activation.Tanh", "tanh"),
        ("modules.activation.GELU", "gelu"),
        ("modules.activation.ReLU", "relu"),
        ("modules.activation.SiLU", "silu"),
        ("modules.activation.Sigmoid", "sigmoid"),
        ("modules.linear.Identity", "none"),
        ("Tanh", "tanh"),
    ],
)
def test_activations(tmp_path: Path, kind: str, name: str) -> None:
    content = dense(activation_function=f"torch.nn.{kind}")
    (found,) = read(model(tmp_path, ("Pooling", NEW_MEAN), ("Dense", content))).dense
    assert found.activation == name


def test_the_default_activation_is_tanh(tmp_path: Path) -> None:
    content = dense()
    del content["activation_function"], content["bias"]
    (found,) = read(model(tmp_path, ("Pooling", NEW_MEAN), ("Dense", content))).dense
    assert (found.activation, found.bias) == ("tanh", True)


def test_a_null_in_the_place_of_a_boolean_is_false_as_in_python(tmp_path: Path) -> None:
    pooling = NEW_MEAN | {"include_prompt": None}
    found = read(model(tmp_path, ("Pooling", pooling), ("Dense", dense(bias=None))))
    assert (found.include_prompt, found.dense[0].bias) == (False, False)


@pytest.mark.parametrize("name", ["torch.nn.modules.activation.Mish", "mine.Tanh", "Tanh", ""])
def test_other_activations_are_refused_by_name(tmp_path: Path, name: str) -> None:
    content = dense(activation_function=name)
    refused(model(tmp_path, ("Pooling", NEW_MEAN), ("Dense", content)), "2_Dense", repr(name))


@pytest.mark.parametrize(
    ("modules", "shown"),
    [
        ([("Pooling", NEW_MEAN), ("Dense", dense(63))], "'in_features' is 63"),
        ([("Pooling", NEW_MEAN), ("Dense", dense()), ("Dense", dense())], "vectors of 32"),
        ([("Pooling", NEW_MEAN), ("Dense", dense(use_residual=True))], "use_residual"),
        ([("Pooling", NEW_MEAN), ("Dense", dense() | OF_TOKENS)], "'token_embeddings'"),
        ([("Dense", dense()), ("Pooling", NEW_MEAN)], "directly behind"),
        ([("Pooling", NEW_MEAN), ("Pooling", NEW_MEAN)], "one Pooling"),
        ([("Pooling", NEW_MEAN), ("Normalize", None), ("Dense", dense())], "behind Normalize"),
        ([("Pooling", NEW_MEAN), ("Normalize", OF_TOKENS)], "'token_embeddings'"),
        ([("Pooling", NEW_MEAN), ("MultiVectorMask", {})], "MultiVectorMask"),
        ([("MultiVectorMask", {"keep_only_token_ids": [3]})], "keep_only_token_ids"),
        ([("MultiVectorMask", {"skiplist_tasks": ["query"]})], "skiplist_tasks"),
        ([("LogitScore", {})], "'true_token_id' is missing"),
        ([("LogitScore", {"true_token_id": 3}), ("Normalize", None)], "behind scores"),
        ([("Dense", dense(module_output_name="scores"))], "'scores'"),
        ([("Pooling", None)], "1_Pooling/config.json"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    tmp_path: Path, modules: list[tuple[str, Any]], shown: str
) -> None:
    refused(model(tmp_path, *modules), shown)


def test_weights_of_projections_may_be_pickles(tmp_path: Path) -> None:
    model(tmp_path, ("Pooling", NEW_MEAN), ("Dense", dense()))
    weights = tmp_path / "2_Dense" / "model.safetensors"
    pickled = weights.rename(weights.with_name("pytorch_model.bin"))
    files = read_sentence_files(tmp_path)
    assert files is not None
    assert [each.path for each in files.dense] == [pickled]
    pickled.unlink()
    refused(tmp_path, "2_Dense has neither model.safetensors nor pytorch_model.bin")


def test_a_late_interaction_of_version_6(tmp_path: Path) -> None:
    mask = {"skiplist_words": [",", "."], "skiplist_tasks": ["document"]}
    model(
        tmp_path,
        ("Dense", dense(activation_function="torch.nn.modules.linear.Identity") | OF_TOKENS),
        ("MultiVectorMask", mask | {"keep_only_token_ids": None}),
        ("Normalize", OF_TOKENS),
    )
    write(tmp_path, "config_sentence_transformers.json", {"model_type": "MultiVectorEncoder"})
    found = read(tmp_path)
    assert (found.task, found.pooling, found.normalize) == ("token_embed", None, True)
    assert [each.prefix for each in found.dense] == ["1_Dense"]
    assert found.skiplist_words == (",", ".")


def test_a_late_interaction_of_pylate(tmp_path: Path) -> None:
    """PyLate normalizes and leaves out punctuation without modules; its Dense reads tokens."""
    types = OLD_TYPES | {"Dense": "pylate.models.Dense.Dense"}
    model(tmp_path, ("Dense", dense(use_residual=False) | OF_SENTENCES), types=types)
    of_model = {"model_type": "ColBERT", "query_prefix": "[Q] ", "document_prefix": "[D] "}
    of_model |= {"prompts": {"query": "find ", "document": "[D] text "}}
    write(tmp_path, "config_sentence_transformers.json", of_model)
    found = read(tmp_path)
    assert (found.task, found.pooling, found.normalize) == ("token_embed", None, True)
    assert found.prompts == {"query": "[Q] find ", "document": "[D] text "}
    assert found.markers == ("[Q] ", "[D] ")
    assert len(found.dense) == 1
    assert len(found.skiplist_words) == 32


def test_a_model_of_colberts_own_code(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {"architectures": ["HF_ColBERT"]})
    found = read(tmp_path)
    assert (found.task, found.normalize, found.similarity) == ("token_embed", True, "maxsim")
    assert found.prompts == {"query": "[unused0] ", "document": "[unused1] "}
    assert found.markers == ("[unused0] ", "[unused1] ")
    assert len(found.skiplist_words) == 32
    write(tmp_path, "artifact.metadata", {"doc_token_id": "[D]", "mask_punctuation": False})
    assert read(tmp_path).markers == ("[unused0] ", "[D] ")
    assert read(tmp_path).skiplist_words == ()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("torch.nn.modules.activation.Sigmoid", "sigmoid"),
        ("torch.nn.modules.linear.Identity", "none"),
        ("torch.nn.modules.activation.Softmax", "softmax"),
    ],
)
@pytest.mark.parametrize("place", ["version 6", "version 4", "before"])
def test_cross_encoders(tmp_path: Path, place: str, kind: str, name: str) -> None:
    config: dict[str, Any] = {"model_type": "bert"}
    if place == "version 6":
        model(tmp_path)
        of_model = {"model_type": "CrossEncoder", "activation_fn": kind, "prompts": {}}
        write(tmp_path, "config_sentence_transformers.json", of_model)
    elif place == "version 4":
        config["sentence_transformers"] = {"activation_fn": kind, "version": "4.0.1"}
    else:
        config["sbert_ce_default_activation_function"] = kind
    write(tmp_path, "config.json", config)
    found = read(tmp_path)
    assert (found.task, found.pooling, found.activation) == ("classify", None, name)


def test_an_unknown_activation_of_scores_is_refused_by_name(tmp_path: Path) -> None:
    name = "torch.nn.modules.activation.Tanh"
    write(tmp_path, "config.json", {"sbert_ce_default_activation_function": name})
    refused(tmp_path, "config.json", name)


def test_a_cross_encoder_of_modules(tmp_path: Path) -> None:
    identity = {"activation_function": "torch.nn.modules.linear.Identity"}
    scores = dense(64, 1, module_output_name="scores") | identity
    found = read(model(tmp_path, ("Pooling", NEW_MEAN), ("Dense", scores)))
    assert (found.task, found.pooling) == ("classify", "MEAN")
    assert [each.out_features for each in found.dense] == [1]


def test_a_cross_encoder_that_reads_logits(tmp_path: Path) -> None:
    ids = {"true_token_id": 9693, "false_token_id": 2152, "module_input_name": "causal_logits"}
    found = read(model(tmp_path / "both", ("LogitScore", ids)))
    assert (found.task, found.score_tokens) == ("classify", (9693, 2152))
    one = read(model(tmp_path / "one", ("LogitScore", ids | {"false_token_id": None})))
    assert one.score_tokens == (9693,)


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "xlnet"])
def test_the_length_at_which_texts_are_cut(tmp_path: Path, family: str) -> None:
    model(tmp_path, ("Pooling", NEW_MEAN))
    content = {"max_seq_length": 77, "do_lower_case": True}
    write(tmp_path, f"sentence_{family}_config.json", content)
    found = read(tmp_path)
    assert (found.max_seq_length, found.do_lower_case) == (77, True)


@pytest.mark.parametrize("limit", [10**30, None, "x", 0])
def test_a_tokenizer_without_a_limit_cuts_nothing(tmp_path: Path, limit: Any) -> None:
    model(tmp_path, ("Pooling", NEW_MEAN))
    write(tmp_path, "tokenizer_config.json", {"model_max_length": limit})
    write(tmp_path, "sentence_bert_config.json", {"max_seq_length": None})
    assert read(tmp_path).max_seq_length is None


def test_a_transformer_below_the_model_has_its_own_length(tmp_path: Path) -> None:
    model(tmp_path, ("Pooling", NEW_MEAN), types=OLD_TYPES)
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    write(tmp_path, "modules.json", modules)
    write(tmp_path, "0_Transformer/sentence_bert_config.json", {"max_seq_length": 12})
    assert read(tmp_path).max_seq_length == 12


def test_a_default_prompt_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    content = {"prompts": {"query": "q", "document": None}, "default_prompt_name": "document"}
    write(tmp_path, "config_sentence_transformers.json", content)
    refused(tmp_path, "'document'", "'query'")


@pytest.mark.parametrize(
    "place", ["/tmp", "../other", "a/../../b", "C:\\x", "a\\..\\b", "a\0", "\ud800", "x" * 300]
)
def test_a_path_outside_of_the_model_is_refused(tmp_path: Path, place: str) -> None:
    modules = [{"path": "", "type": "Transformer"}, {"path": place, "type": "Pooling"}]
    write(tmp_path, "modules.json", modules)
    refused(tmp_path, "modules.json", "'path'")


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", "[]", '[{"type": "Pooling", "path": ""}]', "[" * 100_000, '"\\ud800"']
)
def test_damaged_modules_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    refused(tmp_path, "modules.json")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["mean", "cls", "2_Dense", "", TANH, "sentence_embedding", "scores"])
    | st.sampled_from([OLD_TYPES["Pooling"], "Dense", "Normalize", "LogitScore", 64, 32]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
FILES = {
    "modules.json": [],
    "1_Pooling/config.json": [*NEW_MEAN, *OLD_MEAN],
    "2_Dense/config.json": [*dense(), *OF_SENTENCES, "use_residual"],
    "3_Normalize/config.json": [*OF_SENTENCES],
    "config.json": ["sentence_transformers", "sbert_ce_default_activation_function"],
    "sentence_bert_config.json": ["max_seq_length", "do_lower_case"],
    "tokenizer_config.json": ["model_max_length"],
    "config_sentence_transformers.json": [
        "prompts",
        "default_prompt_name",
        "similarity_fn_name",
        "activation_fn",
        "model_type",
        "query_prefix",
        "skiplist_words",
    ],
}


@st.composite
def damaged(draw: Any) -> tuple[str, Any]:
    """One of the files, with other values of some of its fields."""
    name = draw(st.sampled_from(sorted(FILES)))
    if name == "modules.json":
        fields = st.sampled_from(["type", "path", "name"])
        entry = st.dictionaries(fields, VALUES, max_size=3)
        transformer = [{"type": "Transformer", "path": ""}]
        return name, draw(VALUES | st.lists(entry, max_size=4).map(lambda x: transformer + x))
    return name, draw(VALUES | st.dictionaries(st.sampled_from(FILES[name]), VALUES, max_size=4))


@given(damage=damaged())
@settings(max_examples=150, deadline=None)
def test_damaged_files_are_read_or_refused(tmp_path_factory: Any, damage: tuple[str, Any]) -> None:
    name, content = damage
    directory = tmp_path_factory.mktemp("model")
    model(directory, ("Pooling", NEW_MEAN), ("Dense", dense()), ("Normalize", OF_SENTENCES))
    for each in FILES:
        if not (directory / each).exists():
            write(directory, each, {})
    write(directory, name, content)
    shown = "read"
    try:
        read(directory)
    except EngineStartError as error:
        shown = str(error)
    assert shown.isprintable()

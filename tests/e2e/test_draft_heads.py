"""Heads that draft: what they draft is what their formulas say, and no output changes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.block_heads import BlockHead
from support.determinism import ask, make_requests
from support.draft_heads import EagleHead, FirstEagleHead
from support.drafting import OPTIONS, drafting, record_drafts
from support.medusa_heads import MedusaHeads
from support.model_helpers import reference_model, save
from support.pickled import pickle_weights
from support.reference_models import make_model
from support.variants import slow

from shmllm import LLM, EngineStartError, SamplingParams
from shmllm.frontend.model_catalog import record_of_model

PROMPT = [5, 9, 11, 5, 9, 13, 40, 41, 5]
LONG: dict[str, Any] = {"max_position_embeddings": 1024, "num_hidden_layers": 6}
NEAR = 1e-4
"""Drafts whose logits are so close are not compared."""
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "own levels": {"levels": (1, 4), "has_table": False},
    "norms": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "norms of levels": {"fc_norm": True, "levels": (1, 4), "num_aux_hidden_states": 2},
    "both": {"fc_norm": True, "norm_before_fc": True},
    "last state": {"levels": ()},
    "at once": {"mask_token": 96, "norm_before_residual": False},
    "at once, with norms": {"mask_token": 3, "fc_norm": True, "num_layers": 2},
    "at once, of the last state": {"mask_token": 0, "levels": ()},
    "layers": {"num_layers": 2, "hidden_size": 64, "target_hidden_size": 48},
    "whole vocabulary": {"num_drafted": 97},
}


def model_and_head(tmp_path: Path, form: str = "safe_ai_lab", **options: Any) -> tuple[Any, ...]:
    reference = reference_model("qwen3", **LONG)
    head = EagleHead(reference, **options)
    return (
        reference,
        head,
        str(save(reference, tmp_path / "model")),
        str(head.save(tmp_path / "head", form)),
    )


@pytest.mark.parametrize(
    ("name", "form", "kind"),
    [
        ("plain", "safe_ai_lab", "llama"),
        ("own levels", "speculators", "qwen3"),
        ("norms of levels", "speculators", "llama"),
        ("at once", "speculators", "qwen3"),
        slow("norms", "speculators", "llama"),
        slow("at once, with norms", "safe_ai_lab", "llama"),
        slow("at once, of the last state", "safe_ai_lab", "llama"),
        slow("both", "safe_ai_lab", "llama"),
        slow("last state", "safe_ai_lab", "qwen3"),
        slow("layers", "safe_ai_lab", "qwen3"),
        slow("whole vocabulary", "safe_ai_lab", "llama"),
    ],
)
def test_a_head_drafts_what_its_formulas_say(
    name: str, form: str, kind: str, tmp_path: Path
) -> None:
    options = {"norm_before_residual": False} | VARIANTS[name]
    assert_drafts_of(*model_and_head(tmp_path, form, kind=kind, **options), "eagle3")


@pytest.mark.parametrize(
    ("form", "options", "method"),
    [
        ("plain", {"bias": True}, None),
        ("pickled", {}, None),
        slow("eagle", {"has_table": False}, None),
        slow("named", {"kind": "qwen2", "num_layers": 2}, None),
        slow("named", {"has_head": True}, "eagle"),
    ],
)
def test_a_head_of_eagle_1_drafts_what_its_formulas_say(
    form: str, options: dict[str, Any], method: str | None, tmp_path: Path
) -> None:
    reference = reference_model("qwen3", **LONG)
    head = FirstEagleHead(reference, **options)
    directory = str(head.save(tmp_path / "head", "plain" if form == "pickled" else form))
    if form == "pickled":
        pickle_weights(Path(directory))
    model = str(save(reference, tmp_path / "model"))
    given = {} if method is None else {"method": method}
    assert_drafts_of(reference, head, model, directory, "eagle", **given)


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("z_lab", {}),
        slow("z_lab", {"has_table": True, "layers": (4,), "num_layers": 1}),
        slow("speculators", {"num_drafted": 50}),
    ],
)
def test_a_head_of_dflash_drafts_what_its_formulas_say(
    form: str, options: dict[str, Any], tmp_path: Path
) -> None:
    reference = reference_model("qwen3", **LONG)
    head = BlockHead(reference, **options)
    directory = str(head.save(tmp_path / "head", form))
    model = str(save(reference, tmp_path / "model"))
    assert_drafts_of(reference, head, model, directory, "dflash")


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("vllm", {"bias": True, "num_blocks": 2}),
        slow("authors", {}),
        slow("vllm", {"shares_head": True, "num_heads": 3}),
    ],
)
def test_medusa_drafts_what_its_formulas_say(
    form: str, options: dict[str, Any], tmp_path: Path
) -> None:
    reference = reference_model("qwen3", **LONG)
    heads = MedusaHeads(reference, **options)
    directory = str(heads.save(tmp_path / "head", form))
    model = str(save(reference, tmp_path / "model"))
    assert_drafts_of(reference, heads, model, directory, "medusa")
    with pytest.raises(EngineStartError, match=r"drafts at most [34] tokens: set num_spec"):
        LLM(model, **drafting(model=directory, num_speculative_tokens=5))


def assert_drafts_of(
    reference: Any, head: Any, model: str, directory: str, found: str, **given: str
) -> None:
    """An engine in which the head in a directory drafts has the tokens of one without, and drafts
    what the head drafts."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompt = {"prompt_token_ids": PROMPT}
    with LLM(model, **OPTIONS) as llm:
        expected = list(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids)
    with LLM(model, **drafting(model=directory, **given), max_num_batched_tokens=4) as llm:
        assert llm.facts.speculative_method == found
        recorded = record_drafts(llm)
        outputs = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
        assert list(outputs) == expected
    tokens, compared = PROMPT + expected, 0
    for position, drafts in recorded:
        wanted, margin = head.drafts(reference, tokens[:position], len(drafts))
        if margin > NEAR:
            assert drafts == wanted, f"at {position}"
            compared += len(drafts)
    assert compared > 15


AT_ONCE = partial(EagleHead, mask_token=7)


@pytest.mark.parametrize(
    "make", [EagleHead, *map(slow, (FirstEagleHead, AT_ONCE, BlockHead, MedusaHeads))]
)
def test_outputs_do_not_change_with_a_head(make: Any, tmp_path: Path) -> None:
    reference = reference_model("qwen3", **LONG)
    model = str(save(reference, tmp_path / "model"))
    directory = str(make(reference).save(tmp_path / "head"))
    requests = make_requests(97, 24, seed=3)
    with LLM(model, **OPTIONS) as llm:
        expected = ask(llm, requests)
    for count in (1, 4):
        options = drafting(model=directory, num_speculative_tokens=count)
        with LLM(model, **options, max_num_batched_tokens=64) as llm:
            assert ask(llm, requests) == expected
            assert llm._client._core.scheduler.stats.draft_tokens > 100  # type: ignore[attr-defined]
            llm.sleep(level=2)
            llm.wake_up(["weights"])
            llm.collective_rpc("reload_weights")
            llm.wake_up()
            assert ask(llm, requests) == expected
    options |= {
        "num_gpu_blocks_override": 140,
        "scheduler_reserve_full_isl": False,
        "max_model_len": 720,
    }
    with LLM(model, **options) as llm:
        assert ask(llm, requests) == expected
        assert llm.get_metrics()["preemptions"] > 0


@pytest.mark.parametrize(
    "family",
    ["glm_moe_dsa", *map(slow, ("gemma3", "qwen3_5", "deepseek_v3", "falcon_h1", "llama4"))],
)
def test_outputs_do_not_change_with_a_head_whatever_the_layers_are(
    family: str, tmp_path: Path
) -> None:
    """GLM-5's layers read the slots that others have chosen, and the head has other blocks."""
    reference = make_model(family, tmp_path / "model")
    depth = reference.config.num_hidden_layers
    model = str(tmp_path / "model")
    head = EagleHead(reference, levels=(0, depth // 2, depth), num_drafted=1000)
    directory = str(head.save(tmp_path / "head"))
    requests = [
        each for each in make_requests(4096, 8, seed=5) if len(each[0]["prompt_token_ids"]) < 200
    ]
    with LLM(model, **OPTIONS) as llm:
        expected = ask(llm, requests)
    with LLM(model, **drafting(model=directory)) as llm:
        for _ in range(2):  # with an empty prefix cache, and with hits
            assert ask(llm, requests) == expected


def test_a_head_names_its_model(tmp_path: Path) -> None:
    """As in vLLM, the head's name is enough."""
    reference = reference_model("qwen3", **LONG)
    model = str(save(reference, tmp_path / "model"))
    head = EagleHead(reference, num_drafted=97)
    directory = str(head.save(tmp_path / "head", "speculators", model))
    with LLM(directory, **OPTIONS) as llm:
        facts = llm.facts
        assert (facts.model_directory, facts.speculative_model) == (model, directory)
        assert facts.num_speculative_tokens == 2
    assert record_of_model("head", "local", Path(directory)).problem is None
    with pytest.raises(EngineStartError, match="a head, which drafts for another model"):
        LLM(directory, **OPTIONS, speculative_config={"method": "ngram"})
    lost = head.save(tmp_path / "lost", "speculators", str(tmp_path / "nowhere"))
    with pytest.raises(EngineStartError, match="nowhere"):
        LLM(str(lost), **OPTIONS)


def test_heads_that_cannot_draft_are_refused(tmp_path: Path) -> None:
    _, _, model, directory = model_and_head(tmp_path, levels=(1, 9))
    with pytest.raises(EngineStartError, match=r"behind \[1, 9\] layers, and the model has 6"):
        LLM(model, **drafting(model=directory))
    with pytest.raises(EngineStartError, match="a head, which drafts for another model"):
        LLM(directory, **OPTIONS)
    fields = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {"model_type": ["llama"]},
    }
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text(json.dumps(fields))
    with pytest.raises(EngineStartError, match=r"model_type \['llama'\] is not supported"):
        LLM(model, **drafting(model=str(tmp_path / "odd")))
    for method in ("draft_model", "eagle"):
        with pytest.raises(EngineStartError, match=f"method 'eagle3': leave out '{method}'"):
            LLM(model, **drafting(model=directory, method=method))
    with pytest.raises(EngineStartError, match="method 'draft_model': leave out 'eagle3'"):
        LLM(model, **drafting(model=model, method="eagle3"))
    with pytest.raises(EngineStartError, match="eagle3' is not possible with model_impl"):
        LLM(model, **drafting(model=directory), model_impl="transformers")
    wide = reference_model("qwen3", hidden_size=64)
    other = str(save(wide, tmp_path / "wide"))
    with pytest.raises(EngineStartError, match="hidden states of 48 numbers, and the model's"):
        LLM(other, **drafting(model=directory))


@pytest.mark.parametrize(
    ("place", "offset"), [(0, -1), (39, 58), slow(5, -(2**63)), slow(39, 2**63 - 1)]
)
def test_ids_outside_of_the_vocabulary_are_an_error_of_the_start(
    place: int, offset: int, tmp_path: Path
) -> None:
    _, head, model, _ = model_and_head(tmp_path)
    head.d2t[place] = offset
    wrong = str(head.save(tmp_path / "wrong"))
    with pytest.raises(EngineStartError, match=f"wrong: d2t has {offset} at {place}, which makes"):
        LLM(model, **drafting(model=wrong))

"""The GGUF files that `shmllm quantize` writes compute the same in llama.cpp, for every family.

`pip install llama-cpp-python` first; without it these tests are skipped.
"""

from __future__ import annotations

import ctypes
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.gguf_family_sizes import LATENTS
from support.gguf_models import (
    add_bundled_vocabulary,
    as_before_latents,
    with_fused_experts,
    with_fused_qkv,
    with_joined_gates,
    with_joined_latents,
    with_unread_keys,
    write,
    write_model,
)
from support.gguf_read_alone import READ_ALONE
from support.gguf_vocabularies import add_gemma4_vocabulary, trained_gemma4
from support.model_helpers import assert_logits_close, reference_model
from support.multimodal_models import nest
from support.quantize_helpers import writable_model
from support.reference_models import NOT_IN_GGUF, VARIANTS
from torch import Tensor

from shmllm.formats.gguf import read_header
from shmllm.frontend.gguf.tokenizer import make_tokenizer
from shmllm.frontend.text.tokenizer import Tokenizer
from shmllm.quantize.gguf_model import write_gguf
from shmllm.quantize.source import Source
from shmllm.quantize.target import Target

pytestmark = pytest.mark.slow

LENGTHS = (5, 200)
WINDOW = 48
LEFT_OUT = ("mistral", "phi3", "starcoder2")
"""Families whose windows llama.cpp leaves out."""
TOLERANCES = {
    **dict.fromkeys(("gpt2", "gpt_neox", "phi", "starcoder2", "falcon", "falcon_7b"), 1e-3),
    **dict.fromkeys(("bloom", "mpt"), 1e-3),
    **{"gemma": 5e-3, "gemma2": 5e-3, "gemma3": 5e-2, "gemma3n": 1e-2, "gemma4": 1e-2},
}
"""llama.cpp takes GELU from a table in float16."""
ROPE = {"rope_theta": 1e4, "original_max_position_embeddings": 128}
YARN = ROPE | {"rope_type": "yarn", "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LONG = ROPE | {
    "rope_type": "longrope",
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.5, 1.8, 2.1, 2.4, 2.7, 3.0],
}
LONG_ONLY = LONG | {"short_factor": LONG["long_factor"]}
"""transformers takes the short factors for short texts, llama.cpp and an engine the long ones."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in VARIANTS if kind not in NOT_IN_GGUF},
    # llama.cpp leaves biases out, and has norms of heads in models of at least 64 layers alone.
    "cohere": ("cohere", {"attention_bias": False, "use_qk_norm": False}),
    "command r+": ("cohere", {"attention_bias": False, "num_hidden_layers": 64}),
    "stablelm without norms of heads": ("stablelm", {"qk_layernorm": False}),
    "granite 4 without experts": (
        "granite_moe_hybrid",
        {"num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "starcoder with keys of each head": ("gpt_bigcode", {"multi_query": False}),
    "exaone4": (  # llama.cpp has windows in models of 64 layers alone
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 5},
    ),
    "seed_oss": ("seed_oss", {"attention_out_bias": False}),  # llama.cpp reads no such bias
    "phi3 longrope": (
        "phi3",
        {"rope_parameters": LONG_ONLY, "sliding_window": None, "tie_word_embeddings": True}
        | {"original_max_position_embeddings": 128},
    ),
    "olmo3 yarn": (
        "olmo3",
        {
            "rope_parameters": {
                "full_attention": YARN | {"attention_factor": 1.3},
                "sliding_attention": PLAIN,
            }
        },
    ),
    "llama yarn": ("llama", {"rope_parameters": YARN | {"attention_factor": 1.4}}),
    "granite scales": (
        "granite",
        {"embedding_multiplier": 3.0, "logits_scaling": 2.5, "tie_word_embeddings": True},
    ),
}


@contextmanager
def model_of(file: Path, *, vocab_only: bool = False) -> Iterator[tuple[Any, Any]]:
    """llama.cpp's functions, and a file's model."""
    api: Any = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    api.llama_backend_init()
    silent = api.llama_log_callback(lambda *_: None)
    api.llama_log_set(silent, ctypes.c_void_p(0))
    params = api.llama_model_default_params()
    params.vocab_only = vocab_only
    model = api.llama_model_load_from_file(str(file).encode(), params)
    assert model, "llama.cpp cannot load the file"
    try:
        yield api, model
    finally:
        api.llama_model_free(model)
        del silent


@contextmanager
def context_of(file: Path, *, embeddings: bool = False) -> Iterator[tuple[Any, Any, int]]:
    """llama.cpp's functions, a context in float32, and the size of the vocabulary. With
    `embeddings`, it makes vectors as the file says."""
    with model_of(file) as (api, model):
        params = api.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = 512
        params.type_k = params.type_v = api.GGML_TYPE_F32
        params.n_threads = params.n_threads_batch = 1
        params.embeddings = embeddings
        params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        context = api.llama_init_from_model(model, params)
        try:
            yield api, context, api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        finally:
            api.llama_free(context)


def llama_cpp_tokens(file: Path, texts: list[str]) -> list[list[int]]:
    """The tokens of each text, without one at its beginning; the file may have no tensors."""
    found = []
    with model_of(file, vocab_only=True) as (api, model):
        vocabulary = api.llama_model_get_vocab(model)
        for text in texts:
            content = text.encode()
            tokens = (api.llama_token * len(content))()
            count = api.llama_tokenize(
                vocabulary, content, len(content), tokens, len(content), False, False
            )
            found.append(tokens[:count])
    return found


def llama_cpp_logits(file: Path, prompts: list[list[int]]) -> list[Tensor]:
    """The logits at every position of each prompt, [tokens, vocabulary] float32."""
    found = []
    with context_of(file) as (api, context, vocab_size):
        for prompt in prompts:
            api.llama_memory_clear(api.llama_get_memory(context), False)
            batch = api.llama_batch_init(len(prompt), 0, 1)
            batch.n_tokens = len(prompt)
            for position, token in enumerate(prompt):
                batch.token[position], batch.pos[position] = token, position
                batch.n_seq_id[position], batch.seq_id[position][0] = 1, 0
                batch.logits[position] = 1
            assert api.llama_decode(context, batch) == 0
            logits = api.llama_get_logits(context)
            values = np.ctypeslib.as_array(logits, (len(prompt), vocab_size))
            found.append(torch.from_numpy(values.copy()))
            api.llama_batch_free(batch)
    return found


def written(model: Path, file: Path) -> Path:
    target = Target(file, is_directory=False, overwrite=False)
    write_gguf(Source.find(str(model)), target, "F32")
    return file


@torch.inference_mode()
def assert_same(model: Any, file: Path, longest: int, tolerance: float) -> None:
    rng = random.Random(5)
    lengths = [min(length, longest) for length in LENGTHS]
    prompts = [[rng.randrange(4096) for _ in range(length)] for length in lengths]
    for prompt, ours in zip(prompts, llama_cpp_logits(file, prompts), strict=True):
        assert_logits_close(ours, model(torch.tensor([prompt])).logits[0].float(), tolerance)


@pytest.mark.parametrize("case", CASES)
def test_its_logits_are_transformers_logits(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    model = writable_model(kind, tmp_path / "model", **options)
    is_short = kind in LEFT_OUT and options.get("sliding_window", WINDOW) is not None
    file = written(tmp_path / "model", tmp_path / "m.gguf")
    assert_same(model, file, WINDOW if is_short else max(LENGTHS), TOLERANCES.get(kind, 1e-4))


def test_the_language_model_of_qwen3_vl_is_computed(tmp_path: Path) -> None:
    model = writable_model("qwen3", tmp_path / "model")
    nest(tmp_path / "model", "Qwen3VLForConditionalGeneration", "qwen3_vl_text", "new")
    file = written(tmp_path / "model", tmp_path / "m.gguf")
    assert_same(model, file, max(LENGTHS), 1e-4)


TEXTS = [
    "I'll say 'YOU'VE' DON'T; 1 12 123 1234 1,234.5 12345678 x86_64",
    "\n\n\tdef f(x):\r\n return $x /* a//b */ a  b   c \n \n !!!\n---[a](b){c}~",
    "camelCase HTTPServer caf\u00e9 cafe\u0301 \u2167\u00bd \u0663\u0664\u0665\u0666",
    "\u4f60\u597d\uff0c\u4e16\u754c \u3053\u3093 \ud55c\uad6d\uc5b4 \u0e44\u0e17\u0e22",
]
PIECES = [
    *"abcdefXYZ.,;:!?'\"()[]{}<>+-*/=_|~$^\\@#%&`\n\t\r",
    *"\u00a0\u2003\u00e9\u00df\u01c5\u00f1\u0645\u211d\u03bb\u201c\u3001\u02bc",
    *("'s", "'LL", "'re", "\r\n", "\n\n", " the", "import os", "self.", "return ", " the"),
    *("\u6f22\u5b57", "\u304b\u306a", "\ud55c\uae00", "\u0e44\u0e17\u0e22", "\U0001f642"),
    *("\u041f\u0440\u0438\u0432\u0435\u0442", " \u043c\u0438\u0440", "a1", "b22", "c333", "x4444 "),
]
"""Neither combining marks nor several spaces before a digit, which llama.cpp cuts in its own way,
nor digits before a letter, of which it makes threes from the right for tiny_aya."""
PRE_TOKENIZERS = [
    *("minimax-m2", "exaone-moe", "afmoe", "hunyuan", "deepseek-v3", "deepseek-llm", "kimi-k2"),
    *("joyai-llm", "kanana2", "tiny_aya", "solar-open", "kormo", "f2llmv2", "minicpm5", "viking"),
    *("youtu", "pixtral", "midm-2.0", "gigachat", "a.x-4.0", "mellum", "trillion"),
    *("bloom", "poro-chat", "gpt3-finnish", "bailingmoe", "bailingmoe2", "llada-moe", "grok-2"),
    *("jina-v1-en", "jina-v2-code", "jina-v2-de", "jina-v2-es", "jina-de", "jina-es"),
    *("modern-bert", "roberta-bpe", "jina-v5-nano", "glm5", "mellum2", "hy_v4", "cohere2moe"),
]
FUSED = ("qwen3.5 with experts", "qwen3 next", "deepseek v2", "deepseek v3 with groups")
"""Families whose gates and ups of experts llama.cpp reads from one tensor, too."""


WITH_QKV_ALONE = ("gpt2", "gpt_neox", "phi3", "falcon", "falcon_7b", "gpt_bigcode", "bloom", "mpt")
"""Families whose files never have queries, keys and values apart."""
WITH_QKV = [
    case
    for case, (kind, options) in CASES.items()
    if kind not in (*WITH_QKV_ALONE, *LATENTS) and "rope_parameters" not in options
]
"""Those whose files have queries, keys and values apart, and no settings that `write_model` leaves
out."""


@pytest.mark.parametrize("case", READ_ALONE)
def test_files_that_are_read_alone_are_what_llama_cpp_reads(case: str, tmp_path: Path) -> None:
    """`tests/unit/models/test_gguf_families.py` compares what an engine makes of such files."""
    family, options = READ_ALONE[case]
    reference = reference_model(family, 4.0, **options)
    file = write_model(tmp_path / "m.gguf", reference)
    assert_is_read(reference, file, TOLERANCES.get(family, 1e-4))


def test_layers_of_gemma_3n_read_the_keys_of_earlier_ones_as_in_llama_cpp(tmp_path: Path) -> None:
    """There all layers but the first twenty do, and files have keys and values of each."""
    family, options = READ_ALONE["gemma 3n"]
    types = ["sliding_attention", "full_attention"] * 11
    shared = {"num_hidden_layers": 22, "num_kv_shared_layers": 2, "layer_types": types}
    reference = reference_model(family, **options | shared)
    rearrange = partial(with_unread_keys, layers={20: 16, 21: 16}, hidden_size=48)
    file = write_model(tmp_path / "m.gguf", reference, rearrange=rearrange)
    assert_is_read(reference, file, TOLERANCES[family])


@pytest.mark.parametrize("case", FUSED)
def test_fused_experts_are_what_llama_cpp_reads(case: str, tmp_path: Path) -> None:
    family, options = READ_ALONE[case]
    reference = reference_model(family, 4.0, **options)
    file = write_model(tmp_path / "m.gguf", reference, rearrange=with_fused_experts)
    assert_is_read(reference, file)


@pytest.mark.parametrize("case", WITH_QKV)
def test_fused_queries_keys_and_values_are_what_llama_cpp_reads(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    model = writable_model(kind, tmp_path / "model", **options)
    file = write_model(tmp_path / "m.gguf", model, rearrange=with_fused_qkv)
    assert_same(model, file, WINDOW, TOLERANCES.get(kind, 1e-4))


@pytest.mark.parametrize(
    "case", [case for case in READ_ALONE if READ_ALONE[case][0] not in LATENTS]
)
def test_they_are_so_in_files_that_are_read_alone(case: str, tmp_path: Path) -> None:
    family, options = READ_ALONE[case]
    reference = reference_model(family, 4.0, **options)
    file = write_model(tmp_path / "m.gguf", reference, rearrange=with_fused_qkv)
    assert_is_read(reference, file, TOLERANCES.get(family, 1e-4))


@pytest.mark.parametrize("case", ["deepseek v2", "deepseek v3"])
def test_files_from_before_latents_are_what_llama_cpp_reads(case: str, tmp_path: Path) -> None:
    family, options = READ_ALONE[case]
    reference = reference_model(family, 4.0, **options)
    change = as_before_latents(reference.config)
    file = write_model(tmp_path / "m.gguf", reference, change, rearrange=with_joined_latents)
    assert_is_read(reference, file)


def test_the_first_files_of_qwen3_next_are_what_llama_cpp_reads(tmp_path: Path) -> None:
    family, options = READ_ALONE["qwen3 next"]
    reference = reference_model(family, 4.0, **options)
    file = write_model(tmp_path / "m.gguf", reference, rearrange=with_joined_gates)
    assert_is_read(reference, file)


def test_texts_of_gemma_4_become_the_same_tokens(tmp_path: Path) -> None:
    rng = random.Random(5)
    pieces = [piece for piece in PIECES if "\n" not in piece and "\r" not in piece]
    made = trained_gemma4(["\n", "\n\n", *("".join(rng.choices(pieces, k=20)) for _ in range(200))])
    file = write(tmp_path / "m.gguf", "gemma4", lambda w: add_gemma4_vocabulary(w, made))
    names = ("tokenizer.json", "tokenizer_config.json")
    for name, content in zip(names, make_tokenizer(read_header(file)), strict=True):
        (tmp_path / name).write_text(json.dumps(content))
    ours = Tokenizer.from_directory(tmp_path)
    texts = [
        ("\n" * rng.randint(1, 7)).join(
            "".join(rng.choices(pieces, k=rng.randint(1, 12))) for _ in range(2)
        )
        for _ in range(1000)
    ]
    found = [ours.encode(text, add_special_tokens=False) for text in texts]
    assert found == llama_cpp_tokens(file, texts)


class TabulatedGelu(torch.nn.Module):
    """As llama.cpp takes it from its table."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x.half().float(), approximate="tanh").half().float()


def cut_by_sample(gates: Tensor) -> Tensor:
    """As llama.cpp sets most gates of Gemma 3n to zero."""
    deviation = gates.std(-1, keepdim=True)
    return torch.relu(gates - gates.mean(-1, keepdim=True) - 1.6448533535003662 * deviation)


def compute_as_llama_cpp(reference: Any) -> None:
    """What differs in Gemma 3n grows from layer to layer."""
    for layer in reference.model.layers if reference.config.model_type == "gemma3n_text" else ():
        layer.act_fn = layer.mlp.act_fn = TabulatedGelu()
        layer.mlp._gaussian_topk = cut_by_sample


@torch.inference_mode()
def assert_is_read(reference: Any, file: Path, tolerance: float = 1e-4) -> None:
    compute_as_llama_cpp(reference)
    prompt = torch.randint(0, 97, (70,), generator=torch.manual_seed(2))
    [found] = llama_cpp_logits(file, [prompt.tolist()])
    assert_logits_close(found, reference(prompt[None]).logits[0].float(), tolerance)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_its_texts_are_cut_into_the_same_tokens(pre: str, tmp_path: Path) -> None:
    def fill(writer: Any) -> None:
        add_bundled_vocabulary(writer, pre=pre)
        writer.add_add_bos_token(False)

    file = write(tmp_path / "m.gguf", "llama", fill)
    names = ("tokenizer.json", "tokenizer_config.json")
    for name, content in zip(names, make_tokenizer(read_header(file)), strict=True):
        (tmp_path / name).write_text(json.dumps(content))
    ours = Tokenizer.from_directory(tmp_path)
    rng = random.Random(5)
    texts = TEXTS + ["".join(rng.choices(PIECES, k=rng.randint(1, 24))) for _ in range(1000)]
    assert [ours.encode(text) for text in texts] == llama_cpp_tokens(file, texts)

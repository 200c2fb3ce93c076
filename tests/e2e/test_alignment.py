"""`LLM.align`: the times of words are those of transformers' forced aligner and processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.audio_families import AUDIO_FAMILIES, TEXT
from support.audio_models import AUDIO, WHISPER_SETTINGS, audio_inputs
from support.vision_models import draw_weights, tokenizer_with
from torch import Tensor
from transformers import Qwen3ASRConfig, Qwen3ASRForTokenClassification
from transformers.models.qwen3_asr.processing_qwen3_asr import Qwen3ASRProcessor

from shmllm import LLM, PoolingParams, RequestError
from shmllm.outputs.transcription import Transcript

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

CLASSES = 60
OPTIONS: dict[str, Any] = {
    "max_model_len": 512, "num_threads": 1, "multiprocess": False, "dtype": "float32",
}  # fmt: skip
TEXTS = ["The quick, brown fox!", "你好 world, it's 5 o'clock", "one two three four five six seven"]
SECONDS = [1.3, 2.0, 3.1]


class Aligner:
    """A small random model of transformers, and its directory."""

    def __init__(self, directory: Path) -> None:
        family = AUDIO_FAMILIES["qwen3_asr"]
        marks = ("<|im_end|>", family.begin, family.token, family.end, "<timestamp>")
        self.tokenizer = tokenizer_with(list(marks))
        self.mark = self.tokenizer.token_to_id("<timestamp>")
        config = Qwen3ASRConfig(
            text_config=TEXT | family.text | {"bos_token_id": None},
            audio_config=AUDIO | family.audio,
            audio_token_id=self.tokenizer.token_to_id(family.token),
            timestamp_token_id=self.mark,
            tie_word_embeddings=False,
            num_labels=CLASSES,
        )
        torch.manual_seed(5)
        self.model = Qwen3ASRForTokenClassification(config).eval()
        draw_weights(self.model, 1.0)
        self.directory = directory
        self.model.save_pretrained(directory)
        self.tokenizer.save(str(directory / "tokenizer.json"))
        (directory / "preprocessor_config.json").write_text(
            json.dumps({**WHISPER_SETTINGS, **family.settings})
        )

    @torch.inference_mode()
    def classes(self, sound: np.ndarray, words: list[str]) -> tuple[Tensor, Tensor]:
        """transformers' logits of the classes, [1, tokens, classes], and the tokens."""
        inputs = audio_inputs([sound], "qwen3_asr")
        ids = self.tokenizer.encode(prompt_of(words), add_special_tokens=False).ids
        count = len(self.model.model.get_audio_features(**inputs).pooler_output)
        place = ids.index(self.model.config.audio_token_id)
        ids[place : place + 1] = [ids[place]] * count
        token_ids = torch.tensor([ids])
        return self.model(token_ids, **inputs).logits, token_ids

    def words(self, sound: np.ndarray, text: str, step: float = 80) -> list[dict[str, Any]]:
        """transformers' words and times."""
        processor: Any = object.__new__(Qwen3ASRProcessor)
        processor.timestamp_segment_time = step
        words = processor.split_words_for_alignment(text)
        found: list[dict[str, Any]] = processor.decode_forced_alignment(
            *self.classes(sound, words), [words], self.mark
        )[0]
        return found


def prompt_of(words: list[str]) -> str:
    begin = "<|audio_start|><|audio_pad|><|audio_end|>"
    return begin + "".join(f"{word}<timestamp><timestamp>" for word in words)


@pytest.fixture(scope="module")
def aligner(tmp_path_factory: pytest.TempPathFactory) -> Aligner:
    return Aligner(tmp_path_factory.mktemp("aligner"))


@pytest.fixture(scope="module")
def sounds() -> list[np.ndarray]:
    draw = np.random.default_rng(3)
    return [
        (draw.standard_normal(int(16_000 * seconds)) * 0.1).astype(np.float32)
        for seconds in SECONDS
    ]


def as_published(aligner: Aligner, directory: Path, **fields: Any) -> None:
    """Write the files of a model as its authors name things."""
    tensors = {
        f"thinker.{name.replace('score.', 'lm_head.')}": tensor
        for name, tensor in load_file(aligner.directory / "model.safetensors").items()
    }
    save_file(tensors, directory / "model.safetensors")
    values = json.loads((aligner.directory / "config.json").read_text())
    thinker = values | {"model_type": "qwen3_forced_aligner", "classify_num": CLASSES}
    for name in ("architectures", "id2label", "label2id"):
        thinker.pop(name, None)
    whole = {"architectures": ["Qwen3ASRForConditionalGeneration"], "thinker_config": thinker}
    (directory / "config.json").write_text(json.dumps(whole | fields))
    for name in ("tokenizer.json", "preprocessor_config.json"):
        (directory / name).write_bytes((aligner.directory / name).read_bytes())


def seen(transcript: Transcript) -> list[dict[str, Any]]:
    return [
        {"text": each.text, "start_time": each.start, "end_time": each.end}
        for each in transcript.segments
    ]


def test_words_have_the_times_of_transformers(aligner: Aligner, sounds: list[np.ndarray]) -> None:
    given = [(sound, 16_000) for sound in sounds]
    with LLM(str(aligner.directory), **OPTIONS) as llm:
        found = llm.align(given, TEXTS, use_tqdm=False)
        for transcript, sound, text in zip(found, sounds, TEXTS, strict=True):
            assert seen(transcript) == aligner.words(sound, text)
            assert transcript.duration == round(len(sound) / 16_000, 3)
        (alone,) = llm.align(given[0], TEXTS[0], use_tqdm=False)
        (listed,) = llm.align(given[:1], [["The", "quick,", "brown", "fox!"]], use_tqdm=False)
        assert alone == listed == found[0]
        silent, spoken = llm.align(given[:2], ["...", TEXTS[1]], use_tqdm=False)
        assert silent.segments == []
        assert spoken == found[1]


def test_classes_are_those_of_transformers(aligner: Aligner, sounds: list[np.ndarray]) -> None:
    """As vLLM's users ask for them: the scores of all tokens, and logits of the marks."""
    words = ["one", "two", "three"]
    prompt = {"prompt": prompt_of(words), "multi_modal_data": {"audio": (sounds[0], 16_000)}}
    logits, token_ids = aligner.classes(sounds[0], words)
    marks = PoolingParams(pooling_type="STEP", step_tag_id=aligner.mark, use_activation=False)
    with LLM(str(aligner.directory), **OPTIONS) as llm:
        (scores,) = llm.encode(prompt, pooling_task="token_classify", use_tqdm=False)
        (rows,) = llm.encode(prompt, marks, pooling_task="token_classify", use_tqdm=False)
    assert scores.prompt_token_ids == token_ids[0].tolist()
    assert torch.allclose(scores.outputs.data, logits[0].softmax(-1), atol=1e-5)
    of_marks = logits[0][token_ids[0] == aligner.mark]
    assert rows.outputs.data.shape == of_marks.shape == (6, CLASSES)
    assert torch.allclose(rows.outputs.data, of_marks, atol=1e-4)


@pytest.mark.parametrize("name", [None, "Qwen3ASRForcedAlignerForTokenClassification"])
def test_files_of_the_authors(
    name: str | None, aligner: Aligner, sounds: list[np.ndarray], tmp_path: Path
) -> None:
    """With the name of Qwen3-ASR, or the one that vLLM's users give."""
    as_published(aligner, tmp_path, timestamp_segment_time=160)
    overrides = {} if name is None else {"hf_overrides": {"architectures": [name]}}
    with LLM(str(tmp_path), runner="pooling", **OPTIONS, **overrides) as llm:
        (found,) = llm.align((sounds[2], 16_000), TEXTS[2], use_tqdm=False)
    assert seen(found) == aligner.words(sounds[2], TEXTS[2], 160)


@pytest.mark.parametrize(
    ("sounds", "texts", "message"),
    [
        ("nowhere.wav", "a", "nowhere.wav"),
        ([(np.zeros(16_000), 16_000)], ["a", "b"], "there are 1 sounds and 2 texts"),
        ((np.zeros(16_000), 16_000), "これは", "the text of sound 0 is Japanese"),
        ((np.zeros(16_000), 16_000), [3], "must be a text or a list of words, not 3"),
        ((np.zeros(16_000), 16_000), 3, "texts must be a text for each sound, not 3"),
        (iter([(np.zeros(16_000), 16_000)]), iter("ab"), "there are 1 sounds and 2 texts"),
        (3, "a", "sounds must be one or several of"),
        ((np.zeros(16_000 * 5), 16_000), "a", "sound 0 is longer than the 4.8 seconds"),
    ],
)
def test_what_is_refused(sounds: Any, texts: Any, message: str, aligner: Aligner) -> None:
    with LLM(str(aligner.directory), **OPTIONS) as llm, pytest.raises(RequestError, match=message):
        llm.align(sounds, texts, use_tqdm=False)


def test_other_models_align_nothing() -> None:
    with LLM("tiny", **OPTIONS) as llm, pytest.raises(RequestError, match="pass a forced aligner"):
        llm.align((np.zeros(16_000), 16_000), "a", use_tqdm=False)

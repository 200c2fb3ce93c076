"""Sounds and videos in `shmllm generate` and `shmllm chat`: transformers' tokens, and errors."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from support import audio_models, commands
from support.engines import assert_unused, named_engine
from support.programs import Completed
from support.vision_models import make_vision_model
from tokenizers import Tokenizer

from shmllm import LLM, SamplingParams

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

GREEDY = ("--temperature", "0", "--max-tokens", "8", "--ignore-eos")
RECORDS = (*GREEDY, "--json", "--token-ids")
Generate = Callable[..., Completed]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audio")


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    """transformers' model, whose files are in `directory`."""
    return audio_models.make_audio_model(directory)


@pytest.fixture(scope="module")
def engine(model: Any, directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with named_engine(tmp_path_factory.mktemp("engine"), model=str(directory)) as (name, _):
        yield name


@pytest.fixture
def generate(engine: str) -> Iterator[Generate]:
    """Runs `shmllm generate` on the engine of the module, which has to be idle afterwards."""

    def run(*arguments: str | Path, **options: Any) -> Completed:
        where = () if "-m" in arguments else ("--attach", engine)
        return commands.shmllm("generate", *map(str, arguments), *where, **options)

    yield run
    assert_unused(engine)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sounds, a long one, a damaged one and an empty one."""
    folder = tmp_path_factory.mktemp("sounds")
    random = np.random.default_rng(3)
    noise = (random.standard_normal(16_000) * 0.1).astype(np.float32)
    tone = (np.sin(np.arange(20_001) * 0.05) / 2).astype(np.float32)
    soundfile.write(folder / "noise.wav", noise, audio_models.RATE, "FLOAT")
    soundfile.write(folder / "tone.flac", tone, audio_models.RATE)
    soundfile.write(folder / "long.wav", np.zeros(5 * audio_models.RATE), audio_models.RATE)
    (folder / "damaged.wav").write_bytes((folder / "noise.wav").read_bytes()[:9000])
    (folder / "empty.wav").touch()
    return folder


def records(text: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def reference(model: Any, directory: Path, question: str, *sounds: Path) -> list[int]:
    """transformers' greedy tokens of a message with sounds in front of its text."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    samples = [soundfile.read(path, dtype="float32")[0] for path in sounds]
    lengths = audio_models.audio_inputs(samples)["feature_attention_mask"].sum(-1).tolist()
    marks = [
        f"Audio {number}: <|audio_bos|>{'<|AUDIO|>' * ((n + 1) // 2 // 2)}<|audio_eos|>\n"
        for number, n in enumerate(lengths, 1)
    ]
    text = f"<|im_start|>user\n{''.join(marks)}{question}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return audio_models.reference_tokens(model, ids, samples, 8)


def test_sounds_come_before_the_text_of_a_message(
    generate: Generate, model: Any, directory: Path, folder: Path
) -> None:
    noise, tone = folder / "noise.wav", folder / "tone.flac"
    done = generate("--audio", noise, "--audio", tone, "What?", "And?", *RECORDS)
    assert done.returncode == 0, done.stderr.decode()
    for record, question in zip(records(done.stdout), ("What?", "And?"), strict=True):
        assert record["token_ids"] == reference(model, directory, question, noise, tone)


def test_rows_name_their_sounds(
    generate: Generate, model: Any, directory: Path, folder: Path, tmp_path: Path
) -> None:
    """By paths, data URLs and OpenAI's parts; one that is damaged is an error of its row."""
    noise, tone = folder / "noise.wav", folder / "tone.flac"
    encoded = base64.b64encode(noise.read_bytes()).decode()
    parts = [
        {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": tone.as_uri()}},
        {"type": "text", "text": "And?"},
    ]
    rows = [
        {"prompt": "What?", "audio": ["noise.wav"]},
        {"prompt": "What?", "audio": [f"data:audio/wav;base64,{encoded}", "tone.flac"]},
        {"messages": [{"role": "user", "content": parts}]},
        {"prompt": "What?", "audio": ["damaged.wav"]},
        {"prompt": "What?", "audio": ["long.wav"]},
        {"prompt": "What?", "images": ["noise.wav"]},
    ]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("-i", source, "-o", tmp_path / "out.jsonl", "--allowed-local-media-path", folder)
    done = generate(*options, "--chat", *GREEDY, "--token-ids")
    assert done.returncode == 1, done.stderr.decode()
    found = records((tmp_path / "out.jsonl").read_bytes())
    found = sorted(found, key=lambda record: record["line"])
    expected = [("What?", [noise]), ("What?", [noise, tone]), ("And?", [noise, tone])]
    for record, (question, sounds) in zip(found, expected, strict=False):
        assert record["token_ids"] == reference(model, directory, question, *sounds)
    errors = [record["error"] for record in found[3:]]
    assert "audio 1 'damaged.wav'" in errors[0]
    assert "hears 3 at once" in errors[1]
    assert len(errors) == 3
    assert "unknown format" in errors[2]


def test_a_chat_hears_a_file(model: Any, engine: str, directory: Path, folder: Path) -> None:
    lines = f"/audio {folder / 'tone.flac'}\nWhat?\n/audio {folder / 'damaged.wav'}\n"
    done = commands.shmllm(
        "chat", "--attach", engine, "--temperature", "0", "--max-tokens", "8", "--ignore-eos",
        input=lines.encode(),
    )  # fmt: skip
    tokens = reference(model, directory, "What?", folder / "tone.flac")
    text = Tokenizer.from_file(str(directory / "tokenizer.json")).decode(tokens)
    assert text.strip() in done.stdout.decode()
    assert b"[audio: tone.flac]" in done.stderr
    assert b"damaged.wav" in done.stderr
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--audio", "empty.wav", "a"], "is empty (0 bytes)"),
        (["--audio", "damaged.wav", "a"], "is cut off"),
        (["--audio", "none.wav", "a"], "cannot read"),
        (["--audio", "long.wav", "a"], "truncation"),
        (["-m", "tiny", "--audio", "noise.wav", "a"], "tiny takes no audio clips"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    arguments: list[str], words: str, generate: Generate, folder: Path
) -> None:
    done = generate(*arguments, *GREEDY, cwd=folder)
    assert done.returncode in (1, 2)
    errors = done.stderr.decode().strip().splitlines()
    assert words in " ".join(errors)
    assert not any("Traceback" in line for line in errors)


def encoded_video(frames: np.ndarray, rate: int) -> bytes:
    """An mp4 file of frames, [frames, height, width, 3]."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("mpeg4", rate=Fraction(rate))
        stream.height, stream.width = frames.shape[1:3]
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    return file.getvalue()


def test_a_video_file_is_what_its_frames_are(tmp_path: Path) -> None:
    """The command gives the tokens of the frames that were decoded and chosen."""
    import av

    directory = tmp_path / "model"
    make_vision_model("qwen3_vl", directory)
    ramp = np.indices((64, 96)).sum(0)[None, :, :, None]
    frames = ((ramp + 9 * np.arange(16)[:, None, None, None]) % 256).astype(np.uint8)
    path = tmp_path / "clip.mp4"
    path.write_bytes(encoded_video(np.repeat(frames, 3, -1), 8))
    with av.open(str(path)) as container:
        decoded = [frame.to_image() for frame in container.decode(video=0)]
    assert len(decoded) == 16
    chosen = [0, 5, 10, 15]  # two of a second
    with LLM(str(directory), multiprocess=False, num_threads=1, max_model_len=512) as llm:
        metadata = {"fps": 8.0, "frames_indices": chosen, "total_num_frames": 16}
        video = ([decoded[index] for index in chosen], metadata)
        content = [{"type": "video", "video": video}, {"type": "text", "text": "What?"}]
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (wanted,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
    options = ("-m", str(directory), "--max-model-len", "512", "--num-threads", "1")
    done = commands.shmllm("generate", "--video", str(path), "What?", *options, *RECORDS)
    assert done.returncode == 0, done.stderr.decode()
    (record,) = records(done.stdout)
    assert record["token_ids"] == list(wanted.outputs[0].token_ids)
    assert record["num_prompt_tokens"] == len(wanted.prompt_token_ids)

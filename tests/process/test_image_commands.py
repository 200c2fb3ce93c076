"""Images in `shmllm generate` and `shmllm chat`: transformers' tokens, and errors."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import commands
from support.engines import assert_unused, named_engine
from support.programs import Completed
from support.vision_models import image_processor, image_token, make_vision_model
from tokenizers import Tokenizer

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

GREEDY = ("--temperature", "0", "--max-tokens", "8", "--ignore-eos")
RECORDS = (*GREEDY, "--json", "--token-ids")
EMBEDS = 16
"""The embeddings of an image of the model."""
Generate = Callable[..., Completed]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llava")


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    """transformers' model, whose files are in `directory`."""
    return make_vision_model("llava", directory)


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
    """Two images, a damaged, an empty and an animated one, and one beside the folder."""
    folder = tmp_path_factory.mktemp("images") / "inner"
    folder.mkdir()
    noise = np.random.default_rng(5).integers(0, 256, (90, 130, 3), dtype=np.uint8)
    noisy = Image.fromarray(noise)
    noisy.save(folder / "noise.png")
    ramp = (np.indices((50, 70)).sum(0)[..., None] * np.array([1, 2, 3]) % 256).astype(np.uint8)
    Image.fromarray(ramp).save(folder / "ramp.png")
    noisy.save(folder.parent / "outside.png")
    (folder / "damaged.png").write_bytes((folder / "noise.png").read_bytes()[:2000])
    (folder / "empty.png").touch()
    frames = [Image.new("RGB", (9, 9), (50 * n, 0, 0)) for n in range(3)]
    frames[0].save(folder / "moving.gif", save_all=True, append_images=frames[1:])
    return folder


def records(text: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def url_of(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


@torch.inference_mode()
def reference(model: Any, directory: Path, text: str, *images: Path) -> list[int]:
    """transformers' greedy tokens of a text with a mark for each image."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    mark = tokenizer.id_to_token(image_token(model))
    assert text.count(mark) == len(images)
    ids = tokenizer.encode(text.replace(mark, mark * EMBEDS), add_special_tokens=False).ids
    opened = [Image.open(path) for path in images]
    pixels = image_processor("llava")(opened, return_tensors="pt")["pixel_values"]
    output = model.generate(
        torch.tensor([ids]),
        pixel_values=pixels,
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=8,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(ids) :].tolist()
    return tokens


def asked(directory: Path, text: str) -> str:
    """The prompt of a user's message, by the model's template."""
    begin = "<|im_start|>"
    end = json.loads((directory / "tokenizer_config.json").read_text())["eos_token"]
    return f"{begin}user\n{text}{end}\n{begin}assistant\n"


def test_images_come_before_the_text_of_a_message(
    generate: Generate, model: Any, directory: Path, folder: Path
) -> None:
    noise, ramp = folder / "noise.png", folder / "ramp.png"
    done = generate("--image", noise, "--image", ramp, "What?", "And?", *RECORDS)
    assert done.returncode == 0, done.stderr.decode()
    for record, question in zip(records(done.stdout), ("What?", "And?"), strict=True):
        text = asked(directory, f"<image>\n<image>\n{question}")
        assert record["token_ids"] == reference(model, directory, text, noise, ramp)


def test_a_prompt_with_marks_is_completed_as_it_is(
    generate: Generate, model: Any, directory: Path, folder: Path
) -> None:
    noise, ramp = folder / "noise.png", folder / "ramp.png"
    text = "First <image>, then <image>:"
    done = generate("--image", noise, "--image", ramp, text, *RECORDS)
    assert records(done.stdout)[0]["token_ids"] == reference(model, directory, text, noise, ramp)


def test_a_text_is_streamed_and_lines_of_a_file_have_the_images(
    generate: Generate, folder: Path, tmp_path: Path
) -> None:
    image = ("--image", folder / "ramp.png")
    alone = generate(*image, "What?", *GREEDY)
    assert alone.returncode == 0, alone.stderr.decode()
    (tmp_path / "in.txt").write_text("What?\nAnd?\n")
    done = generate(*image, "-i", tmp_path / "in.txt", "-o", tmp_path / "out.jsonl", *GREEDY)
    assert done.returncode == 0, done.stderr.decode()
    first, second = records((tmp_path / "out.jsonl").read_bytes())
    assert first["text"].rstrip("\n") == alone.stdout.decode().rstrip("\n")
    assert second["text"] != first["text"]
    assert generate(*image, *GREEDY, input=b"What?").stdout == alone.stdout


def test_rows_name_images_in_all_forms(
    generate: Generate, model: Any, directory: Path, folder: Path, tmp_path: Path
) -> None:
    noise = folder / "noise.png"

    def message(url: str) -> list[dict[str, Any]]:
        part = {"type": "image_url", "image_url": {"url": url}}
        return [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]

    rows: list[dict[str, Any]] = [
        {"prompt": "What?", "images": ["noise.png"]},
        {"prompt": "What?", "images": [url_of(noise)], "cache_salt": "s"},
        {"messages": message(url_of(noise))},
        {"messages": message(noise.as_uri())},
        {"prompt": asked(directory, "<image>\nWhat?"), "images": ["noise.png"]},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--allowed-local-media-path", folder, "--ordered", "--token-ids", *GREEDY)
    done = generate("-i", tmp_path / "in.jsonl", *options)
    assert done.returncode == 0, done.stdout.decode()
    wanted = reference(model, directory, asked(directory, "<image>\nWhat?"), noise)
    assert [record["token_ids"] for record in records(done.stdout)] == [wanted] * len(rows)


def test_rows_of_openai_name_images(generate: Generate, folder: Path, tmp_path: Path) -> None:
    urls = [url_of(folder / "noise.png"), (folder / "noise.png").as_uri()]
    urls += [(folder / "damaged.png").as_uri(), "https://example.com/a.png"]
    with (tmp_path / "in.jsonl").open("w") as file:
        for number, url in enumerate(urls):
            part = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
            messages = [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]
            body = {"messages": messages, "temperature": 0, "max_tokens": 8}
            row = {"custom_id": str(number), "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(row) + "\n")
    options = ("--openai-batch", "--allowed-local-media-path", folder, "--ordered")
    done = generate("-i", tmp_path / "in.jsonl", *options)
    assert done.returncode == 1
    answers = [record["response"] for record in records(done.stdout)]
    assert [answer["status_code"] for answer in answers] == [200, 200, 400, 400]
    first, second = (answer["body"]["choices"][0]["message"] for answer in answers[:2])
    assert first == second
    assert "cannot be decoded" in answers[2]["body"]["error"]["message"]
    assert "nothing is fetched" in answers[3]["body"]["error"]["message"]


def test_a_wrong_image_fails_its_row_only_and_resume_repeats_none(
    generate: Generate, folder: Path, tmp_path: Path
) -> None:
    wrong = ("none.png", "damaged.png", "empty.png", "moving.gif", "../outside.png", "https://x/y")
    names = [name for each in wrong for name in (each, "ramp.png")]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"prompt": "What?", "images": [name], "name": name} for name in names]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("-i", source, "-o", target, "--allowed-local-media-path", folder, *GREEDY)
    assert generate(*options).returncode == 1
    found = {record["line"]: record for record in records(target.read_bytes())}
    for line, name in enumerate(names, 1):
        assert ("error" in found[line]) == (name != "ramp.png")
        assert name in found[line].get("error", name)
    assert len({record["text"] for record in found.values() if "text" in record}) == 1
    lines = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(b"".join(lines[:5]) + lines[5][:20])
    assert generate(*options, "--resume").returncode == 1
    assert {record["line"]: record for record in records(target.read_bytes())}.keys() == {*found}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--image", "none.png", "a"], "--image none.png: cannot read 'none.png'"),
        (["--image", ".", "a"], "no regular file"),
        (["--image", "damaged.png", "a"], "--image damaged.png cannot be decoded"),
        (["--image", "ramp.png", "-m", "tiny", "a"], "tiny takes no images"),
        (["--image", "ramp.png", "-i", "rows.jsonl"], "a row names its items itself"),
        (["--allowed-local-media-path", "none", "a"], "there is no folder 'none'"),
        (["--image", "ramp.png", "a <image> <image>"], "and its text '<image>' 2 times"),
        (["--image", "ramp.png", "--limit-mm-per-prompt", '{"image": 0}', "a"], "allows 0"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    arguments: list[str], words: str, generate: Generate, folder: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(commands, "ELSEWHERE", str(folder))
    (folder / "rows.jsonl").write_text('{"prompt": "a"}\n')
    done = generate(*arguments)
    assert done.returncode == 2
    assert words in " ".join(done.stderr.decode().split())
    assert "Traceback" not in done.stderr.decode()
    assert done.stdout == b""


def test_an_engine_takes_no_options_that_belong_to_its_front_ends() -> None:
    done = commands.shmllm("engine", "start", "x", "--limit-mm-per-prompt", '{"image": 1}')
    assert done.returncode == 2
    assert b"--limit-mm-per-prompt is for commands that send prompts" in done.stderr


def test_a_chat_sees_images_and_its_transcript_brings_them_back(
    engine: str, model: Any, directory: Path, folder: Path, tmp_path: Path
) -> None:
    noise, saved = tmp_path / "noise.png", tmp_path / "saved.json"
    noise.write_bytes((folder / "noise.png").read_bytes())

    def talk(lines: str, *arguments: str | Path) -> Completed:
        command = ("chat", "--attach", engine, *map(str, arguments), *GREEDY)
        return commands.shmllm(*command, input=lines.encode())

    done = talk(f"/image {noise}\nWhat?\n/save {saved}\nAnd?\n")
    assert done.returncode == 0, done.stderr.decode()
    assert "[image: noise.png]" in done.stderr.decode()
    [_, answer] = json.loads(saved.read_text())["messages"]
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    wanted = reference(model, directory, asked(directory, "<image>\nWhat?"), noise)
    assert answer["content"] == tokenizer.decode(wanted)
    again = talk("And?\n", "--messages", saved)
    assert done.stdout.endswith(again.stdout)
    os.unlink(noise)
    gone = talk("And?\n", "--messages", saved)
    assert gone.returncode == 2
    assert f"{saved}: messages[0].content[0]: cannot read '{noise}'" in gone.stderr.decode()

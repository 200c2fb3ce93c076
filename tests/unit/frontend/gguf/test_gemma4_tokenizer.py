"""Gemma 4's tokenizer from a GGUF file: its tokens are those of the tokenizer it was made of."""

from __future__ import annotations

import json
import random
from pathlib import Path

from support.gguf_models import write
from support.gguf_vocabularies import add_gemma4_vocabulary, trained_gemma4

from shmllm.formats.gguf import read_header
from shmllm.frontend.gguf.config import generation_config
from shmllm.frontend.gguf.tokenizer import make_tokenizer
from shmllm.frontend.text.tokenizer import Tokenizer

WORDS = [
    "the",
    "then",
    " other",
    " another",
    "hello",
    "\n",
    "\n\n",
    " ",
    "  ",
    "12",
    "it's",
    "caf\u00e9",
]
STRANGE = [
    "\u6f22",
    "\U0001f642",
    "\t",
    "<|turn>",
    "<|tool_response>",
    "\u2581",
    "Z",
    "\u041f\u0440",
]


def test_its_tokens_are_those_of_the_models_own_tokenizer(tmp_path: Path) -> None:
    theirs = trained_gemma4(["".join(WORDS), " ".join(WORDS)] * 20)
    assert len(theirs.encode(" another").ids) == 1, "the vocabulary has no words"
    header = read_header(
        write(tmp_path / "m.gguf", "gemma4", lambda writer: add_gemma4_vocabulary(writer, theirs))
    )
    names = ("tokenizer.json", "tokenizer_config.json")
    for name, content in zip(names, make_tokenizer(header), strict=True):
        (tmp_path / name).write_text(json.dumps(content))
    ours = Tokenizer.from_directory(tmp_path)
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(300):
        text = "".join(rng.choices([*WORDS, *STRANGE], k=rng.randint(1, 12)))
        ids = ours.encode(text)
        assert ids == [theirs.token_to_id("<bos>"), *theirs.encode(text).ids], repr(text)
        shown = text.replace("\u2581", " ")  # which spaces become
        assert ours.decode(ids[1:], skip_special_tokens=False) == shown
    ends = [theirs.token_to_id(each) for each in ("<eos>", "<turn|>", "<|tool_response>")]
    assert generation_config(header) == {"eos_token_id": ends}

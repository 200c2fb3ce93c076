"""Ask a model about a sound.

    python audio.py MODEL [FILE [QUESTION]]

MODEL is a directory or hub id of a model that takes sounds, such as Qwen/Qwen2-Audio-7B-Instruct.
Without FILE the program makes a tone. docs/audio-and-video.md says what sounds may be.
"""

import sys
from pathlib import Path

import numpy as np

from shmllm import LLM, SamplingParams

if len(sys.argv) < 2:
    sys.exit("usage: python audio.py MODEL [FILE [QUESTION]]")
model, *given = sys.argv[1:]
tone = np.sin(2 * np.pi * 440 * np.arange(16000) / 16000).astype(np.float32) / 2
sound = Path(given[0]).read_bytes() if given else (tone, 16000)
question = given[1] if len(given) > 1 else "What is in this sound?"
parts = [{"type": "audio", "audio": sound}, {"type": "text", "text": question}]

with LLM(model) as llm:
    params = SamplingParams(temperature=0, max_tokens=64)
    output = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)[0]
    print(f"{output.outputs[0].text}  ({len(output.prompt_token_ids)} prompt tokens)")

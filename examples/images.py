"""Ask a model about an image.

    python images.py MODEL [IMAGE [QUESTION]]

MODEL is a directory or hub id of a model that takes images, such as
HuggingFaceTB/SmolVLM-256M-Instruct. Without IMAGE the program draws a picture. docs/images.md says
which models take images, and in which forms.
"""

import sys

from PIL import Image, ImageDraw

from shmllm import LLM, SamplingParams


def draw():
    """A red circle on white."""
    picture = Image.new("RGB", (320, 240), "white")
    ImageDraw.Draw(picture).ellipse((90, 50, 230, 190), fill="red")
    return picture


if len(sys.argv) < 2:
    sys.exit("usage: python images.py MODEL [IMAGE [QUESTION]]")
model, *given = sys.argv[1:]
picture = Image.open(given[0]) if given else draw()
question = given[1] if len(given) > 1 else "What is in this image?"
parts = [{"type": "image_pil", "image_pil": picture}, {"type": "text", "text": question}]
messages = [{"role": "user", "content": parts}]

with LLM(model) as llm:
    params = SamplingParams(temperature=0, max_tokens=64)
    # The second time the image is neither prepared, sent nor computed again.
    for _ in range(2):
        output = llm.chat(messages, params, use_tqdm=False)[0]
        cached, count = output.num_cached_tokens, len(output.prompt_token_ids)
        print(f"{output.outputs[0].text}  ({cached} of {count} prompt tokens cached)")

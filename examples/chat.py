"""Run a conversation of several turns, then two other conversations as one batch.

The model's chat template turns messages into a prompt. The bundled model was trained only on source
files, and its template writes a conversation as comments: pass the directory of a chat model as an
argument to get real answers.
"""

import sys

from shmllm import LLM, SamplingParams

params = SamplingParams(temperature=0, max_tokens=32)
system = {"role": "system", "content": "Functions on lists."}

with LLM(*sys.argv[1:2]) as llm:
    conversation = [system]
    for question in ("Return the largest item.", "Return the smallest item."):
        conversation.append({"role": "user", "content": question})
        output = llm.chat(conversation, params)[0]
        answer = output.outputs[0].text
        conversation.append({"role": "assistant", "content": answer})
        num_prompt_tokens = len(output.prompt_token_ids)
        print(f"> {question}  ({output.num_cached_tokens} of {num_prompt_tokens} tokens cached)")
        print(answer)

    others = [[{"role": "user", "content": text}] for text in ("Sort a list.", "Reverse it.")]
    for messages, output in zip(others, llm.chat(others, params), strict=True):
        print(f"> {messages[0]['content']}")
        print(output.outputs[0].text)

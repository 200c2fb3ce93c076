"""Run requests from coroutines: several at once, one of them cancelled, one aborted by its id.

An output holds all tokens since the previous output, so a slow consumer misses none. Cancelling a
task ends its request. Weights can be changed while the engine is paused.
"""

import asyncio
import contextlib

from shmllm import AsyncLLM, RequestOutputKind, SamplingParams

PROMPTS = [
    "def fibonacci(n):\n",
    "import os\nimport sys\n",
    "class Stack:\n    def __init__(self):",
]
params = SamplingParams(temperature=0, max_tokens=40, output_kind=RequestOutputKind.DELTA)
endless = SamplingParams(max_tokens=800, ignore_eos=True)


async def complete(llm: AsyncLLM, prompt: str, name: str) -> str:
    text = ""
    async for output in llm.generate(prompt, params, name):
        text += output.outputs[0].text
    return text


async def run_on(llm: AsyncLLM, name: str) -> str | None:
    async for output in llm.generate("x = ", endless, name):
        ending = output.outputs[0].finish_reason
    return ending


async def main() -> None:
    async with AsyncLLM() as llm:
        cancelled = asyncio.create_task(run_on(llm, "cancelled"))
        aborted = asyncio.create_task(run_on(llm, "aborted"))
        jobs = [complete(llm, prompt, f"job {n}") for n, prompt in enumerate(PROMPTS)]
        for prompt, text in zip(PROMPTS, await asyncio.gather(*jobs), strict=True):
            print(f"=== {prompt}{text}")

        cancelled.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await cancelled
        await llm.abort("aborted")
        print("ended by:", await aborted)

        await llm.pause_generation(mode="keep")
        waiting = asyncio.create_task(complete(llm, PROMPTS[0], "job 0"))
        await asyncio.sleep(0.1)
        print("done while paused:", waiting.done())
        await llm.resume_generation()
        print("characters after resuming:", len(await waiting))


asyncio.run(main())

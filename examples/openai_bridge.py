"""Serve a model to OpenAI's client on 127.0.0.1: chat completions, streamed or whole.

    python examples/openai_bridge.py [MODEL] [--attach NAME] [--port PORT]

The client needs base_url="http://127.0.0.1:8000/v1" and any api_key. Each user of this machine can
send requests; a request ends when its client disconnects.
"""

import argparse
import contextlib
import json
import sys
import time

from shmllm import AsyncLLM, RequestError, RequestOutputKind, SamplingParams, ShmLLMError
from shmllm.batch.openai_body import read_chat

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse, StreamingResponse
    from starlette.routing import Route
except ImportError:
    sys.exit("openai_bridge.py needs the extra 'bridge': pip install starlette uvicorn")

parser = argparse.ArgumentParser()
parser.add_argument("model", nargs="?", default="tiny")
parser.add_argument("--attach", metavar="NAME")
parser.add_argument("--port", type=int, default=8000)
options = parser.parse_args()
model = options.attach or options.model


async def chat(request):
    try:
        if not isinstance(body := await request.json(), dict) or body.get("logprobs"):
            raise RequestError("the body must be a JSON object, without 'logprobs'")
        body = {name: value for name, value in body.items() if value is not None}
        kind = RequestOutputKind.DELTA if body.pop("stream", 0) else RequestOutputKind.CUMULATIVE
        messages, sampling, template = read_chat(body)
        params = SamplingParams(**{"max_tokens": None, "output_kind": kind} | sampling)
        outputs = llm.chat(messages, params, chat_template_kwargs=template)
        output = await anext(outputs)
    except (ShmLLMError, ValueError, TypeError) as problem:  # an invalid request is a ValueError
        invalid = isinstance(problem, ValueError | TypeError)
        kind, status = ("invalid_request_error", 400) if invalid else ("server_error", 500)
        return JSONResponse({"error": {"message": str(problem), "type": kind}}, status)
    head = {"id": f"chatcmpl-{time.time_ns()}", "created": int(time.time()), "model": model}
    if kind is RequestOutputKind.DELTA:
        return StreamingResponse(events(head, output, outputs), media_type="text/event-stream")
    async with contextlib.aclosing(outputs):
        while not output.finished and not await request.is_disconnected():
            output = await anext(outputs)
    read, made = len(output.prompt_token_ids), sum(len(one.token_ids) for one in output.outputs)
    usage = {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}
    return JSONResponse(head | answer("chat.completion", "message", output) | {"usage": usage})


async def events(head, output, outputs):
    async with contextlib.aclosing(outputs):
        while output is not None:
            yield f"data: {json.dumps(head | answer('chat.completion.chunk', 'delta', output))}\n\n"
            output = None if output.finished else await anext(outputs)
    yield "data: [DONE]\n\n"


def answer(name, key, output):
    texts = [{"index": one.index, key: {"role": "assistant", "content": one.text}, "logprobs": None}
             | {"finish_reason": one.finish_reason} for one in output.outputs]  # fmt: skip
    return {"object": name, "choices": texts}


listing = {"object": "list", "data": [{"id": model, "object": "model", "owned_by": "shmllm"}]}
ask = Route("/v1/chat/completions", chat, methods=["POST"])
app = Starlette(routes=[ask, Route("/v1/models", lambda request: JSONResponse(listing))])
try:
    llm = AsyncLLM.attach(options.attach) if options.attach else AsyncLLM(model)
except ShmLLMError as problem:
    sys.exit(f"openai_bridge.py: {problem}")
uvicorn.run(app, port=options.port, timeout_graceful_shutdown=3)

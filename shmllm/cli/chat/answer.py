"""Answers: asks the engine for the next message of a conversation, and what can be said of it.

This module must not know where messages come from, nor how an answer is shown.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shmllm.cli.chat.attachments import Attachment, ChatItems
from shmllm.cli.chat.conversation import Call, Conversation, Message
from shmllm.cli.chat.stopping import AnswerStopped, StopKey
from shmllm.cli.sampling import completed
from shmllm.errors import RequestError
from shmllm.params.items import Modality

if TYPE_CHECKING:
    from shmllm.frontend.input_processor import PreparedRequest
    from shmllm.frontend.llm import LLM
    from shmllm.frontend.prompts import TokensPrompt
    from shmllm.frontend.replies.formats import ToolChoice
    from shmllm.frontend.request_state import RequestState
    from shmllm.outputs.reply import Reply

MAX_TOKENS = 512
Show = Callable[[str, bool], object]
STOPPED = "stopped"
"""The `end` of an answer that Ctrl-C ended."""


@dataclass(frozen=True, slots=True)
class Answer:
    """
    Attributes:
        text: what was written, perhaps not all that the model would have; without the next two.
        end: the finish reason, or STOPPED.
        num_tokens: the tokens of the answer.
        num_prompt_tokens: the tokens of the whole conversation before it.
        num_cached_tokens: those of them that were prefix-cache hits.
        first_token_s: seconds until the first token; None without one.
        tokens_per_s: the rate after the first token; None with less than two tokens.
        limit: `max_tokens` of the request.
        reasoning: what the model wrote before the answer.
        calls: the tool calls, in OpenAI's form.
        num_steps: the steps of the engine that gave the tokens.
        num_draft_tokens: the drafted tokens that the engine computed; None if it is not known,
            as for an answer that was stopped.
        num_accepted_tokens: those of them that were right.
    """

    text: str
    end: str
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    first_token_s: float | None = None
    tokens_per_s: float | None = None
    limit: int | None = None
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    num_steps: int = 0
    num_draft_tokens: int | None = None
    num_accepted_tokens: int | None = None

    @property
    def is_one(self) -> bool:
        """Whether it is something that a conversation can go on with. The model may have answered
        with nothing; what was stopped before the first token is no answer."""
        return bool(self.text or self.calls) or self.end in ("stop", "length")

    def figures(self) -> str:
        """Counts and times, as one line."""
        parts = [f"{self.num_tokens:,} token{'s' * (self.num_tokens != 1)}"]
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:,.1f} tokens/s")
        if 0 < self.num_steps < self.num_tokens:
            parts.append(f"{self.num_tokens / self.num_steps:,.1f} tokens a step")
        if self.num_draft_tokens:
            share = 100 * (self.num_accepted_tokens or 0) / self.num_draft_tokens
            drafted = f"{self.num_draft_tokens:,} drafted token{'s' * (self.num_draft_tokens != 1)}"
            parts.append(f"{share:.0f} % of {drafted} accepted")
        if self.first_token_s is not None:
            parts.append(f"first after {self.first_token_s:,.2f} s")
            parts.append(
                f"{self.num_cached_tokens:,} of {self.num_prompt_tokens:,} prompt tokens cached"
            )
        return ", ".join(parts)

    def remark(self) -> str:
        """Why it ended before the model wanted to, as one line; "" if it did not."""
        match self.end:
            case "length" if self.limit is not None and self.num_tokens >= self.limit:
                return f"cut off after {self.limit:,} tokens: --max-tokens sets how many"
            case "length":
                used = self.num_prompt_tokens + self.num_tokens
                return (
                    f"cut off: the {used:,} tokens of context are full; /reset begins a new "
                    "conversation"
                )
            case "abort":
                return "cut off: the engine was paused, put to sleep or stopped"
            case "stopped" if self.text:
                return "stopped; the answer so far stays in the conversation"
            case "stopped":
                return "stopped before the answer began; the conversation is as it was"
        return ""


class Answerer:
    """Asks one engine.

    Args:
        llm: the engine.
        sampling: the sampling parameters of the command line.
        stop: ends an answer.
        template: the source of a chat template; None takes the model's.
        tools: what the model may call, in OpenAI's form; None for nothing.
        tool_choice: whether it does so; see `LLM.chat`. A choice that forces a call is for the
            answers to the user: the model decides what it does with results, or no call would be
            the last one.
    """

    def __init__(
        self,
        llm: LLM,
        sampling: dict[str, Any],
        stop: StopKey,
        template: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        tool_choice: ToolChoice = None,
    ) -> None:
        self._llm = llm
        self._items = ChatItems(llm.front_end.items)
        self._template = template
        self._tools = tools
        self._tool_choice = tool_choice
        self._forces_calls = tool_choice not in (None, "auto", "none")
        self._sampling = completed({"max_tokens": MAX_TOKENS}, llm.model_defaults, sampling)
        self._stop = stop

    def check_template(self) -> None:
        """Check that there is a chat template which takes a message of a user.

        Raises:
            RequestError: there is none, or it does not.
        """
        try:
            self._prompt([{"role": "user", "content": "?"}], forces_calls=False)
        except RequestError as error:
            cause = str(error).partition(";")[0]
            raise RequestError(
                f"{cause}; give one with --chat-template FILE, or complete texts with: "
                'shmllm generate "TEXT"'
            ) from error

    def attach(self, modality: Modality, name: str) -> Attachment:
        """Reads an item for the next message.

        Raises:
            RequestError: there is none, or the model takes none.
        """
        return self._items.attach(modality, name)

    def check_items(self, conversation: Conversation) -> None:
        """Check that the model takes the items of a conversation.

        Raises:
            RequestError: it does not.
        """
        if any(isinstance(message["content"], list) for message in conversation.messages):
            self._prompt(conversation.messages, forces_calls=False)

    def check_tool_choice(self) -> None:
        """Check that calls can be forced, if they have to be.

        Raises:
            RequestError: they cannot.
        """
        if not self._forces_calls:
            return
        prompt = self._prompt([{"role": "user", "content": "?"}])
        try:
            self._request(prompt, 0)
        except RequestError as error:
            raise RequestError(_problem_of_tools(prompt) or str(error)) from error

    def __call__(self, conversation: Conversation, show: Show, attempt: int = 0) -> Answer:
        """Answer the last message of a conversation.

        Args:
            conversation: ends with the user's message, or with the results of tools.
            show: called with each piece of text as it arrives, and whether it is reasoning.
            attempt: how often this message was answered before; another one has another seed.

        Raises:
            RequestError: the engine does not take the conversation.
            EngineDeadError: the engine died.
        """
        from shmllm.outputs.reply import Reply

        reply = Reply()
        states: list[RequestState] = []
        request: PreparedRequest | None = None
        try:
            self._stop.armed = True
            request = self._prepare(conversation, attempt)
            with contextlib.closing(self._llm.front_end.serve([request], streaming=True)) as served:
                for changed in served:
                    for state in changed:
                        states = [state]
                        new = _new_parts(state)
                        reply.add(new)
                        show(new.reasoning, True)
                        show(new.content, False)
            self._stop.armed = False
        except AnswerStopped:
            show("\n", False)  # the terminal shows the key at the end of the line
        finally:
            self._stop.armed = False
        return _answer(reply, request, states)

    def _prepare(self, conversation: Conversation, attempt: int) -> PreparedRequest:
        is_result = conversation.messages[-1]["role"] == "tool"
        prompt = self._prompt(conversation.messages, forces_calls=not is_result)
        num_tokens, most = len(prompt["prompt_token_ids"]), self._llm.facts.max_model_len
        if num_tokens >= most:
            raise RequestError(
                f"the conversation would have {num_tokens:,} tokens with this message, and the "
                f"engine takes {most - 1:,} (max_model_len is {most:,}): shorten the message, or "
                "begin a new conversation with /reset; /save FILE keeps this one"
            )
        return self._request(prompt, attempt)

    def _request(self, prompt: TokensPrompt, attempt: int) -> PreparedRequest:
        from shmllm.params.sampling import SamplingParams

        sampling = dict(self._sampling)
        if sampling.get("seed") is not None:
            sampling["seed"] += attempt
        return self._llm.front_end.prepare([prompt], SamplingParams(**sampling))[0]

    def _prompt(self, messages: Sequence[Message], forces_calls: bool = True) -> TokensPrompt:
        return self._llm.front_end.chat_prompt(
            self._items.with_items(messages),
            chat_template=self._template,
            tools=self._tools,
            tool_choice=None if self._forces_calls and not forces_calls else self._tool_choice,
        )


def _problem_of_tools(prompt: TokensPrompt) -> str:
    """Which tool of a reply has parameters that no grammar can enforce, and why; "" if none has."""
    from shmllm.frontend.constraints.structured_outputs import grammar_of
    from shmllm.params.structured_outputs import StructuredOutputsParams

    reply_format = prompt.get("reply_format")
    for tool in () if reply_format is None else reply_format.tools:
        function = tool["function"]
        try:
            grammar_of(StructuredOutputsParams(json=function.get("parameters") or {}))
        except RequestError as error:
            cause = str(error).removeprefix("structured_outputs.json").lstrip(": ")
            return f"--tool-choice cannot force a call of {function['name']!r}: its schema: {cause}"
    return ""


def _new_parts(state: RequestState) -> Reply:
    """What is new of an answer; all of it is content if the model's replies have no parts."""
    from shmllm.outputs.reply import Reply

    text = state.text.take_delta()
    return Reply(content=text) if state.reply is None else state.reply.take_delta()


def _answer(reply: Reply, request: PreparedRequest | None, states: list[RequestState]) -> Answer:
    """What the last states of the request say of its answer; none came if it was stopped before
    its first token."""
    if request is None or not states:
        return Answer(reply.content, STOPPED)
    [state] = states
    if state.error is not None:
        raise RequestError(state.error)
    num_tokens, metrics = len(state.token_ids), state.metrics
    first, last = metrics.first_token_ts, metrics.last_token_ts
    took_s = 0.0 if first is None or last is None else last - first
    return Answer(
        reply.content,
        state.finish_reason or STOPPED,
        num_tokens,
        len(request.prompt_token_ids),
        state.num_cached_tokens,
        metrics.first_token_latency,
        (num_tokens - 1) / took_s if took_s > 0 else None,
        request.params.max_tokens,
        reply.reasoning,
        tuple(call.as_dict() for call in reply.tool_calls),
        metrics.num_steps,
        metrics.num_draft_tokens,
        metrics.num_accepted_tokens,
    )

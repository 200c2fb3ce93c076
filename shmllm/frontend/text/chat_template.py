"""Renders conversations as prompt texts, with a model's Jinja chat template.

This module finds the templates of a model and renders one; `chat_messages` checks messages and
tools. It imports jinja2, so import it only for a chat. It must not know how texts are tokenized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shmllm.errors import EngineStartError, RequestError
from shmllm.formats.text_files import one_line, read_json_object
from shmllm.frontend.text.chat_messages import Marks, checked_messages, checked_tools, json_copy
from shmllm.frontend.text.template_environment import compile_template
from shmllm.frontend.text.template_needs import ContentForm, content_form, fit_calls

# This mark is appended to the text that the model continues, and located in the rendered prompt.
# The space at its end shows whether the template strips the message.
_CONTINUE_MARK = "\ue000continue-from-here\ue000 "
_WITH_TEMPLATES = ("chat_template.json", "processor_config.json", "tokenizer_config.json")
_MOST_SHOWN = 80  # characters of a template in a message


def load_templates(directory: Path) -> dict[str, str]:
    """The chat templates of a model directory by name; the main one is named "default".

    The files chat_template.jinja and additional_chat_templates/NAME.jinja have precedence over the
    entry `chat_template` of others, which is a template or a list of named ones. Models that see or
    hear have it in a file of their processor, of which tokenizer_config.json may have none, or an
    older one.

    Raises:
        RequestError: a file cannot be read, or the entry is malformed.
    """
    files = {"default": directory / "chat_template.jinja"}
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        files[path.stem] = path
    try:
        found = {n: path.read_text(encoding="utf-8") for n, path in files.items() if path.is_file()}
    except (OSError, ValueError) as error:
        raise RequestError(
            f"cannot read the chat templates of {directory}: {one_line(error)}"
        ) from error
    try:
        each = (_configured_templates(directory / name) for name in _WITH_TEMPLATES)
        return found or next(filter(None, each), {})
    except EngineStartError as error:
        raise RequestError(one_line(error)) from error


def _configured_templates(path: Path) -> dict[str, str]:
    entry = read_json_object(path).get("chat_template")
    if entry is None:
        return {}
    if isinstance(entry, str):
        return {"default": entry}
    try:
        named = {str(item["name"]): item["template"] for item in entry}
        if not all(isinstance(template, str) for template in named.values()):
            raise TypeError("a template is no string")
        return named
    except (TypeError, KeyError) as error:
        raise RequestError(
            f"cannot read {path}: chat_template must be a string or a list of objects with name "
            "and template"
        ) from error


def select_template(templates: Mapping[str, str], wanted: str | None, *, has_tools: bool) -> str:
    """Choose the source of the template for a conversation.

    Args:
        templates: the model's templates by name.
        wanted: a name in `templates`, or the source of a template; None chooses "default".
        has_tools: whether the conversation has tools. If so, None chooses "tool_use" if the
            model has it.

    Raises:
        RequestError: `wanted` is None and the model has no default template, or it is no str.
    """
    if wanted is not None:
        if not isinstance(wanted, str):
            raise RequestError(f"chat_template must be a str, got {type(wanted).__name__}")
        return templates.get(wanted, wanted)
    name = "tool_use" if has_tools and "tool_use" in templates else "default"
    if name in templates:
        return templates[name]
    if templates:
        raise RequestError(
            f"the model has no default chat template; pass chat_template= with one of "
            f"{', '.join(sorted(templates))}"
        )
    raise RequestError(
        "the model has no chat template; pass one with chat_template=, or use generate() with "
        "plain prompts"
    )


def read_given_template(given: object, directory: Path) -> str:
    """The source of the template that the option `chat_template` of an LLM means.

    Args:
        given: the path of a file, the source itself, or the name of one of the model's templates.
            A file has precedence. A text without braces and line ends is no source.
        directory: the directory of the model's templates.

    Raises:
        EngineStartError: `given` is none of these, or no template that compiles.
    """
    if not isinstance(given, str | Path):
        raise EngineStartError(
            f"chat_template must be a path or the source of a template, got {type(given).__name__}"
        )
    try:
        source = _read_file(given)
        if source is None:
            source = _named_or_literal(given, directory)
        check_template(source)
    except (OSError, ValueError, RequestError) as error:
        shown = repr(given if len(str(given)) <= _MOST_SHOWN else f"{str(given)[:_MOST_SHOWN]}...")
        raise EngineStartError(f"chat_template={shown}: {one_line(error)}") from error
    return source


def _read_file(path: str | Path) -> str | None:
    """The text of a file; None if `path` is a str and no file can be opened there."""
    try:
        file = open(path, encoding="utf-8")  # noqa: SIM115
    except (OSError, ValueError):  # a source is too long for a name, or has a null character
        if isinstance(path, Path):
            raise
        return None
    with file:
        return file.read()


def _named_or_literal(given: str | Path, directory: Path) -> str:
    text = str(given)
    if any(character in text for character in "{}\n"):
        return text
    named = load_templates(directory)
    if text not in named:
        known = f"; the model has {', '.join(sorted(named))}" if named else ""
        raise RequestError(
            f"there is no such file that can be read, and no template of this name{known}"
        )
    return named[text]


def check_template(source: str) -> None:
    """Check the syntax of a template.

    Raises:
        RequestError: it does not compile.
    """
    try:
        compile_template(source)
    except Exception as error:
        raise RequestError(f"no Jinja template: {one_line(error)}") from error


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    content_format: str = "auto",
    variables: Mapping[str, Any],
    marks: Marks | None = None,
) -> str:
    """Render one conversation.

    Args:
        template: the Jinja source of the template.
        messages: dicts with `role` and `content`. The content is a str or a list of text parts.
        add_generation_prompt: a variable of the template.
        continue_final_message: end the prompt directly after the text of the last message.
        tools: JSON schemas of tools, a variable of the template.
        content_format: "string" joins text parts, "openai" makes every content a list of parts,
            and "auto" gives the template what it reads: texts, lists, or either.
        variables: special tokens and further variables of the template, by name.
        marks: what stands for an item where the template takes texts only, by modality; None:
            there are no items.

    Raises:
        RequestError: the input is malformed, or the template does not compile or fails.
    """
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "continue_final_message=True needs add_generation_prompt=False: a prompt either goes "
            "on with the last message or opens a new one"
        )
    conversation = _with_contents(messages, content_format, template, marks)
    final_text = _mark_final_text(conversation) if continue_final_message else ""
    context = {
        "documents": None,
        **{name: json_copy(value, name) for name, value in variables.items()},
        "messages": conversation,
        "tools": checked_tools(tools),
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        prompt = compile_template(template).render(context)
    except Exception as error:
        raise RequestError(
            f"the chat template failed ({type(error).__name__}): {one_line(error)}"
        ) from error
    return _cut_at_mark(prompt, final_text) if continue_final_message else prompt


def _with_contents(
    messages: object, content_format: str, template: str, marks: Marks | None
) -> list[dict[str, Any]]:
    """The checked messages, whose contents have the format."""
    if content_format not in ("auto", "string", "openai"):
        raise RequestError(
            f"chat_template_content_format must be auto, string or openai, got {content_format!r}"
        )
    form = content_form(template) if content_format == "auto" else ContentForm(content_format)
    keep_parts = form is not ContentForm.STRING
    conversation = checked_messages(messages, keep_parts=keep_parts, marks=marks)
    for message in conversation:
        content = message.get("content")
        if form is ContentForm.PARTS and isinstance(content, str):
            message["content"] = [{"type": "text", "text": content}]
        elif form is ContentForm.EITHER and isinstance(content, list):
            message["content"] = _one_text(content)
        if message["role"] == "assistant" and message.get("tool_calls"):
            fit_calls(message, template)
    return conversation


def _one_text(parts: list[Any]) -> Any:
    """The text of a list of one text, or the list. Templates that read either form write the same
    for the text, and some read the lists of some roles only."""
    return parts[0]["text"] if [part["type"] for part in parts] == ["text"] else parts


def _mark_final_text(conversation: list[dict[str, Any]]) -> str:
    """Append the mark to the text of the last message. Returns the text without the mark."""
    final = conversation[-1]
    if isinstance(final.get("content"), list) and final["content"]:
        holder, key = final["content"][-1], "text"
    else:
        holder, key = final, "content"
    text = holder.get(key)
    if not isinstance(text, str):
        raise RequestError("continue_final_message=True, but the last message holds no text")
    holder[key] = text + _CONTINUE_MARK
    return text


def _cut_at_mark(prompt: str, final_text: str) -> str:
    """The prompt up to the mark, stripped if the template stripped the last message."""
    position = prompt.rfind(_CONTINUE_MARK.strip())
    if position < 0 or final_text.strip() not in prompt:
        raise RequestError(
            "continue_final_message=True, but the chat template does not write the last message's "
            "text into the prompt as it is"
        )
    kept = prompt[:position]
    return kept if prompt.startswith(_CONTINUE_MARK, position) else kept.rstrip()

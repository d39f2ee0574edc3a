"""Chats as they come to chats as a template wants them: OpenAI `messages`, or ShareGPT `conversations`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from remote_payload.extract.records import Malformed
from remote_payload.host.textdata import json_error

SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant",
    "bing": "assistant", "model": "assistant", "assistant": "assistant", "system": "system",
    "observation": "tool", "tool": "tool", "function_response": "tool", "function_call": "function_call",
}  # fmt: skip

KEPT = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking")
"""Keys of a message that templates read; null ones (columns that a data set's other messages have) are dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """`tools` are the definitions that the template may show to the model; None if there are none."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None

    @property
    def assistants(self) -> list[int]:
        """Positions of the assistant's messages."""
        return [place for place, message in enumerate(self.messages) if message["role"] == "assistant"]


def read_chat(record: dict[str, Any]) -> Chat:
    """Raises Malformed (`malformed`, `empty`, `multimodal`, `encoding`)."""
    turns = record.get("messages")
    if turns is None:
        turns = record.get("conversations")
    if isinstance(turns, str):
        turns = _decoded(turns, "the chat")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise Malformed("malformed", "the chat is not a list of objects")
    if not turns:
        raise Malformed("empty", "the chat has no message")
    messages = [_message(turn) for turn in turns]
    system = record.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    tools = record.get("tools")
    if isinstance(tools, str):
        tools = _decoded(tools, "tools") if tools.strip() else None
    if tools is not None and not isinstance(tools, list):
        raise Malformed("malformed", "tools is not a list")
    chat = Chat(messages=messages, tools=tools or None)
    _check_text(chat)
    return chat


def with_other_arguments(chat: Chat) -> Chat:
    """Return the chat with arguments of tool calls as objects instead of JSON text, or the other way round.

    Templates differ in which of the two they accept, and data sets in which they hold.
    """
    messages = []
    for message in chat.messages:
        calls = [_other_call(call) for call in message.get("tool_calls") or ()]
        messages.append({**message, "tool_calls": calls} if calls else message)
    return Chat(messages=messages, tools=chat.tools)


def _other_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return call
    else:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _message(turn: dict[str, Any]) -> dict[str, Any]:
    role = turn.get("role")
    if role is None:
        role = SHAREGPT_ROLES.get(str(turn.get("from")))
        turn = {**turn, "role": role, "content": turn.get("value")}
    if not isinstance(role, str):
        raise Malformed("malformed", f"unknown speaker {turn.get('from')!r}")
    if role == "function_call":
        call = _decoded(str(turn["content"]), "the function call")
        calls = call if isinstance(call, list) else [call]
        tool_calls = [{"type": "function", "function": one} for one in calls]
        return {"role": "assistant", "content": "", "tool_calls": tool_calls}
    message = {key: turn[key] for key in KEPT if turn.get(key) is not None}
    if message.get("tool_calls") == []:
        del message["tool_calls"]
    message["content"] = _text(turn.get("content"), role, "tool_calls" in message)
    return message


def _text(content: Any, role: str, has_calls: bool) -> str:
    if content is None and has_calls:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Malformed("malformed", f"the {role}'s content is neither text nor a list of parts")
    texts = []
    for part in content:
        if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(part, str):
            texts.append(part)
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise Malformed("multimodal", f"the {role}'s content has a part of type {kind!r}: only text is captured")
    return "".join(texts)


def _decoded(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed("malformed", f"{what} is not JSON: {json_error(error, text)} of its text") from error


def _check_text(chat: Chat) -> None:
    # JSON can spell half of a surrogate pair, which no tokenizer can encode.
    try:
        json.dumps([chat.messages, chat.tools], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise Malformed("encoding", "the text holds half a surrogate pair, which is no character") from error
    except TypeError as error:  # dates and bytes of a column store
        raise Malformed("malformed", f"the chat holds more than text: {error}") from error

"""Loss masks by every method, on fast tokenizers and on one without offsets."""

from __future__ import annotations

from typing import Any

import pytest
from support.chat_tokenizers import MARKED, PLAIN, STRICT, STRIPPING, counted_text, fast_tokenizer, slow_tokenizer

from remote_payload.extract.chats import read_chat
from remote_payload.extract.records import Malformed
from remote_payload.extract.render import ChatRenderer
from remote_payload.extract.settings import ConfigError

KINDS = [fast_tokenizer, slow_tokenizer]
TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hello world"},
    {"role": "user", "content": "and now"},
    {"role": "assistant", "content": "the end \u00e9\U0001f600"},
]


def render(tokenizer: Any, messages: list[dict[str, Any]], **record: Any) -> tuple[ChatRenderer, list[list[str]]]:
    renderer = ChatRenderer(lambda: tokenizer)
    pieces = renderer.render(read_chat({"messages": messages, **record}))
    return renderer, [counted_text(tokenizer, piece.token_ids, piece.mask) for piece in pieces]


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize(("template", "method"), [(PLAIN, "prefix"), (MARKED, "generation")])
def test_what_the_assistant_says_counts_and_nothing_else(make: Any, template: str, method: str) -> None:
    renderer, pieces = render(make(template), TURNS)
    assert pieces == [["hello world<|end|>", "the end \u00e9\U0001f600<|end|>"]]
    assert renderer.methods == {method: 1}


@pytest.mark.parametrize("make", KINDS)
def test_token_ids_are_those_of_the_template(make: Any) -> None:
    tokenizer = make(PLAIN)
    (piece,) = ChatRenderer(lambda: tokenizer).render(read_chat({"messages": TURNS}))
    direct = tokenizer.apply_chat_template(TURNS, tokenize=True)
    assert piece.token_ids == list(direct["input_ids"] if hasattr(direct, "keys") else direct)


@pytest.mark.parametrize("make", KINDS)
def test_a_template_that_strips_thinking_splits_the_chat_by_turn(make: Any) -> None:
    tokenizer = make(STRIPPING)
    thinking = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>hm</think>two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "<think>so</think>four"},
    ]
    renderer, pieces = render(tokenizer, thinking)
    # The prompt opens the thinking, so it is no part of what is to be learnt.
    assert pieces == [["hm</think>two<|end|>"], ["so</think>four<|end|>"]]
    assert renderer.methods == {"turns": 1}


@pytest.mark.parametrize("make", KINDS)
def test_turns_that_stay_the_same_stay_in_one_sample(make: Any) -> None:
    """Calls of a tool come after the same question: nothing is stripped between them."""
    calls = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>a</think>", "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "<think>b</think>two"},
    ]
    _, pieces = render(make(STRIPPING), calls)
    assert pieces == [["a</think><|end|>", "b</think>two<|end|>"]]


def test_a_token_across_the_border_of_a_turn_is_refused_where_there_are_no_offsets() -> None:
    template = PLAIN.replace("<|assistant|>{% endif %}", "|>{% endif %}").replace(
        "<|{{ m.role }}|>", "{% if m.role == 'assistant' %}|>{% else %}<|{{ m.role }}|>{% endif %}"
    )
    with pytest.raises(Malformed) as caught:
        render(slow_tokenizer(template), TURNS[1:3])  # "|>h" is one token
    assert caught.value.code == "mask"
    assert "border of a turn" in caught.value.why


def test_a_template_without_the_assistants_words_is_refused() -> None:
    with pytest.raises(Malformed) as caught:
        render(fast_tokenizer(PLAIN.replace("{{ m.content }}", "x")), TURNS[1:3])
    assert caught.value.code == "mask"


def test_what_a_template_refuses_is_the_records_fault() -> None:
    renderer = ChatRenderer(lambda: fast_tokenizer(STRICT))
    with pytest.raises(Malformed) as caught:
        renderer.render(read_chat({"messages": TURNS}))
    assert caught.value.code == "template"
    assert "no system turns" in caught.value.why
    assert renderer.render(read_chat({"messages": TURNS[1:]}))


def test_arguments_of_calls_are_given_in_the_form_that_the_template_takes() -> None:
    template = PLAIN.replace("c.function.arguments | tojson", "c.function.arguments['x']").replace(
        "{% for c in m.tool_calls or [] %}",
        "{% for c in m.tool_calls or [] %}"
        "{% if c.function.arguments is string %}{{ raise_exception('text') }}{% endif %}",
    )
    call = {"function": {"name": "f", "arguments": '{"x": 7}'}}
    _, pieces = render(
        fast_tokenizer(template),
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}],
    )
    assert pieces == [["[f(7)]<|end|>"]]


def test_tools_reach_the_template() -> None:
    template = "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}" + PLAIN
    tokenizer = fast_tokenizer(template)
    tools = [{"type": "function", "function": {"name": "look"}}]
    (piece,) = ChatRenderer(lambda: tokenizer).render(read_chat({"messages": TURNS[1:3], "tools": tools}))
    assert tokenizer.decode(piece.token_ids).startswith("look;<|user|>")


def test_a_tokenizer_without_a_template_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        render(fast_tokenizer(""), TURNS)

"""Chats to token ids and loss mask, with the model's own template and tokenizer.

The mask is 1 where the assistant speaks. Where those parts lie in the rendered text is told by

- `{% generation %}` marks, where the template has them (method "generation"), else
- rendered prefixes (method "prefix"): the assistant's turn is what a rendering that ends with it has more than the
  prompt that asks for it. Each sample is checked: what was rendered up to one turn must begin what is rendered up to
  the next. A template that strips earlier thinking breaks that. Then the chat is split (method "turns"): each part
  ends with the turn from which on the text differs, and only turns that are there unaltered count.

Places in the text become places among the tokens by the tokenizer's offsets; a tokenizer without them (Kimi's) is
given the text up to the place, whose tokens must begin the whole text's: special tokens stand at these places, across
which no tokenizer merges. Where they do not, the record is refused rather than trained on wrong tokens.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from remote_payload.extract.chats import Chat, with_other_arguments
from remote_payload.extract.records import Malformed
from remote_payload.extract.settings import ConfigError

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A piece of text for the model; `mask` holds one 0 or 1 a token."""

    token_ids: list[int]
    mask: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Text:
    text: str
    spans: list[tuple[int, int]]  # [start, end) of characters that count


class ChatRenderer:
    """Renders chats; `tokenizer` is called once, at the first one."""

    def __init__(self, tokenizer: Callable[[], Any]) -> None:
        self._make = tokenizer
        self._tokenizer: Any = None
        self._fast = False
        self._encode: Callable[..., Any] = self._called
        self.methods: Counter[str] = Counter()

    def render(self, chat: Chat) -> list[Rendered]:
        """Return one piece, or several where the template alters earlier turns.

        Raises Malformed if the template refuses the chat or the mask cannot be told; ConfigError if the tokenizer
        has no template, or does not encode text as its template does.
        """
        if self._tokenizer is None:
            self._prepare()
        try:
            return self._render(chat)
        except Malformed as refused:
            if refused.code != "template" or not any(message.get("tool_calls") for message in chat.messages):
                raise
        return self._render(with_other_arguments(chat))

    def _prepare(self) -> None:
        tokenizer = self._make()
        template = getattr(tokenizer, "chat_template", None)
        if not template:
            raise ConfigError("the model's tokenizer has no chat template, so chats cannot be rendered")
        self._tokenizer = tokenizer
        self._fast = bool(getattr(tokenizer, "is_fast", False))
        self._encode = self._choose_encoder()

    def _called(self, text: str, **more: Any) -> Any:
        return self._tokenizer(text, add_special_tokens=False, **more)

    def _encoded(self, text: str) -> Any:
        return {"input_ids": self._tokenizer.encode(text)}

    def _choose_encoder(self) -> Callable[..., Any]:
        """Return the call that gives a text the ids that the template's own path gives it."""
        messages = [{"role": "user", "content": "a b"}]
        try:
            text = self._apply(messages, None, tokenize=False, add_generation_prompt=True)
            wanted = self._apply(messages, None, tokenize=True, add_generation_prompt=True)
        except Malformed:
            return self._called  # a template that wants more than one message; most encode as they are called
        wanted = list(wanted["input_ids"] if hasattr(wanted, "keys") else wanted)
        for encode in (self._called, self._encoded) if not self._fast else (self._called,):
            if list(encode(text)["input_ids"]) == wanted:
                return encode
        raise ConfigError("the tokenizer encodes a rendered chat otherwise than its template does: use token ids")

    def _render(self, chat: Chat) -> list[Rendered]:
        marked = self._by_marks(chat)
        texts = [marked] if marked else self._by_prefixes(chat)
        pieces = [self._tokens(piece) for piece in texts]
        self.methods["generation" if marked else "prefix" if len(texts) == 1 else "turns"] += 1
        return pieces

    def _apply(self, messages: list[dict[str, Any]], tools: list[Any] | None, **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(messages, tools=tools, **options)
        except Exception as error:
            # Templates refuse a chat with an exception of jinja's or of their own making.
            raise Malformed("template", f"the chat template refuses it ({type(error).__name__}: {error})") from error

    def _text(self, chat: Chat, count: int, *, prompt: bool = False) -> str:
        """Return the first `count` messages as text, `prompt`: asking the assistant to speak next."""
        rendered = self._apply(chat.messages[:count], chat.tools, tokenize=False, add_generation_prompt=prompt)
        return str(rendered)

    def _by_marks(self, chat: Chat) -> _Text | None:
        """Return None where the template has no marks, or where the tokenizer renders otherwise than by it alone."""
        template = self._tokenizer.get_chat_template(None, chat.tools)
        if not GENERATION_MARK.search(template):
            return None
        from transformers.utils.chat_template_utils import render_jinja_template

        text = self._text(chat, len(chat.messages))
        texts, spans = render_jinja_template(
            [chat.messages], tools=chat.tools, chat_template=template, return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )  # fmt: skip
        if texts[0] != text:
            return None
        return _Text(text=text, spans=[(start, end) for start, end in spans[0] if end > start])

    def _by_prefixes(self, chat: Chat) -> list[_Text]:
        pieces: list[_Text] = []
        text, spans = "", list[tuple[int, int]]()
        for place in chat.assistants:
            said = self._text(chat, place + 1)
            start = self._start(chat, place, said)
            if spans and not said.startswith(text):
                pieces.append(_Text(text=text, spans=spans))
                spans = []
            text, spans = said, [*spans, (start, len(said))]
        whole = self._text(chat, len(chat.messages))
        if whole.startswith(text):
            text = whole
        return [*pieces, _Text(text=text, spans=spans)]

    def _start(self, chat: Chat, place: int, said: str) -> int:
        """Return where the turn at `place` begins in the text that ends with it; raise Malformed if nothing tells.

        It is where the prompt for the turn ends, or already differs (a prompt that opens a thinking block).
        """
        message = chat.messages[place]
        # Templates strip thinking, and space at the ends, from what was said.
        words = str(message["content"]).rpartition("</think>")[2].strip()
        if not place:
            start = max(said.find(words), 0)
        else:
            asked, before = self._text(chat, place, prompt=True), self._text(chat, place)
            start = _common(asked, said)
            if start < len(before):
                if not said.startswith(before):
                    raise Malformed("mask", "the template renders a turn otherwise once it is answered")
                start = len(before)
        if words not in said[start:]:
            raise Malformed("mask", "the rendered chat does not hold the assistant's words where its turn begins")
        return start

    def _tokens(self, piece: _Text) -> Rendered:
        if self._fast:
            encoded = self._encode(piece.text, return_offsets_mapping=True)
            counts = bytearray(len(piece.text))
            for start, end in piece.spans:
                counts[start:end] = b"\x01" * (end - start)
            places = encoded["offset_mapping"]
            mask = bytearray(first < last and counts[first] for first, last in places)
            return Rendered(token_ids=list(encoded["input_ids"]), mask=bytes(mask))
        ids = list(self._encode(piece.text)["input_ids"])
        mask = bytearray(len(ids))
        for start, end in piece.spans:
            first, last = self._count(piece.text, start, ids), self._count(piece.text, end, ids)
            mask[first:last] = b"\x01" * (last - first)
        return Rendered(token_ids=ids, mask=bytes(mask))

    def _count(self, text: str, place: int, ids: list[int]) -> int:
        """Return how many of a text's tokens lie before a place in it. Raises Malformed if one lies across it."""
        if place == len(text):
            return len(ids)
        before = list(self._encode(text[:place])["input_ids"])
        if ids[: len(before)] != before:
            raise Malformed("mask", f"a token lies across the border of a turn, at character {place}")
        return len(before)


def _common(one: str, other: str) -> int:
    """Return how many characters two texts have in common at their beginning."""
    if other.startswith(one):
        return len(one)
    return next((place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(other))

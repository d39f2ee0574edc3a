"""Tokenizers and templates of the kinds that models have: fast and slow, with and without generation marks."""

from __future__ import annotations

from typing import Any

import tiktoken
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

SPECIAL = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")

PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}({{ c.function.arguments | tojson }})]{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Every turn as it is."""

MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{%- generation -%}{{ m.content }}<|end|>"
    "{%- endgeneration -%}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

STRIPPING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and "
    "loop.index < ns.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
"""Thinking before the last question is taken out, as DeepSeek-R1's and Qwen3's templates do."""

STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    + PLAIN[len("{% for m in messages %}") :]
)


class SlowTokenizer(PreTrainedTokenizer):
    """Byte-pair encoding by tiktoken, as Kimi's own tokenizer code does it: no offsets, no assistant mask."""

    vocab_files_names: dict[str, str] = {}  # noqa: RUF012 - as transformers declares it

    def __init__(self, template: str) -> None:
        # A vocabulary of bytes and a few merges, among them ones that would reach across a turn's border.
        merges = [b"|>", b"|>h", b"he", b"hel", b"th", b"the", b"wo", b"wor"]
        ranks = {bytes([value]): value for value in range(256)} | {m: 256 + i for i, m in enumerate(merges)}
        names = {name: 300 + place for place, name in enumerate(SPECIAL)}
        self._model = tiktoken.Encoding("t", pat_str=r"[^<]+|<", mergeable_ranks=ranks, special_tokens=names)
        super().__init__()
        self.chat_template = template

    @property
    def vocab_size(self) -> int:
        return 400

    def get_vocab(self) -> dict[str, int]:
        return {str(number): number for number in range(400)}

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return [str(number) for number in self._model.encode(text, allowed_special="all")]

    def _convert_token_to_id(self, token: str) -> int:
        return int(token)

    def _convert_id_to_token(self, index: int) -> str:
        return str(index)

    def text(self, ids: list[int]) -> str:
        return self._model.decode(ids)


def fast_tokenizer(template: str) -> Any:
    """Byte-level, so that every character is one or more tokens, with offsets."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model)
    tokenizer.chat_template = template
    return tokenizer


def slow_tokenizer(template: str) -> Any:
    return SlowTokenizer(template)


def counted_text(tokenizer: Any, ids: list[int], mask: bytes) -> list[str]:
    """Return the runs of tokens that count, as text."""
    decode = tokenizer.text if isinstance(tokenizer, SlowTokenizer) else tokenizer.decode
    runs: list[list[int]] = []
    for place, number in enumerate(ids):
        if mask[place]:
            if place == 0 or not mask[place - 1]:
                runs.append([])
            runs[-1].append(number)
    return [decode(run) for run in runs]

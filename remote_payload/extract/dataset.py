"""From lines of a JSONL file to token ids: rendered, checked, and every refusal accounted for.

Two kinds of record: `{"input_ids": [...]}` with an optional `loss_mask`, and chats, either `{"messages": [{"role",
"content"}]}` or ShareGPT's `{"conversations": [{"from", "value"}]}`. A sample's index is its record's number in the
file (0-based, blank lines not counted), so skipped records leave holes and an index means the same in every run.

Token ids are spooled to an unnamed temporary file: a large data set has more of them than fits a Python list.
"""

from __future__ import annotations

import json
import re
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from remote_payload.extract.settings import ConfigError

KINDS = ("auto", "tokens", "chat")
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}

HISTOGRAM_EDGES = (64, 256, 1024, 4096, 16384, 65536)
"""Upper edges, in tokens, of the histogram of lengths; the last bin is open."""


class Malformed(Exception):
    """A record that is skipped. `code` is stable, `why` is for a person."""

    def __init__(self, code: str, why: str) -> None:
        super().__init__(why)
        self.code = code
        self.why = why


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """`loss_mask` holds one 0 or 1 for each token; None where the data set or template does not say."""

    index: int
    token_ids: list[int]
    loss_mask: bytes | None

    def loss_spans(self) -> list[list[int]] | None:
        """Return the mask as [start, end) ranges of tokens that count; None where there is no mask."""
        if self.loss_mask is None:
            return None
        return [[m.start(), m.end()] for m in re.finditer(b"\x01+", self.loss_mask)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """A record that gives no sample (`truncated` is a notice: that sample is there). `line` counts from 1."""

    index: int
    line: int
    code: str
    why: str


class Samples:
    """The valid samples of a data set, on disk; iterate as often as needed. Iteration is in the file's order."""

    def __init__(self) -> None:
        self._spool = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as this object
        self._indexes, self._lengths, self._masked = array("Q"), array("L"), array("b")
        self.tokens = 0

    def add(self, sample: Sample) -> None:
        self._spool.write(array("i", sample.token_ids).tobytes())
        self._spool.write(sample.loss_mask or b"")
        self._indexes.append(sample.index)
        self._lengths.append(len(sample.token_ids))
        self._masked.append(sample.loss_mask is not None)
        self.tokens += len(sample.token_ids)

    def __len__(self) -> int:
        return len(self._indexes)

    def __iter__(self) -> Iterator[Sample]:
        width, offset = array("i").itemsize, 0
        for index, length, masked in zip(self._indexes, self._lengths, self._masked, strict=True):
            self._spool.seek(offset)  # each time: two iterators may be at work
            ids = array("i", self._spool.read(length * width))
            mask = self._spool.read(length) if masked else None
            offset += length * width + (length if masked else 0)
            yield Sample(index=index, token_ids=ids.tolist(), loss_mask=mask)

    @property
    def indexes(self) -> Sequence[int]:
        return self._indexes

    def histogram(self) -> list[dict[str, int | None]]:
        """Return the counts of lengths, `{"up_to": tokens, "samples": n}`; the last bin's edge is None."""
        edges: list[int | None] = [*HISTOGRAM_EDGES, None]
        counts = [0] * len(edges)
        for length in self._lengths:
            counts[next((i for i, edge in enumerate(HISTOGRAM_EDGES) if length <= edge), -1)] += 1
        return [{"up_to": edge, "samples": count} for edge, count in zip(edges, counts, strict=True)]


def read_samples(
    path: str,
    kind: str,
    *,
    max_samples: int | None,
    max_seq_len: int,
    vocabulary: int | None,
    tokenizer: Callable[[], Any],
    skip: Callable[[Skip], None],
) -> Samples:
    """Read the first `max_samples` valid samples of a JSONL file; `skip` is told of every other record read.

    Longer samples are cut to `max_seq_len` tokens and reported with code `truncated`. `tokenizer` is called once,
    at the first chat. Raises ConfigError for a missing file, an unsupported kind, or if not one sample is valid.
    """
    if kind not in KINDS:
        raise ConfigError(f"data.kind is one of {', '.join(KINDS)}, not {kind!r}")
    if not path.endswith((".jsonl", ".ndjson", ".json")):
        raise ConfigError(
            f"{path}: only JSONL data sets are supported (one JSON object a line, name ending in .jsonl)"
        )
    samples, skipped = Samples(), 0
    renderer = ChatRenderer(tokenizer)
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below; the except clause must not cover the reading
    except OSError as error:
        raise ConfigError(f"cannot read the data set {path}: {error.strerror}") from error
    with file:
        index = -1
        for number, line in enumerate(file, 1):
            if max_samples is not None and len(samples) >= max_samples:
                break
            if not line.strip():
                continue
            index += 1
            try:
                ids, mask = _tokens_of(_parse(line), kind, renderer)
                _check_ids(ids, mask, vocabulary)
            except Malformed as reason:
                skipped += 1
                skip(Skip(index=index, line=number, code=reason.code, why=reason.why))
                continue
            if len(ids) > max_seq_len:
                skip(Skip(index=index, line=number, code="truncated", why=f"{len(ids)} tokens cut to {max_seq_len}"))
                ids, mask = ids[:max_seq_len], mask[:max_seq_len] if mask is not None else None
            samples.add(Sample(index=index, token_ids=ids, loss_mask=mask))
    if not len(samples):
        raise ConfigError(f"{path} gives not one sample: {skipped} records skipped, {index + 1} read")
    return samples


class ChatRenderer:
    """Renders chats with the model's own template; the loss mask needs its `{% generation %}` marks."""

    def __init__(self, tokenizer: Callable[[], Any]) -> None:
        self._make = tokenizer
        self._tokenizer: Any = None
        self._masks = False

    def render(self, messages: list[dict[str, str]]) -> tuple[list[int], bytes | None]:
        """Return token ids and loss mask (1 where the assistant speaks). Raises Malformed, ConfigError."""
        if self._tokenizer is None:
            self._tokenizer = self._make()
            template = getattr(self._tokenizer, "chat_template", None)
            if not template:
                raise ConfigError("the model's tokenizer has no chat template, so chats cannot be rendered")
            # Slow tokenizers have no character offsets, from which transformers derives the mask.
            self._masks = bool(getattr(self._tokenizer, "is_fast", False)) and "generation %}" in str(template)
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=self._masks
            )
        except Exception as error:
            # Templates refuse a chat with an exception of jinja's or of their own making.
            raise Malformed("template", f"the chat template refuses it ({type(error).__name__}: {error})") from error
        mask = bytes(rendered["assistant_masks"]) if self._masks else None
        return list(rendered["input_ids"]), mask


def _parse(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise Malformed("malformed", f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise Malformed("malformed", "not a JSON object")
    return record


def _tokens_of(record: dict[str, Any], kind: str, renderer: ChatRenderer) -> tuple[list[int], bytes | None]:
    if kind != "chat" and "input_ids" in record:
        return _token_record(record)
    if kind != "tokens" and ("messages" in record or "conversations" in record):
        return renderer.render(_messages(record))
    wanted = {"tokens": "input_ids", "chat": "messages or conversations"}
    raise Malformed("malformed", f"no {wanted.get(kind, 'input_ids, messages or conversations')} in it")


def _token_record(record: dict[str, Any]) -> tuple[list[int], bytes | None]:
    ids, mask = record["input_ids"], record.get("loss_mask")
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise Malformed("malformed", "input_ids is not a list of integers")
    if mask is None:
        return ids, None
    if not isinstance(mask, list) or len(mask) != len(ids) or not all(value in (0, 1) for value in mask):
        raise Malformed("malformed", "loss_mask is not a list of as many 0 and 1 as there are input_ids")
    return ids, bytes(map(int, mask))


def _messages(record: dict[str, Any]) -> list[dict[str, str]]:
    turns = record.get("messages", record.get("conversations"))
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise Malformed("malformed", "the chat is not a list of objects")
    if not turns:
        raise Malformed("empty", "the chat has no message")
    messages = []
    for turn in turns:
        role = turn.get("role", SHAREGPT_ROLES.get(str(turn.get("from"))))
        content = turn.get("content", turn.get("value"))
        if not isinstance(role, str):
            raise Malformed("malformed", f"unknown speaker {turn.get('role', turn.get('from'))!r}")
        if not isinstance(content, str):
            raise Malformed("malformed", f"the {role}'s content is not text")
        messages.append({"role": role, "content": content})
    return messages


def _check_ids(ids: list[int], mask: bytes | None, vocabulary: int | None) -> None:
    if not ids:
        raise Malformed("empty", "no token in it")
    if min(ids) < 0 or max(ids) >= (vocabulary or 1 << 31):
        raise Malformed("malformed", f"token id {min(ids) if min(ids) < 0 else max(ids)} is outside 0..{vocabulary}")
    if mask is not None and len(mask) != len(ids):
        raise Malformed("template", f"the template's mask has {len(mask)} entries for {len(ids)} tokens")

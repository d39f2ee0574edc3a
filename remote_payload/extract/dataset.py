"""From a data set to token ids: rendered, checked, and every refusal accounted for.

Two kinds of record: `{"input_ids": [...]}` with an optional `loss_mask`, and chats (see `chats`). A sample's index is
its number in the data set, refused records counted (a chat that must be split takes an index for each part), so an
index means the same in every run over the same data, template and tokenizer.

Token ids are spooled to an unnamed temporary file: a large data set has more of them than fits a Python list.
"""

from __future__ import annotations

import os
import re
import tempfile
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from remote_payload.extract.chats import read_chat
from remote_payload.extract.records import Malformed, Source, open_source
from remote_payload.extract.render import ChatRenderer, Rendered
from remote_payload.extract.settings import ConfigError
from remote_payload.host.broken import Faults
from remote_payload.host.textdata import record_fault

KINDS = ("auto", "tokens", "chat")
"""What a record is; `auto` takes either, record by record."""

OVER_LONG = ("truncate", "skip")
"""What becomes of a sample of more than `max_seq_len` tokens."""

RECORD_IDS = ("conversation_id", "uuid", "id")
"""Keys under which a record may name itself: Model-Optimizer asks for the first two, ShareGPT has the last."""

RECORD_ID_BYTES = 256
"""A longer name is a text, not a name, and is left out."""

NOTICES = frozenset({"truncated", "split", "no-loss"})
"""Codes of a `Skip` whose sample is there all the same."""

HISTOGRAM_EDGES = (64, 256, 1024, 4096, 16384, 65536)
"""Upper edges, in tokens, of the histogram of lengths; the last bin is open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """`loss_mask` holds one 0 or 1 for each token; None where the data set or template does not say.

    `record_id`: what the data set itself calls the record, see RECORD_IDS; the parts of a split chat share it.
    """

    index: int
    token_ids: list[int]
    loss_mask: bytes | None
    record_id: str | None = None

    def loss_spans(self) -> list[list[int]] | None:
        """Return the mask as [start, end) ranges of tokens that count; None where there is no mask."""
        if self.loss_mask is None:
            return None
        return [[m.start(), m.end()] for m in re.finditer(b"\x01+", self.loss_mask)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """A record that gives no sample, or (codes in NOTICES) one about which something is to be said.

    `line` is the record's line or row, from 1. A skipped record takes one index, as a sample would. `record_id`: see
    Sample; None too where the record could not be read.
    """

    index: int
    line: int
    code: str
    why: str
    record_id: str | None = None


Shard = tuple[int, int]
"""(number from 1, of how many): each host of several takes the samples of its number."""

WHOLE: Shard = (1, 1)


def is_mine(index: int, shard: Shard) -> bool:
    """Tell whether a sample, or a skipped record, belongs to a shard: neighbours go to different hosts."""
    number, count = shard
    return index % count == number - 1


def writing_rank(index: int, shard: Shard, ranks: int) -> int:
    """Return the tensor-parallel rank that writes a sample of the shard: neighbours go to different ranks.

    By its place in the share. The index itself would leave ranks without work: of two shares, the first has only even
    indexes, which are 0, 2, 4 and 6 modulo 8.
    """
    return index // shard[1] % ranks


class Samples:
    """The valid samples of a data set, on disk; iterate as often as needed. Iteration is in the file's order."""

    def __init__(self) -> None:
        self._spool = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as this object
        weakref.finalize(self, self._spool.close)
        self._indexes, self._lengths, self._masked = array("Q"), array("L"), array("b")
        self._named = array("H")  # bytes of each record's own name
        self._hashes = array("q")  # of the token ids, by this process's own hash
        self.tokens = 0

    def add(self, sample: Sample) -> None:
        ids = array("i", sample.token_ids).tobytes()
        self._hashes.append(hash(ids))
        self._spool.write(ids)
        self._spool.write(sample.loss_mask or b"")
        name = (sample.record_id or "").encode()
        self._spool.write(name)
        self._named.append(len(name))
        self._indexes.append(sample.index)
        self._lengths.append(len(sample.token_ids))
        self._masked.append(sample.loss_mask is not None)
        self.tokens += len(sample.token_ids)

    def __len__(self) -> int:
        return len(self._indexes)

    def repeated(self) -> int:
        """Return how many samples have the same tokens as an earlier one."""
        return len(self._hashes) - len(set(self._hashes))

    def __iter__(self) -> Iterator[Sample]:
        width = array("i").itemsize
        for index, offset, length, masked, named in self._places():
            tokens, mask_end = length * width, length * width + masked
            data = os.pread(self._spool.fileno(), mask_end + named, offset)
            yield Sample(
                index=index, token_ids=array("i", data[:tokens]).tolist(),
                loss_mask=data[tokens:mask_end] if masked else None, record_id=data[mask_end:].decode() or None,
            )  # fmt: skip

    def records(self) -> Iterator[tuple[int, str | None]]:
        """Yield (index, record_id) of each sample, without a look at its tokens."""
        width = array("i").itemsize
        for index, offset, length, masked, named in self._places():
            name = os.pread(self._spool.fileno(), named, offset + length * width + masked) if named else b""
            yield index, name.decode() or None

    def _places(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield (index, offset in the spool, tokens, bytes of the mask, bytes of the name) of each.

        The spool is read at these offsets and never sought: several iterators, and threads, may be at work.
        """
        self._spool.flush()
        width, offset = array("i").itemsize, 0
        for index, length, is_masked, named in zip(
            self._indexes, self._lengths, self._masked, self._named, strict=True
        ):
            masked = length if is_masked else 0
            yield index, offset, length, masked, named
            offset += length * width + masked + named

    @property
    def indexes(self) -> Sequence[int]:
        return self._indexes

    def share(self, shard: Shard) -> Samples:
        """Return the samples of one host of several."""
        if shard == WHOLE:
            return self
        mine = Samples()
        for sample in self:
            if is_mine(sample.index, shard):
                mine.add(sample)
        return mine

    def histogram(self) -> list[dict[str, int | None]]:
        """Return the counts of lengths, `{"up_to": tokens, "samples": n}`; the last bin's edge is None."""
        edges: list[int | None] = [*HISTOGRAM_EDGES, None]
        counts = [0] * len(edges)
        for length in self._lengths:
            counts[next((i for i, edge in enumerate(HISTOGRAM_EDGES) if length <= edge), -1)] += 1
        return [{"up_to": edge, "samples": count} for edge, count in zip(edges, counts, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """All samples of a data set, and how they came about."""

    samples: Samples
    container: str  # see `records.Source`
    kinds: dict[str, int]  # records read as "tokens" and as "chat"
    methods: dict[str, int]  # chats by how their loss mask was told, see `render`
    indexes: int  # taken by samples and skipped records
    unmasked: int  # samples without a loss mask: every token of theirs counts
    blank: Faults  # lines of what was read that are no records


def read_samples(
    path: str,
    kind: str,
    *,
    max_samples: int | None,
    max_seq_len: int,
    over_long: str = "truncate",
    vocabulary: int | None,
    tokenizer: Callable[[], Any],
    skip: Callable[[Skip], None],
) -> DataSet:
    """Read the first `max_samples` valid samples of a data set; `skip` is told of every other record read.

    Samples of more than `max_seq_len` tokens are cut and reported as `truncated`, or skipped as `over-long`.
    `tokenizer` is called once, at the first chat. Raises ConfigError for a data set that cannot be read, if not one
    sample is valid, or if no token of any sample counts.
    """
    for name, value, known in (("kind", kind, KINDS), ("over_long", over_long, OVER_LONG)):
        if value not in known:
            raise ConfigError(f"data.{name} is one of {', '.join(known)}, not {value!r}")
    reader = _Reader(
        kind=kind, max_samples=max_samples, max_seq_len=max_seq_len, cut=over_long == "truncate",
        vocabulary=vocabulary, renderer=ChatRenderer(tokenizer), skip=skip,
    )  # fmt: skip
    return reader.read(path, open_source(path))


class _Reader:
    """Gives every record its indexes, and every sample its checks."""

    def __init__(
        self, *, kind: str, max_samples: int | None, max_seq_len: int, cut: bool, vocabulary: int | None,
        renderer: ChatRenderer, skip: Callable[[Skip], None],
    ) -> None:  # fmt: skip
        self._kind, self._limit, self._length, self._cut = kind, max_samples, max_seq_len, cut
        self._vocabulary, self._renderer, self._skip = vocabulary, renderer, skip
        self._samples = Samples()
        self._index = 0
        self._kinds = {"tokens": 0, "chat": 0}
        self._counted = self._unmasked = 0

    def read(self, path: str, source: Source) -> DataSet:
        for record in source.records():
            if self._full():
                break
            named = _Named(line=record.line, record_id=_record_id(record.value))
            try:
                if isinstance(record.value, Malformed):
                    raise record.value
                pieces = self._pieces(record.value)
            except Malformed as reason:
                self._refuse(named, reason)
                continue
            if len(pieces) > 1:
                self._note(named, "split", f"the template alters earlier turns: {len(pieces):,} samples")
            for piece in pieces:
                if self._full():
                    break
                self._take(named, piece)
        if not len(self._samples):
            raise ConfigError(f"{path} gives not one sample: {self._index:,} records read, all were skipped")
        if not self._counted and not self._unmasked:
            raise ConfigError(
                f"no token of {path} counts: the loss mask of all {len(self._samples):,} samples is zero throughout"
            )
        return DataSet(
            samples=self._samples, container=source.container,
            kinds={kind: count for kind, count in self._kinds.items() if count},
            methods=dict(self._renderer.methods), indexes=self._index, unmasked=self._unmasked,
            blank=source.blank,
        )  # fmt: skip

    def _full(self) -> bool:
        return self._limit is not None and len(self._samples) >= self._limit

    def _refuse(self, named: _Named, reason: Malformed) -> None:
        self._note(named, reason.code, reason.why)
        self._index += 1

    def _note(self, named: _Named, code: str, why: str) -> None:
        self._skip(Skip(index=self._index, line=named.line, code=code, why=why, record_id=named.record_id))

    def _pieces(self, record: dict[str, Any]) -> list[Rendered | _Tokens]:
        if fault := record_fault(record, self._kind):
            raise Malformed(*fault)
        if self._kind != "chat" and record.get("input_ids") is not None:
            tokens = _token_record(record)
            self._kinds["tokens"] += 1
            return [tokens]
        pieces: list[Rendered | _Tokens] = list(self._renderer.render(read_chat(record)))
        self._kinds["chat"] += 1
        return pieces

    def _take(self, named: _Named, piece: Rendered | _Tokens) -> None:
        ids, mask = piece.token_ids, piece.mask
        try:
            _check_ids(ids, mask, self._vocabulary)
            if len(ids) > self._length and not self._cut:
                raise Malformed("over-long", f"{len(ids):,} tokens are more than {self._length:,}")
        except Malformed as reason:
            self._refuse(named, reason)
            return
        if len(ids) > self._length:
            self._note(named, "truncated", f"{len(ids):,} tokens cut to {self._length:,}")
            ids, mask = ids[: self._length], mask[: self._length] if mask is not None else None
        if mask is None:
            self._unmasked += 1
        elif 1 not in mask:
            self._note(named, "no-loss", "no token of it counts: the assistant says nothing within its length")
        self._counted += mask.count(1) if mask is not None else 0
        self._samples.add(Sample(index=self._index, token_ids=ids, loss_mask=mask, record_id=named.record_id))
        self._index += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    token_ids: list[int]
    mask: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    """By what a person finds a record again."""

    line: int
    record_id: str | None


def _record_id(record: dict[str, Any] | Malformed) -> str | None:
    """Return the record's own name: the first that a file could carry, None if it has none."""
    if isinstance(record, Malformed):
        return None
    names = (str(record[key]) for key in RECORD_IDS if type(record.get(key)) in (str, int))  # a bool is no name
    return next((name for name in names if _is_name(name)), None)


def _is_name(text: str) -> bool:
    return 0 < len(text.encode("utf-8", "surrogatepass")) <= RECORD_ID_BYTES and text.isprintable()


def _token_record(record: dict[str, Any]) -> _Tokens:
    ids, mask = record["input_ids"], record.get("loss_mask")
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise Malformed("malformed", "input_ids is not a list of integers")
    if mask is None:
        return _Tokens(token_ids=ids, mask=None)
    if not isinstance(mask, list) or len(mask) != len(ids) or not all(value in (0, 1) for value in mask):
        raise Malformed("malformed", "loss_mask is not a list of as many 0 and 1 as there are input_ids")
    return _Tokens(token_ids=ids, mask=bytes(map(int, mask)))


def _check_ids(ids: list[int], mask: bytes | None, vocabulary: int | None) -> None:
    if not ids:
        raise Malformed("empty", "no token in it")
    if min(ids) < 0 or max(ids) >= (vocabulary or 1 << 31):
        raise Malformed("malformed", f"token id {min(ids) if min(ids) < 0 else max(ids)} is outside 0..{vocabulary}")
    if mask is not None and len(mask) != len(ids):
        raise Malformed("template", f"the template's mask has {len(mask):,} entries for {len(ids):,} tokens")

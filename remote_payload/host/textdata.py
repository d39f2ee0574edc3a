"""Whether a text file is a JSONL data set or one JSON document, by its contents, and what its records are.

Preflight and the job must answer alike, so both ask here.
"""

from __future__ import annotations

import json
from typing import Any, BinaryIO, Dict, Iterator, List, NamedTuple, Optional, Union

LINE_LIMIT = 64 << 20
"""Bytes of one line. 64 MiB of JSON is about ten million tokens: a file without line ends, not a record."""

RECORD_KEYS = frozenset({"input_ids", "messages", "conversations"})
"""One of these makes an object a record."""

BOM = b"\xef\xbb\xbf"

_START = 1 << 12

FIRST_BYTES = 1 << 24
"""The first records of a data set are looked for up to here."""

FIRST_RECORDS = 100

RECORD_OF = {"tokens": ("input_ids",), "chat": ("messages", "conversations")}
"""One of these has a value in a record of a kind."""

_DECODER = json.JSONDecoder()


class Fault(NamedTuple):
    """Why a line gives no record. `code` is stable, `why` is for a person, and speaks of the line's own columns."""

    code: str
    why: str


def parse_record(line: bytes) -> Union[Dict[str, Any], Fault]:
    """Return the object on a line of a JSONL file, or why there is none (`malformed`, `encoding`)."""
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return Fault("encoding", "not UTF-8: byte %d is 0x%02x" % (error.start, line[error.start]))
    text = text.rstrip("\r\n")  # else what is missing at the end would be missing on a second line
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Fault("malformed", "not JSON: %s of the line" % json_error(error, text))
    return record if isinstance(record, dict) else Fault("malformed", "not a JSON object")


def record_fault(record: Dict[str, Any], kind: str) -> Optional[Fault]:
    """Return why an object is no record of a kind ("tokens", "chat", or "auto" for either), None if it is one."""
    wanted = [keys for name, keys in RECORD_OF.items() if kind in (name, "auto")]
    if any(record.get(key) is not None for keys in wanted for key in keys):
        return None
    names = [key for keys in wanted for key in keys]
    return Fault("malformed", "no %s in it" % " or ".join(filter(None, (", ".join(names[:-1]), names[-1]))))


def json_error(error: Exception, text: str) -> str:
    """Return what json said of a text, and where in it: the lines that it counts are not those of the file."""
    if isinstance(error, RecursionError):
        return "nested too deeply, at some place"
    if not isinstance(error, json.JSONDecodeError):  # a number of thousands of digits
        return "%s, at some place" % str(error).partition(":")[0]
    ends = ", the end," if error.pos >= len(text) else ""
    said = error.msg[:-3] if error.msg.endswith(" at") else error.msg  # "Unterminated string starting at"
    return "%s at column %d%s" % (said, error.pos + 1, ends)


def text_container(path: str) -> str:
    """Return "jsonl", or "json" for an array or an object with an array in it. Raises OSError."""
    with open(path, "rb") as file:
        start = _shorn(file.read(_START))
    is_document = (start.startswith(b"[") and not _is_array_line(start)) or (
        start.startswith(b"{") and _is_object_of_records(path)
    )
    return "json" if is_document else "jsonl"


def lists_of_records(document: Dict[str, Any]) -> List[str]:
    """Return the keys of an object's lists of objects."""
    return [
        key for key, value in document.items() if isinstance(value, list) and value and isinstance(value[0], dict)
    ]


def first_records(file: BinaryIO, container: str) -> Iterator[Any]:
    """Yield what the first FIRST_RECORDS lines that are not empty hold, None for one that is no JSON.

    Of a document its first record alone, as far as FIRST_BYTES hold it whole.
    """
    if container == "json":
        yield _first_of_document(_shorn(file.read(FIRST_BYTES)).decode("utf-8", "ignore"))
        return
    count = read = 0
    while count < FIRST_RECORDS and read < FIRST_BYTES:
        line = file.readline(FIRST_BYTES)
        if not line:
            return
        read += len(line)
        line = line[len(BOM) :] if line.startswith(BOM) else line
        if line.strip():
            count += 1
            yield _loaded(line)


def _shorn(start: bytes) -> bytes:
    return (start[len(BOM) :] if start.startswith(BOM) else start).lstrip()


def _loaded(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _is_array_line(start: bytes) -> bool:
    """Tell whether a file's first line is an array by itself, with other lines after it: no data set, but JSONL."""
    line, _, rest = start.partition(b"\n")
    return isinstance(_loaded(line), list) and bool(rest.strip())  # None: it goes on beyond what was read


def _is_object_of_records(path: str) -> bool:
    """Tell whether a file that begins with an object is that object, as in {"data": [...]}, on one line or on many.

    Not a JSONL file of one record: it has a record's keys. Not one whose first line is damaged: others follow, or
    its name says that it is no JSON document.
    """
    with open(path, "rb") as file:
        line = file.readline(LINE_LIMIT + 1)
        while line and not line.strip():
            line = file.readline(LINE_LIMIT + 1)
        more = any(chunk.strip() for chunk in iter(lambda: file.read(1 << 16), b""))
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):  # begun on this line and not ended, as a document that is indented
        return path.endswith(".json")
    return not more and isinstance(value, dict) and not RECORD_KEYS & value.keys() and bool(lists_of_records(value))


def _first_of_document(text: str) -> Any:
    """Return the first element of an array, or of the first array of objects in an object; None if there is none."""
    try:
        if text.startswith("["):
            return _DECODER.raw_decode(text, _solid(text, 1))[0]
        place = 1
        while True:
            _, place = _DECODER.raw_decode(text, _solid(text, place))  # a key
            place = _solid(text, _solid(text, place) + 1)  # what follows the colon
            if text.startswith("[", place) and text.startswith("{", _solid(text, place + 1)):
                return _DECODER.raw_decode(text, _solid(text, place + 1))[0]
            _, place = _DECODER.raw_decode(text, place)
            place = _solid(text, place) + 1  # the comma
    except (ValueError, RecursionError):  # it ended, or what is read of it did
        return None


def _solid(text: str, place: int) -> int:
    while place < len(text) and text[place] in " \t\r\n":
        place += 1
    return place

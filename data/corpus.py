"""Domain text → documents: read, checked, mixed, rid of duplicates, and split into training and held-out ones.

Documents lie on disk (spool.py); memory holds their hashes only, so that a corpus may be of any length.
"""

import json
import math
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from headwright.configs import UserError
from headwright.configs.console import say
from headwright.configs.schema import CorpusConfig, Source
from headwright.data.chat import Encoded, Renderer, clean
from headwright.data.demo import check_demo
from headwright.data.sources import Malformed, Row, matching, source_rows
from headwright.data.spool import Spool, View

ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant", "model": "assistant"}
KNOWN_ROLES = {"system", "developer", "user", "assistant", "tool", "function", "ipython"}
REASONING = ("reasoning_content", "reasoning", "thinking")
PIECE = 2000  # characters of plain text per document, at most
SHINGLE = 5  # words in a row, for near-duplicates
SHOWN = 5  # skipped rows that are printed; all of them are listed


@dataclass(frozen=True)
class Document:
    """One chat (messages), one piece of plain text (text), or given tokens (ids and mask), and where it came from."""

    key: str
    source: str
    place: str
    samples: int
    messages: tuple[dict[str, Any], ...] = ()
    text: str = ""
    words: int = 0
    tools: list[Any] | None = None
    ids: tuple[int, ...] = ()
    mask: tuple[bool, ...] = ()
    version: int = 0  # which of several answers to the prompt it holds, where `headwright regenerate` wrote them

    def opening(self) -> str:
        """Plain text: its first `words` words, spaced as they are."""
        words = list(re.finditer(r"\S+", self.text))
        return self.text[: words[min(self.words, len(words)) - 1].end()]

    @property
    def rounds(self) -> list[list[dict[str, Any]]]:
        """What stands before each answer that the target is to give: the turns since its last one.

        An assistant's tool calls are kept as they are, since the tools' replies that follow belong to them.
        """
        found: list[list[dict[str, Any]]] = []
        waiting: list[dict[str, Any]] = []
        asked = False
        for turn in self.messages:
            asked = asked or turn["role"] == "user"
            if turn["role"] != "assistant" or turn.get("tool_calls") or not asked:
                waiting.append(turn)
            elif waiting:
                found.append(waiting)
                waiting = []
        open_end = waiting and waiting[-1]["role"] not in ("system", "developer", "assistant")
        return [*found, waiting] if open_end else found

    @property
    def prompt(self) -> list[dict[str, Any]]:
        """The turns before the first answer."""
        return self.rounds[0] if self.rounds else []

    @property
    def words_of(self) -> list[str]:
        """All its words."""
        return (self.text or " ".join(turn["content"] for turn in self.messages)).split()


def decode_document(raw: dict[str, Any]) -> Document:
    """A document out of the spool."""
    tuples = {key: tuple(raw[key]) for key in ("messages", "ids", "mask")}
    return Document(**(raw | tuples))


@dataclass
class Skipped:
    """What was left out and why: counted, the first few shown, every one kept with its place."""

    strict: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    rows: Spool[list[str]] | None = None

    def add(self, what: str, place: str, why: str) -> None:
        """Note one. Raises UserError if the user wants none skipped."""
        if self.strict:
            raise UserError(f"{place}: {why} (corpus.strict)")
        self.counts[what] += 1
        if self.counts[what] <= SHOWN:
            say(f"skipped {place}: {why}")
        if self.rows is not None:
            self.rows.append([place, what, why])

    def lines(self) -> Iterator[str]:
        """skipped.jsonl, line by line."""
        for place, what, why in self.rows or ():
            yield json.dumps({"place": place, "what": what, "why": why}) + "\n"

    def __str__(self) -> str:
        return ", ".join(f"{count} {what}" for what, count in self.counts.items()) or "nothing was skipped"


@dataclass
class Corpus:
    """Documents, split by their own hash."""

    train: View[Document]
    held_out: View[Document]
    everything: View[Document]
    skipped: Skipped


def read_corpus(config: CorpusConfig, seed: int, folder: Path | None = None) -> Corpus:
    """All sources, duplicates dropped, mixed by weight, split into training and held-out documents.

    A document's side depends on its first user turn and the seed alone, so that no prompt is ever on both, whatever
    source it comes from. `folder` is where the documents lie meanwhile. Raises UserError for an empty corpus.
    """
    check_sources(config.sources)
    skipped = Skipped(config.strict, rows=Spool(folder, list, list))
    spool: Spool[Document] = Spool(folder, vars, decode_document)
    ranks, owners = array("d"), array("H")  # the hash that splits; which source
    unique = make_filter(config.near_duplicates, skipped)
    for number, source in enumerate(config.sources):
        empty = True
        for document in limited(read_source(source, config.system, skipped, seed), source.limit, seed, folder):
            empty = False
            if unique(document):
                spool.append(document)
                ranks.append(rank_of(document.key, seed))
                owners.append(number)
        if empty:
            raise UserError(f"corpus source {label(source)}: no usable document in it ({skipped})")
    chosen = weighted(config.sources, spool, np.array(owners, dtype=np.int64), seed)
    train = View(spool, [number for number in chosen if ranks[number] >= config.held_out])
    held_out = View(spool, [number for number in chosen if ranks[number] < config.held_out])
    if not train:
        raise UserError("corpus: every document was held out; lower corpus.held_out or add text")
    if not held_out:
        raise UserError(
            "corpus: no document was held out, so nothing could be measured; raise corpus.held_out or add text"
        )
    return Corpus(train, held_out, View(spool, chosen), skipped)


def check_sources(sources: Sequence[Source]) -> None:
    """What can be known of the sources without reading them or a network."""
    if not sources:
        raise UserError("corpus.sources is empty: name at least one demo set, path or hub data set")
    for source in sources:
        if source.path:
            matching(source.path)
        if source.demo:
            check_demo(source.demo)
        if source.streaming and not source.limit:
            raise UserError(f"corpus source {label(source)}: streaming needs a limit: how many rows are to be read?")


def rank_of(key: str, seed: int) -> float:
    """A fixed number in [0, 1) for a document."""
    return xxhash.xxh64_intdigest(key.encode(), seed=seed) / 2**64


def limited(
    documents: Iterator[Document], limit: int | None, seed: int, folder: Path | None = None
) -> Iterator[Document]:
    """At most `limit` documents: the lowest hashes, in the source's order."""
    if limit is None:
        yield from documents
        return
    spool: Spool[Document] = Spool(folder, vars, decode_document)
    ranks: dict[str, float] = {}
    for document in documents:
        spool.append(document)
        ranks.setdefault(document.key, rank_of(document.key, seed + 1))
    chosen = set(sorted(ranks, key=ranks.__getitem__)[:limit])
    for document in spool:
        if document.key in chosen:
            yield document


def weighted(sources: Sequence[Source], spool: Spool[Document], owners: np.ndarray, seed: int) -> list[int]:
    """Numbers of the documents that stay when the weighted sources are cut to their shares, lowest hashes first.

    Not the hash that splits: that one would keep the held-out documents.
    """
    counts = np.bincount(owners, minlength=len(sources))
    weights = {number: source.weight for number, source in enumerate(sources) if source.weight}
    scale = min((counts[number] / weight for number, weight in weights.items() if counts[number]), default=0.0)
    stays = np.ones(len(owners), dtype=bool)
    for number, weight in weights.items():
        mine = np.flatnonzero(owners == number)
        keep = max(1, round(weight * scale)) if len(mine) else 0
        if keep < len(mine):
            ranks = np.array([rank_of(spool[int(index)].key, seed + 1) for index in mine])
            stays[mine[np.argsort(ranks, kind="stable")[keep:]]] = False
    return np.flatnonzero(stays).tolist()


def make_filter(threshold: float | None, skipped: Skipped) -> Any:
    """A function that says whether a document is new. Exact duplicates have the same prompt; near ones share its words."""
    seen: set[int] = set()
    near = near_filter(threshold) if threshold else None

    def unique(document: Document) -> bool:
        number = xxhash.xxh64_intdigest(document.key.encode(), seed=document.version & 0xFFFFFFFF)
        if number in seen:
            skipped.counts["duplicates"] += 1
            return False
        seen.add(number)
        if near is not None and not near(document):
            skipped.counts["near-duplicates"] += 1
            return False
        return True

    return unique


def near_filter(threshold: float) -> Any:
    """MinHash with locality-sensitive hashing over runs of five words (datasketch)."""
    try:
        from datasketch import MinHash, MinHashLSH
    except ImportError:
        raise UserError("corpus.near_duplicates needs a package: pip install datasketch") from None
    index = MinHashLSH(threshold=threshold, num_perm=128)

    def unique(document: Document) -> bool:
        words = document.words_of or [str(token) for token in document.ids]
        runs = {" ".join(words[start : start + SHINGLE]) for start in range(max(1, len(words) - SHINGLE + 1))}
        sketch = MinHash(num_perm=128, seed=1)
        sketch.update_batch([run.encode("utf-8", "replace") for run in runs])
        if index.query(sketch):
            return False
        index.insert(f"{document.key}:{document.version}", sketch)
        return True

    return unique


def label(source: Source) -> str:
    """The source's name in tables: its own, or a file's without its endings, or the folder's where many are named."""
    path = Path(str(source.path))
    if any(mark in path.name for mark in "*?["):
        path = path.parent
    return source.name or source.demo or source.hub or path.name.split(".")[0] or "files"


def general_sources(corpus: CorpusConfig) -> set[str]:
    """The names of those that are general text, which a domain's head must not forget."""
    return {label(source) for source in corpus.sources if source.general}


def read_source(source: Source, system: str | None, skipped: Skipped, seed: int = 0) -> Iterator[Document]:
    """The usable documents of one source; malformed rows are reported with their place and counted."""
    for place, row in pieces(source_rows(source, seed)):
        try:
            yield make_document(row, source, place, system)
        except ValueError as error:
            skipped.add("malformed rows", place, str(error))


def pieces(rows: Iterator[Row]) -> Iterator[Row]:
    """Long texts cut into parts of about equal length, at white space; everything else as it is."""
    for place, row in rows:
        text = row.get("text") if isinstance(row, dict) else None
        if not isinstance(text, str) or len(text) <= PIECE or row.get("messages"):
            yield place, row
            continue
        size = math.ceil(len(text) / math.ceil(len(text) / (PIECE - 100)))
        start = 0
        while start < len(text):
            gap = re.compile(r"\s").search(text, start + size, start + size + 100)
            end = gap.start() if gap else start + size
            yield f"{place}@{start}", {"text": text[start:end]}
            start = end


def make_document(row: Any, source: Source, place: str, system: str | None) -> Document:
    """A row in any of the known forms. Raises ValueError with what is wrong."""
    if isinstance(row, Malformed):
        raise row
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    row = {key: value for key, value in row.items() if value is not None and value != ""}  # tables fill all columns
    if "input_ids" in row:
        return make_tokens(row, source, place)
    if "text" in row and not row.get("messages"):
        return make_text(row["text"], source, place)
    messages = read_messages(row)
    if system and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": system})
    first = next((turn["content"] for turn in messages if turn["role"] == "user"), None)
    if first is None:
        raise ValueError("no user turn")
    tools = row.get("tools")
    check_json([messages, tools])
    return Document(
        hash_of(" ".join(first.split())),
        label(source),
        place,
        source.samples,
        tuple(messages),
        tools=tools if isinstance(tools, list) and tools else None,
        version=row["sample"] if type(row.get("sample")) is int else 0,
    )


def check_json(value: Any) -> None:
    """What is to be kept must be text that a tokenizer takes."""
    try:
        clean(json.dumps(value, ensure_ascii=False))
    except UnicodeEncodeError:
        raise ValueError("a lone surrogate: half of a character that no tokenizer takes") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except TypeError as error:
        raise ValueError(f"a value that is no text: {error}") from None


def make_text(text: Any, source: Source, place: str) -> Document:
    """A piece of plain text."""
    if not isinstance(text, str) or len(text.split()) < 2 * source.words:
        raise ValueError("text is missing or shorter than two prompts")
    return Document(hash_of(clean(text)), label(source), place, source.samples, text=text, words=source.words)


def make_tokens(row: dict[str, Any], source: Source, place: str) -> Document:
    """Tokens and mask as they are given."""
    ids, mask = row["input_ids"], next((row[key] for key in ("loss_mask", "mask", "labels_mask") if key in row), None)
    if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError("input_ids is not a list of token ids")
    if not isinstance(mask, list) or len(mask) != len(ids) or not all(on in (0, 1) for on in mask):
        raise ValueError(f"loss_mask is not a list of {len(ids)} zeros and ones, one for each of input_ids")
    if not any(mask) or mask[0]:
        raise ValueError("loss_mask leaves nothing to learn, or learns the first token, which has no prompt")
    prompt = ids[: mask.index(1)]
    return Document(
        hash_of(str(prompt)), label(source), place, source.samples, ids=tuple(ids), mask=tuple(map(bool, mask))
    )


def hash_of(text: str) -> str:
    """A document's key."""
    return xxhash.xxh64_hexdigest(text.encode("utf-8", "replace"))


def read_messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    """`messages` (role, content), `conversations` (from, value), `prompt` with `response`, or `turns` (all the user's)."""
    if "messages" in row or "conversations" in row:
        turns = row.get("messages") or row.get("conversations")
        if not isinstance(turns, list) or not turns:
            raise ValueError("messages is empty")
        return [read_turn(turn) for turn in turns]
    several = row.get("turns")
    if isinstance(several, list) and several and all(isinstance(turn, str) and turn.strip() for turn in several):
        return [{"role": "user", "content": turn} for turn in several]
    asked = row.get("prompt") or row.get("question")
    answer = row.get("response") or row.get("completion") or row.get("answer")
    if not isinstance(asked, str) or not asked.strip():
        raise ValueError(
            f"no messages, conversations, prompt, turns or text among the keys {sorted(map(str, row))[:8]}"
        )
    turns = [{"role": "user", "content": asked}]
    return [*turns, {"role": "assistant", "content": answer}] if isinstance(answer, str) else turns


def read_turn(turn: Any) -> dict[str, Any]:
    """One message with the standard keys: role, content, and where present reasoning_content, tool_calls, name."""
    if not isinstance(turn, dict):
        raise ValueError("a message is not an object")
    role = turn.get("role") or turn.get("from")
    if not isinstance(role, str):
        raise ValueError("a message lacks role or content")
    role = ROLES.get(role, role)
    if role not in KNOWN_ROLES:
        raise ValueError(f"unknown role {role[:40]!r}: expected one of {', '.join(sorted(KNOWN_ROLES))}")
    calls = turn.get("tool_calls") or None
    content = turn.get("content") if turn.get("content") is not None else turn.get("value")
    thoughts = next((turn[key] for key in REASONING if isinstance(turn.get(key), str) and turn[key].strip()), None)
    if isinstance(content, list):
        content, thoughts = read_parts(content, thoughts)
    if content is None and role == "assistant" and (calls or thoughts):
        content = ""
    if not isinstance(content, str):
        raise ValueError("a message lacks role or content")
    if role == "user" and not content.strip():
        raise ValueError("a user's message is empty")
    read = {"role": role, "content": content}
    extras = {
        "reasoning_content": thoughts if role == "assistant" else None,
        "tool_calls": read_calls(calls) if role == "assistant" and calls else None,
        "name": turn.get("name"),
        "tool_call_id": turn.get("tool_call_id"),
    }
    return read | {key: value for key, value in extras.items() if value is not None}


def read_parts(parts: list[Any], thoughts: str | None) -> tuple[str, str | None]:
    """Content given as typed parts: its text, and its reasoning."""
    words: list[str] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        keys = ("text", "thinking", "reasoning")
        said = next((part[key] for key in keys if part.get(key) is not None), None) if kind else None
        if kind not in keys or not isinstance(said, str):
            raise ValueError(f"a content part of type {str(kind)[:40]!r}: only text and reasoning are read")
        if kind == "text":
            words.append(said)
        else:
            thoughts = said if thoughts is None else thoughts + said
    return "".join(words), thoughts


def read_calls(calls: Any) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects, which is what chat templates expect; servers send them as text."""
    if not isinstance(calls, list):
        raise ValueError("tool_calls is not a list")
    read = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("a tool call has no function name")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                raise ValueError("a tool call's arguments are not JSON") from None
        named = {"name": function["name"], "arguments": arguments}
        read.append({"type": "function", "function": named} | ({"id": call["id"]} if call.get("id") else {}))
    return read


def encode_prompt(document: Document, renderer: Renderer) -> list[int]:
    """The ids after which the target answers: turns and generation prompt, or the beginning of a text."""
    if document.ids:
        return list(document.ids[: document.mask.index(True)])
    if document.text:
        return renderer.tokenizer(clean(document.opening()))["input_ids"]
    if not any(turn["role"] == "user" for turn in document.prompt):
        raise ValueError("the assistant speaks first: there is no prompt")
    return renderer.prompt_ids(document.prompt, document.tools)


def encode_document(document: Document, renderer: Renderer) -> Encoded:
    """The document as it stands, for training on the corpus's own answers.

    Raises ValueError where there is nothing to learn or the mask cannot be trusted.
    """
    if document.ids:
        return Encoded(list(document.ids), list(document.mask))
    if document.text:
        ids = renderer.tokenizer(clean(document.text))["input_ids"]
        return Encoded(ids, [index > 0 for index in range(len(ids))])
    return renderer.encode(document.messages, document.tools)

"""Domain text → documents → token ids and the mask of what the head learns.

Masks come from the tokenizer's own chat template, rendered turn by turn, and from token offsets: no regular expressions
and no knowledge of any template. T tokens of one document.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import xxhash

from headwright.configs import UserError, reason
from headwright.configs.console import say
from headwright.configs.schema import CorpusConfig, Source
from headwright.data.demo import check_demo, demo_rows

ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant"}
PIECE = 2000  # characters of plain text per document, at most
PROBE = "\ue000"  # private use: no text holds it


@dataclass(frozen=True)
class Document:
    """One chat (messages) or one piece of plain text (text), and where it came from."""

    key: str
    source: str
    place: str
    samples: int
    messages: tuple[dict[str, Any], ...] = ()
    text: str = ""
    words: int = 0

    def opening(self) -> str:
        """Plain text: its first `words` words, spaced as they are."""
        words = list(re.finditer(r"\S+", self.text))
        return self.text[: words[min(self.words, len(words)) - 1].end()]

    @property
    def prompt(self) -> list[dict[str, Any]]:
        """The turns before the first answer."""
        turns = list(self.messages)
        ends = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
        return turns[: ends[0]] if ends else turns


@dataclass
class Encoded:
    """Token ids of a document, and which of them the head learns to predict."""

    ids: list[int]
    mask: list[bool]


@dataclass
class Corpus:
    """Documents, split by their own hash."""

    train: list[Document]
    held_out: list[Document]
    skipped: Counter[str]


def read_corpus(config: CorpusConfig, seed: int) -> Corpus:
    """All sources, duplicates dropped, split into training and held-out documents.

    A document's side depends on its first user turn and the seed alone, so that no prompt is ever on both, whatever
    source it comes from. Raises UserError for an empty corpus.
    """
    check_sources(config.sources)
    corpus = Corpus([], [], Counter())
    seen: set[str] = set()
    for source in config.sources:
        documents = limited(list(read_source(source, config.system, corpus.skipped)), source.limit, seed)
        if not documents:
            raise UserError(f"corpus source {label(source)}: no usable document in it ({describe(corpus.skipped)})")
        for document in documents:
            if document.key in seen:
                corpus.skipped["duplicates"] += 1
                continue
            seen.add(document.key)
            side = corpus.held_out if rank_of(document.key, seed) < config.held_out else corpus.train
            side.append(document)
    if not corpus.train:
        raise UserError("corpus: every document was held out; lower corpus.held_out or add text")
    if not corpus.held_out:
        raise UserError(
            "corpus: no document was held out, so nothing could be measured; raise corpus.held_out or add text"
        )
    return corpus


def check_sources(sources: Sequence[Source]) -> None:
    """What can be known of the sources without reading them or a network."""
    if not sources:
        raise UserError("corpus.sources is empty: name at least one demo set, path or hub data set")
    for source in sources:
        if source.path:
            check_path(Path(source.path).expanduser())
        if source.demo:
            check_demo(source.demo)


def describe(skipped: Counter[str]) -> str:
    """What was left out, in words."""
    return ", ".join(f"{count} {what}" for what, count in skipped.items()) or "nothing was skipped"


def rank_of(key: str, seed: int) -> float:
    """A fixed number in [0, 1) for a document."""
    return xxhash.xxh64_intdigest(key.encode(), seed=seed) / 2**64


def limited(documents: list[Document], limit: int | None, seed: int) -> list[Document]:
    """At most `limit` documents: the lowest hashes, in the source's order."""
    if limit is None or len(documents) <= limit:
        return documents
    chosen = set(sorted((d.key for d in documents), key=lambda key: rank_of(key, seed + 1))[:limit])
    return [document for document in documents if document.key in chosen]


def label(source: Source) -> str:
    """The source's name in tables."""
    return source.name or source.demo or source.hub or Path(str(source.path)).stem


def read_source(source: Source, system: str | None, skipped: Counter[str]) -> Iterator[Document]:
    """The usable documents of one source; malformed rows are reported with their place and counted."""
    for place, row in pieces(source_rows(source)):
        try:
            yield make_document(row, source, place, system)
        except ValueError as error:
            skipped["malformed rows"] += 1
            if skipped["malformed rows"] <= 5:
                say(f"skipped {place}: {error}")


def pieces(rows: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Long texts cut into parts of about equal length, at white space; everything else as it is."""
    for place, row in rows:
        text = row.get("text") if isinstance(row, dict) else None
        if not isinstance(text, str) or len(text) <= PIECE or "messages" in row:
            yield place, row
            continue
        size = math.ceil(len(text) / math.ceil(len(text) / (PIECE - 100)))
        start = 0
        while start < len(text):
            gap = re.compile(r"\s").search(text, start + size, start + size + 100)
            end = gap.start() if gap else start + size
            yield f"{place}@{start}", {"text": text[start:end]}
            start = end


def source_rows(source: Source) -> Iterator[tuple[str, Any]]:
    """(place, row) of a source."""
    if source.demo:
        return demo_rows(source.demo)
    return file_rows(Path(source.path).expanduser()) if source.path else hub_rows(source)


def check_path(path: Path) -> None:
    """A local source must exist and be of a kind that is read."""
    if not path.is_file():
        raise UserError(f"corpus path {path}: no such file")
    if path.suffix not in (".jsonl", ".txt"):
        raise UserError(f"corpus path {path}: expected .jsonl (chats) or .txt (plain text)")


def file_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Rows of a .jsonl file, or pieces of a .txt file."""
    if path.suffix == ".txt":
        yield str(path), {"text": path.read_text(encoding="utf-8-sig", errors="replace")}
        return
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield f"{path}:{number}", parse_line(line)


def parse_line(line: str) -> Any:
    """A JSON value, or None: the row is then reported as malformed where it is used."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def hub_rows(source: Source) -> Iterator[tuple[str, Any]]:
    """Rows of a hub data set, through `datasets`."""
    import datasets

    try:
        rows = datasets.load_dataset(source.hub, source.config, split=source.split, revision=source.revision)
    except Exception as error:  # datasets raises many kinds: no network, no such set, a gated one
        raise UserError(f"corpus hub {source.hub}: {reason(error)}") from None
    for number, row in enumerate(rows):
        yield f"{source.hub}[{number}]", row


def make_document(row: Any, source: Source, place: str, system: str | None) -> Document:
    """A row in any of the known forms. Raises ValueError with what is wrong."""
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    if "text" in row and "messages" not in row:
        text = row["text"]
        if not isinstance(text, str) or len(text.split()) < 2 * source.words:
            raise ValueError("text is missing or shorter than two prompts")
        key = xxhash.xxh64_hexdigest(text.encode("utf-8", "replace"))
        return Document(key, label(source), place, source.samples, text=text, words=source.words)
    messages = read_messages(row)
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    first = next((turn["content"] for turn in messages if turn["role"] == "user"), None)
    if first is None:
        raise ValueError("no user turn")
    key = xxhash.xxh64_hexdigest(" ".join(first.split()).encode("utf-8", "replace"))
    return Document(key, label(source), place, source.samples, tuple(messages))


def read_messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    """`messages` (role, content), `conversations` (from, value), `prompt` with `response`, or `turns`."""
    if "messages" in row or "conversations" in row:
        turns = row.get("messages") or row.get("conversations")
        if not isinstance(turns, list) or not turns:
            raise ValueError("messages is empty")
        return [read_turn(turn) for turn in turns]
    several = row.get("turns")
    first = several[0] if isinstance(several, list) and several else None
    asked = row.get("prompt") or row.get("question") or first
    answer = row.get("response") or row.get("completion") or row.get("answer")
    if not isinstance(asked, str) or not asked.strip():
        raise ValueError(f"no messages, conversations, prompt, turns or text among the keys {sorted(row)[:8]}")
    turns = [{"role": "user", "content": asked}]
    return [*turns, {"role": "assistant", "content": answer}] if isinstance(answer, str) else turns


def read_turn(turn: Any) -> dict[str, Any]:
    """One message with the standard keys."""
    if not isinstance(turn, dict):
        raise ValueError("a message is not an object")
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError("a message lacks role or content")
    return {"role": ROLES.get(role, role), "content": content}


def encode_prompt(document: Document, tokenizer: Any) -> list[int]:
    """The ids after which the target answers: turns and generation prompt, or the beginning of a text."""
    if document.text:
        return tokenizer(clean(document.opening()))["input_ids"]
    require_template(tokenizer)
    if not any(turn["role"] == "user" for turn in document.prompt):
        raise ValueError("the assistant speaks first: there is no prompt")
    return render_ids(tokenizer, document.prompt, add_generation_prompt=True)


def require_template(tokenizer: Any) -> None:
    """Chats need a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise UserError("the target's tokenizer has no chat template: use plain text sources, or an instruct model")


def encode_document(document: Document, tokenizer: Any) -> Encoded:
    """The document as it stands, for training on the corpus's own answers.

    Raises ValueError where there is nothing to learn or the mask cannot be trusted.
    """
    if document.text:
        ids = tokenizer(clean(document.text))["input_ids"]
        return Encoded(ids, [index > 0 for index in range(len(ids))])
    require_template(tokenizer)
    return encode_chat(list(document.messages), tokenizer)


def encode_chat(messages: list[dict[str, Any]], tokenizer: Any) -> Encoded:
    """Ids of a whole chat; the mask covers each assistant turn and the token that ends it.

    Raises ValueError when there is no assistant turn, or when the template rewrites earlier turns so that a turn's
    place in the whole cannot be known.
    """
    spans = answer_spans(messages, tokenizer)
    if not spans:
        raise ValueError("no assistant turn with content")
    whole = render(tokenizer, messages)
    if not tokenizer.is_fast:
        raise UserError("the target's tokenizer gives no token offsets (not a fast one): use answers.by: target")
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    mask = [any(start <= left and right <= end and right > left for start, end in spans) for left, right in offsets]
    mask = add_turn_ends(ids, mask, offsets, spans, set(tokenizer.all_special_ids), whole)
    check_round_trip(ids, mask, messages, tokenizer)
    return Encoded(ids, mask)


def answer_spans(messages: list[dict[str, Any]], tokenizer: Any) -> list[tuple[int, int]]:
    """Character spans [start, end) of the assistant turns' contents in the rendered chat."""
    whole = render(tokenizer, messages)
    spans = []
    for index, turn in enumerate(messages):
        content = turn["content"].strip()
        if turn["role"] != "assistant" or not content:
            continue
        before = text_before(messages, index, tokenizer)
        if not whole.startswith(before):
            raise ValueError(
                f"turn {index}: the chat template rewrites earlier turns, so its place in the whole chat is not known"
            )
        start = len(before) + len(whole[len(before) :]) - len(whole[len(before) :].lstrip())
        if not whole.startswith(content, start):
            raise ValueError(f"turn {index}: the chat template changes the answer's text")
        spans.append((start, start + len(content)))
    return spans


def text_before(messages: list[dict[str, Any]], index: int, tokenizer: Any) -> str:
    """What the template writes before the content of turn `index`, found by rendering that turn with a probe in its place.

    The generation prompt would not do: a template may ignore it, or end it differently from the turn itself.
    """
    turns = [*messages[:index], {**messages[index], "content": PROBE}]
    before, found, _ = render(tokenizer, turns).rpartition(PROBE)
    if not found:
        raise ValueError(f"turn {index}: the chat template leaves the answer out")
    return before


def add_turn_ends(
    ids: list[int],
    mask: list[bool],
    offsets: list[tuple[int, int]],
    spans: list[tuple[int, int]],
    special: set[int],
    whole: str,
) -> list[bool]:
    """Add to each answer the special token that ends it: the target must say that one, too."""
    mask = list(mask)
    for start, end in spans:
        inside = [index for index, (left, right) in enumerate(offsets) if left < end and right > start]
        after = inside[-1] + 1
        while after < len(ids) and ids[after] not in special and not whole[slice(*offsets[after])].strip():
            after += 1  # white space that the template keeps between the answer and its end
        if after < len(ids) and ids[after] in special:
            mask[after] = True
    return mask


def check_round_trip(ids: list[int], mask: list[bool], messages: list[dict[str, Any]], tokenizer: Any) -> None:
    """The masked tokens must decode to the assistant's texts, or nothing that is learned can be trusted."""
    special = set(tokenizer.all_special_ids)
    said = tokenizer.decode([token for token, on in zip(ids, mask) if on and token not in special])
    meant = "".join(turn["content"].strip() for turn in messages if turn["role"] == "assistant")
    if "".join(said.split()) != "".join(meant.split()):
        raise ValueError("the masked tokens do not decode to the assistant's text")


def render(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    """The chat template's text."""
    try:
        return clean(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template refuses the chat: {error}") from None


def clean(text: str) -> str:
    """The text itself. Raises ValueError (as UnicodeEncodeError) where it cannot be encoded: lone surrogates."""
    text.encode("utf-8")
    return text


def render_ids(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    """The chat template's text as ids. The template writes its special tokens itself."""
    return tokenizer(render(tokenizer, messages, **options), add_special_tokens=False)["input_ids"]

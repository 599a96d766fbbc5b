"""What the head will learn, token by token. Runnable: `headwright preview --config …`; writes runs/<name>/preview.html."""

import itertools
import json
import statistics
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from rich.text import Text

from headwright.configs import RunConfig, UserError
from headwright.configs.command import run_stage
from headwright.configs.console import console, say, table
from headwright.data.chat import Encoded
from headwright.data.corpus import Document, encode_document, encode_prompt, read_corpus
from headwright.data.harvest import check_offline, renderer_of, store_path
from headwright.data.masks import special_ids
from headwright.data.store import FeatureReader, write_text
from headwright.data.target import load_tokenizer

SECTIONS = ("corpus", "answers")
ABOUT = (
    "Print documents as the head will see them: learned tokens in green, all others in grey, the shade changing from "
    "token to token; and count what is learned, what is cut and what the chat template adds. After a harvest the stored "
    "documents are shown, with the target's own answers."
)
SHOWN = 5  # documents
COUNTED = 1000
SHADES = {True: ("black on green3", "black on dark_sea_green2"), False: ("white on grey23", "white on grey35")}


@dataclass
class Sample:
    """A document as tokens."""

    source: str
    place: str
    ids: list[int]
    mask: list[bool]
    full_length: int
    template_tokens: int | None = None
    template_learned: int | None = None


def preview(run: RunConfig, dry_run: bool = False) -> None:
    """Print and write the preview."""
    if dry_run:
        check_offline(run)
        return
    tokenizer = load_tokenizer(run.target)
    stored = (store_path(run, "train") / "index.safetensors").exists()
    samples = stored_samples(run) if stored else corpus_samples(run, tokenizer)
    kept = list(itertools.islice(samples, COUNTED))
    if not kept:
        raise UserError("preview: no document could be encoded; the reasons stand above")
    shown = spread(kept, SHOWN)
    for sample in shown:
        print_sample(sample, tokenizer)
    show_statistics(run, kept, stored)
    path = run.directory / "preview.html"
    write_text(path, html(run, shown, tokenizer))
    say(f"the same in colour: {path}")


def stored_samples(run: RunConfig) -> Iterator[Sample]:
    """What a harvest has stored."""
    reader = FeatureReader(store_path(run, "train"))
    for number in range(len(reader)):
        document, note = reader[number], reader.notes[number]
        yield Sample(
            note["source"], note["place"], document.ids_T.tolist(), document.mask_T.tolist(), len(document.ids_T)
        )


def corpus_samples(run: RunConfig, tokenizer: Any) -> Iterator[Sample]:
    """The corpus as it stands; where the target is to answer, its prompts."""
    renderer = renderer_of(run, tokenizer)
    if run.answers.by == "target":
        say("answers.by is target: these are the prompts; after the harvest, the target's answers are shown")
    corpus = read_corpus(run.corpus, run.seed, run.directory)
    for document in corpus.train:
        try:
            if run.answers.by == "corpus":
                encoded = encode_document(document, renderer)
            else:
                ids = encode_prompt(document, renderer)
                encoded = Encoded(ids, [False] * len(ids))
        except ValueError as error:
            corpus.skipped.add(str(error), document.place, str(error))
            continue
        yield sample_of(document, encoded, run.corpus.max_length, tokenizer, by_corpus=run.answers.by == "corpus")


def sample_of(document: Document, encoded: Encoded, longest: int, tokenizer: Any, by_corpus: bool) -> Sample:
    """A document with what the template added to it."""
    added = learned = None
    if document.messages:
        turns = document.messages if by_corpus else document.prompt
        words = [tokenizer(text, add_special_tokens=False)["input_ids"] for turn in turns for text in texts_of(turn)]
        added = max(0, len(encoded.ids) - sum(map(len, words)))
        special = special_ids(tokenizer)
        learned = sum(on and token in special for token, on in zip(encoded.ids, encoded.mask))
    return Sample(
        document.source,
        document.place,
        encoded.ids[:longest],
        encoded.mask[:longest],
        len(encoded.ids),
        added,
        learned,
    )


def texts_of(turn: dict[str, Any]) -> list[str]:
    """All that somebody said in a turn."""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in turn.get("tool_calls") or []]
    return [turn["content"], turn.get("reasoning_content") or "", *calls]


def spread(samples: Sequence[Sample], count: int) -> list[Sample]:
    """A few samples, from every source in turn."""
    by_source: dict[str, list[Sample]] = {}
    for sample in samples:
        by_source.setdefault(sample.source, []).append(sample)
    rows = itertools.zip_longest(*by_source.values())
    return [sample for row in rows for sample in row if sample is not None][:count]


def pieces(sample: Sample, tokenizer: Any) -> Iterator[tuple[str, bool, str]]:
    """(text, learned, token ids) of each token; tokens that are parts of one letter together."""
    start, ids = 0, sample.ids
    while start < len(ids):
        ends = (end for end in range(start + 1, min(len(ids), start + 4) + 1) if len(set(sample.mask[start:end])) == 1)
        end = next((end for end in ends if "\ufffd" not in tokenizer.decode(ids[start:end])), start + 1)
        yield tokenizer.decode(ids[start:end]), sample.mask[start], " ".join(map(str, ids[start:end]))
        start = end


def print_sample(sample: Sample, tokenizer: Any) -> None:
    """One document in colour; where there is no terminal, learned text stands in brackets."""
    text = Text()
    before = False
    for number, (piece, learned, _) in enumerate(pieces(sample, tokenizer)):
        if not console.is_terminal and learned != before:
            text.append("⟦" if learned else "⟧")
        text.append(visible(piece), style=SHADES[learned][number % 2])
        before = learned
    if before and not console.is_terminal:
        text.append("⟧")
    console.rule(
        Text(visible(f"{sample.source} · {sample.place} · {len(sample.ids)} tokens, {sum(sample.mask)} learned"))
    )
    console.print(text)


def visible(text: str) -> str:
    """Control characters as signs: a document must not move the cursor."""
    return "".join(sign if sign in "\n\t" or unicodedata.category(sign) != "Cc" else "␦" for sign in text)


def show_statistics(run: RunConfig, samples: Sequence[Sample], stored: bool) -> None:
    """Lengths, shares and losses, by source."""
    rows = []
    for name in dict.fromkeys(sample.source for sample in samples):
        mine = [sample for sample in samples if sample.source == name]
        rows.append((name, *statistics_of(mine)))
    if len(rows) > 1:
        rows.append(("all", *statistics_of(samples)))
    columns = (
        "source",
        "documents",
        "tokens: median",
        "90 %",
        "longest",
        "learned",
        f"cut at {run.corpus.max_length}",
        "the template adds",
        "of it learned",
    )
    table(f"{'stored' if stored else 'corpus'} documents (the first {len(samples)})", columns, rows)


def statistics_of(samples: Sequence[Sample]) -> tuple[object, ...]:
    """One line of the table."""
    lengths = sorted(sample.full_length for sample in samples)
    total, learned = sum(len(s.ids) for s in samples), sum(sum(s.mask) for s in samples)
    return (
        len(samples),
        round(statistics.median(lengths)),
        lengths[int(0.9 * (len(lengths) - 1))],
        lengths[-1],
        f"{learned / max(total, 1):.1%}",
        sum(sample.full_length > len(sample.ids) for sample in samples),
        mean_of(sample.template_tokens for sample in samples),
        mean_of(sample.template_learned for sample in samples),
    )


def mean_of(values: Iterable[int | None]) -> str:
    """Tokens per document."""
    known = [value for value in values if value is not None]
    return f"{statistics.mean(known):.1f} tokens each" if known else "–"


def html(run: RunConfig, samples: Sequence[Sample], tokenizer: Any) -> str:
    """One self-contained page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    shown = [(sample, list(pieces(sample, tokenizer))) for sample in samples]
    return environment.get_template("preview.html").render(run=run, samples=shown)


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    run_stage("headwright preview", ABOUT, SECTIONS, preview, argv)


if __name__ == "__main__":
    main()

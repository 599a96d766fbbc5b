"""The preview: one page, safe to open, that shows as learned what the mask says."""

import html as entities
import json
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from conftest import CHATML, SPECIAL, make_tokenizer, tiny_run
from hypothesis import given, settings
from hypothesis import strategies as st

from headwright.configs import UserError
from headwright.configs.schema import Source
from headwright.data import preview as stage
from headwright.data.chat import Encoded, Renderer
from headwright.data.corpus import encode_document, make_document, read_corpus
from headwright.data.harvest import harvest, store_path
from headwright.data.preview import Sample, corpus_samples, html, print_sample, sample_of, spread, statistics_of
from headwright.data.store import FeatureReader

TOKENIZER = make_tokenizer()
RUN = SimpleNamespace(name="tiny")


class Page(HTMLParser):
    """Texts by the class of their span, headings, and everything that a page could load or run."""

    def __init__(self, text):
        super().__init__()
        self.spans, self.headings, self.tags, self.links, self.now = [], [], [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [(name, value) for name, value in attrs if name in ("src", "href") or name.startswith("on")]
        self.now = [dict(attrs).get("class"), dict(attrs).get("title"), ""] if tag in ("span", "h1", "h2") else None
        if self.now:
            (self.spans if tag == "span" else self.headings).append(self.now)

    def handle_endtag(self, tag):
        self.now = None

    def handle_data(self, data):
        if self.now:
            self.now[2] += data

    @property
    def pieces(self):
        """(text, learned, ids) of each token."""
        return [(text, name[0] == "l", title) for name, title, text in self.spans if title is not None]


def sample(text, mask=None, source="set", place="a.jsonl:1", ids=None):
    """Tokens of a text; the mask is given by token."""
    ids = TOKENIZER(text)["input_ids"] if ids is None else ids
    return Sample(source, place, ids, mask or [False] * len(ids), len(ids))


def learned_text(ids, mask):
    return TOKENIZER.decode([token for token, on in zip(ids, mask) if on])


@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(
        st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\ufffd"), min_size=1, max_size=6),
        min_size=1,
        max_size=6,
    )
)
def test_page_shows_what_the_mask_says(parts):
    """Every other part is learned; the page has the same text, in the same tokens, none of them lost."""
    ids, mask = [], []
    for number, part in enumerate(parts):
        new = TOKENIZER(part)["input_ids"]
        ids, mask = ids + new, mask + [number % 2 == 1] * len(new)
    page = Page(html(RUN, [sample("", mask, ids=ids)], TOKENIZER))
    assert "".join(text for text, _, _ in page.pieces) == "".join(parts)
    assert "".join(text for text, on, _ in page.pieces if on) == "".join(parts[1::2])
    assert [int(token) for _, _, title in page.pieces for token in title.split()] == ids


HOSTILE = ["<script>alert(1)</script>", "</div><img src=x onerror=alert(1)>", "\"'&amp;<!--", "{{ run.name }}{% raw %}"]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_shown_and_nothing_more(text):
    """In a document, a source's name, a place and the run's name."""
    whole = html(SimpleNamespace(name=text), [sample(text, source=text, place=text)], TOKENIZER)
    page = Page(whole)
    assert "".join(piece for piece, _, _ in page.pieces) == text
    assert page.headings[0][2] == f"What {text} learns"
    assert page.headings[1][2].startswith(f"{text} · {text} · ")
    assert set(page.tags) == set(Page(html(RUN, [sample("x")], TOKENIZER)).tags)
    assert page.links == []


def test_page_is_self_contained():
    whole = html(RUN, [sample("text")], TOKENIZER)
    page = Page(whole)
    assert page.links == []
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert "url(" not in whole
    assert "@import" not in whole
    assert 'charset="utf-8"' in whole
    assert entities.unescape(whole).count("<!doctype html>") == 1


def test_letters_of_several_tokens_are_one_piece():
    found = list(stage.pieces(sample("aЖ👩"), TOKENIZER))
    assert [text for text, _, _ in found] == ["a", "Ж", "👩"]
    assert [len(ids.split()) for _, _, ids in found] == [1, 2, 4]


@pytest.mark.parametrize("byte", ["\ufffd", "broken"])
def test_bytes_that_make_no_letter_stay_on_their_side(byte):
    """An answer may end in the middle of a letter, and a text may hold U+FFFD itself."""
    broken = TOKENIZER("👩")["input_ids"][:1] if byte == "broken" else TOKENIZER(byte)["input_ids"]
    after = TOKENIZER("next")["input_ids"]
    page = Page(html(RUN, [sample("", [False] * len(broken) + [True] * 4, ids=broken + after)], TOKENIZER))
    assert "".join(text for text, on, _ in page.pieces if on) == "next"


# Console


@settings(max_examples=25, deadline=None)
@given(parts=st.lists(st.text("abcЖ👩", min_size=1, max_size=5), min_size=1, max_size=6), first=st.booleans())
def test_console_marks_what_is_learned(parts, first):
    ids, mask = [], []
    for number, part in enumerate(parts):
        new = TOKENIZER(part)["input_ids"]
        ids, mask = ids + new, mask + [(number % 2 == 1) != first] * len(new)
    with stage.console.capture() as capture:
        print_sample(sample("", mask, ids=ids), TOKENIZER)
    title, *rest = capture.get().split("\n")
    expected = [f"⟦{part}⟧" if (number % 2 == 1) != first else part for number, part in enumerate(parts)]
    assert "".join(rest) == "".join(expected)
    assert f"set · a.jsonl:1 · {len(ids)} tokens, {sum(mask)} learned" in title


@pytest.mark.parametrize("name", ["set [b]", "[/red]", "data/[a]/x"])
def test_names_with_brackets(name):
    with stage.console.capture() as capture:
        print_sample(sample("text", source=name), TOKENIZER)
        stage.table("title", ("source",), [(name,)])
    assert capture.get().count(name) == 2


def test_control_characters_do_not_reach_the_terminal():
    with stage.console.capture() as capture:
        print_sample(sample("a\x1b[2Jb\x07"), TOKENIZER)
    assert "\x1b" not in capture.get()


# Statistics


def statistic(lengths, learned, full=None, added=None, ends=None):
    """A sample of given length."""
    ids = [1] * lengths
    return Sample("s", "p", ids, [i < learned for i in range(lengths)], full or lengths, added, ends)


def test_statistics_by_hand():
    samples = [statistic(10 * i, i, added=i, ends=1) for i in range(1, 11)] + [
        statistic(100, 45, full=400, added=4, ends=1)
    ]
    assert statistics_of(samples) == (
        11,  # documents
        60,  # median of 10, 20 … 100, 400
        100,  # nine in ten are no longer
        400,  # longest, before the cut
        f"{100 / 650:.1%}",  # (55 + 45) of (550 + 100) tokens
        1,  # cut
        f"{59 / 11:.1f} tokens each",
        "1.0 tokens each",
    )
    assert statistics_of([statistic(4, 0)])[-2:] == ("–", "–")


def hand_made(folder):
    """Two sources: chats of known length, and a text."""
    chats, texts = folder / "chats.jsonl", folder / "text.txt"
    rows = [{"prompt": f"question {i:02d}", "response": "answer" * (20 if i == 3 else 1)} for i in range(20)]
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts.write_text(" ".join(f"word{i:04d}" for i in range(1000)))
    return {"sources": [{"path": str(chats)}, {"path": str(texts), "words": 5}], "held_out": 0.5, "max_length": 100}


def test_statistics_of_a_corpus(tmp_path, model_dir, chats, capsys):
    """A token is a byte, or one special token: <|im_start|>user\\n … <|im_end|>\\n, twice."""
    run = tiny_run(model_dir, chats, tmp_path, corpus=hand_made(tmp_path), answers={"by": "corpus"})
    samples = list(corpus_samples(run, TOKENIZER))
    documents = list(read_corpus(run.corpus, run.seed).train)
    assert [s.place for s in samples] == [d.place for d in documents]
    header = 2 * 3 + len("user\n" + "assistant\n")  # two starts, two ends, two line ends
    for mine, document in zip(samples, documents):
        encoded = encode_document(document, Renderer(TOKENIZER))
        assert (mine.ids, mine.mask) == (encoded.ids[:100], encoded.mask[:100])
        assert mine.full_length == len(encoded.ids)
        expected = (header, 1) if document.messages else (None, None)
        assert (mine.template_tokens, mine.template_learned) == expected
    stage.preview(run)
    out = capsys.readouterr().out
    assert "corpus documents" in out
    assert all(f"{source} · " in out for source in ("chats", "text"))
    table = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    by_source = {row[0]: row[1:] for row in table}
    assert list(by_source) == ["chats", "text", "all"]
    for name in by_source:
        mine = [s for s in samples if name in (s.source, "all")]
        assert by_source[name] == [str(cell) for cell in statistics_of(mine)]
    page = Page((run.directory / "preview.html").read_text(encoding="utf-8"))
    shown = spread(samples, stage.SHOWN)
    assert "".join(text for text, on, _ in page.pieces if on) == "".join(learned_text(s.ids, s.mask) for s in shown)


def test_reasoning_is_not_what_the_template_adds():
    template = CHATML.replace("{{ m['content'] }}", "{{ m.reasoning_content }}{{ m.content }}")
    tokenizer = make_tokenizer(template, SPECIAL)
    counts = []
    for thoughts in ("a", "a much longer thought"):
        turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes", "reasoning": thoughts}]
        document = make_document({"messages": turns}, Source(path="x"), "", None)
        encoded = encode_document(document, Renderer(tokenizer))
        counts.append(sample_of(document, encoded, 999, tokenizer, True).template_tokens)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("length", [5, 100])
def test_sample_is_cut_where_the_corpus_cuts(length):
    document = SimpleNamespace(source="s", place="p", messages=())
    mine = sample_of(document, Encoded(list(range(9)), [False] + [True] * 8), length, TOKENIZER, True)
    assert (len(mine.ids), len(mine.mask), mine.full_length) == (min(length, 9), min(length, 9), 9)


def test_spread_takes_every_source_in_turn():
    samples = [sample("x", source=name, place=str(i)) for i, name in enumerate("aaaabbc")]
    assert [s.source for s in spread(samples, 5)] == ["a", "b", "c", "a", "b"]
    assert [s.place for s in spread(samples[:3], 5)] == ["0", "1", "2"]


# Stored and not


def test_prompts_before_the_harvest_and_answers_after(tmp_path, model_dir, chats, capsys):
    run = tiny_run(model_dir, chats, tmp_path)
    stage.preview(run)
    before = capsys.readouterr().out
    assert "these are the prompts" in before
    assert "⟦" not in before
    harvest(run)
    capsys.readouterr()
    stage.preview(run)
    after = capsys.readouterr().out
    assert "stored documents" in after
    reader = FeatureReader(store_path(run, "train"))
    answers = {learned_text(d.ids_T.tolist(), d.mask_T.tolist()) for d in reader}
    assert len(answers) > 1
    page = Page((run.directory / "preview.html").read_text(encoding="utf-8"))
    first = reader[0]
    start = [int(token) for _, _, title in page.pieces for token in title.split()][: len(first.ids_T)]
    assert start == first.ids_T.tolist()
    assert len(page.headings[1:]) == stage.SHOWN
    assert after.count("⟦") >= stage.SHOWN


def test_nothing_to_show(tmp_path, model_dir, chats):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"q{i}"}) + "\n" for i in range(20)))
    run = tiny_run(
        model_dir, chats, tmp_path, corpus={"sources": [{"path": str(path)}], "held_out": 0.5}, answers={"by": "corpus"}
    )
    with pytest.raises(UserError, match="no document could be encoded"):
        stage.preview(run)


def test_dry_run_writes_nothing(tmp_path, model_dir, chats):
    run = tiny_run(model_dir, chats, tmp_path)
    stage.preview(run, dry_run=True)
    assert not run.directory.exists()

"""Documents and masks: what the head learns is what the assistant said and the token that ends it, under any template."""

import json
from collections import Counter
from pathlib import Path

import pytest
from conftest import CHATML, SPECIAL, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from headwright.configs import UserError
from headwright.configs.schema import CorpusConfig, LearnConfig, Source
from headwright.data import corpus
from headwright.data.chat import Renderer
from headwright.data.corpus import (
    Document,
    Skipped,
    limited,
    make_document,
    rank_of,
    read_corpus,
    read_source,
)


def encode_chat(messages, tokenizer, **learn):
    """Ids and mask of a chat."""
    return Renderer(tokenizer, LearnConfig(**learn)).encode(messages)


def encode_document(document, tokenizer):
    """Ids and mask of a document."""
    return corpus.encode_document(document, Renderer(tokenizer))


def encode_prompt(document, tokenizer):
    """Ids of a prompt."""
    return corpus.encode_prompt(document, Renderer(tokenizer))


LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'system' %}{{ raise_exception('Only user and assistant roles are supported!') }}"
    "{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}"
)
GEMMA = (
    "<bos>{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PHI3 = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] + eos_token }}\n"
    "{% if loop.last and add_generation_prompt %}<|assistant|>\n{% endif %}{% endfor %}"
)
DEEPSEEK = (
    "<｜begin▁of▁sentence｜>{% for m in messages %}{% if m['role'] == 'user' %}<｜User｜>{{ m['content'] }}"
    "{% elif m['role'] == 'system' %}{{ m['content'] }}{% else %}<｜Assistant｜>{{ m['content'] }}<｜end▁of▁sentence｜>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
TEMPLATES = {
    "chatml": (CHATML, SPECIAL, "<|im_end|>"),
    "llama3": (LLAMA3, ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"], "<|eot_id|>"),
    "mistral": (MISTRAL, ["<s>"], "</s>"),
    "gemma": (GEMMA, ["<bos>", "<start_of_turn>"], "<end_of_turn>"),
    "phi3": (PHI3, ["<|user|>", "<|assistant|>", "<|system|>", "<|endoftext|>"], "<|end|>"),
    "zephyr": (ZEPHYR, [], "</s>"),
    "deepseek": (DEEPSEEK, ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"], "<｜end▁of▁sentence｜>"),
}
TOKENIZERS = {name: make_tokenizer(*parts) for name, parts in TEMPLATES.items()}


def chat(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    """Alternating turns, the user first."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return ([{"role": "system", "content": system}] if system else []) + turns


def learned(encoded, tokenizer) -> list[str]:
    """The text of each unbroken run of masked tokens."""
    runs: list[list[int]] = []
    for before, token, on in zip([False, *encoded.mask], encoded.ids, encoded.mask):
        if on:
            runs += [] if before else [[]]
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


def assert_learns(messages, tokenizer, end: str) -> None:
    """The mask is exactly the assistant's texts, each with the token that ends it; the ids are the template's own."""
    encoded = encode_chat(messages, tokenizer)
    said = [turn["content"] + end for turn in messages if turn["role"] == "assistant"]
    assert learned(encoded, tokenizer) == said
    assert encoded.ids == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)


# Texts that begin and end with something visible, of any script. No "<" and "[": those may spell special tokens.
VISIBLE = st.characters(exclude_categories=["Cs", "Cc", "Zs", "Zl", "Zp"], exclude_characters="<[")
TEXT = st.one_of(
    st.sampled_from(
        [
            "a",
            "\ue000",
            "x\ue001y",
            "assistant",
            "user",
            "model",
            "is",
            "\\n",
            "Привет, мир!",
            "👩‍👩‍👧 да",
            "e\u0301",
            "终",
            "im_end",
            "]",
        ]
    ),
    st.builds(lambda a, b, c: a + b + c, VISIBLE, st.text(VISIBLE | st.sampled_from(" \n\t"), max_size=12), VISIBLE),
)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=25, deadline=None)
@given(texts=st.lists(TEXT, min_size=2, max_size=6))
def test_mask_is_the_answers_and_their_ends(name, texts):
    assert_learns(chat(*texts[: len(texts) // 2 * 2]), TOKENIZERS[name], TEMPLATES[name][2])


@pytest.mark.parametrize("name", ["chatml", "llama3", "phi3", "zephyr", "deepseek"])
def test_system_turn_is_not_learned(name):
    assert_learns(chat("2+2?", "4", "да?", "да", system="Be brief. 4 да"), TOKENIZERS[name], TEMPLATES[name][2])


@pytest.mark.parametrize("name", TEMPLATES)
def test_answer_that_repeats_the_question(name):
    """The same text elsewhere in the chat is not mistaken for the answer."""
    assert_learns(chat("echo", "echo", "echo", "echo"), TOKENIZERS[name], TEMPLATES[name][2])


@pytest.mark.parametrize("name", TEMPLATES)
def test_last_user_turn_and_generation_prompt_are_not_learned(name):
    tokenizer, end = TOKENIZERS[name], TEMPLATES[name][2]
    messages = chat("one", "two", "three")
    assert learned(encode_chat(messages, tokenizer), tokenizer) == ["two" + end]
    prompt = encode_prompt(make_document({"messages": messages}, Source(path="x"), "", None), tokenizer)
    first = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=True, return_dict=False)
    assert prompt == first
    whole = encode_chat(messages[:2], tokenizer)
    assert whole.ids[: len(prompt)] == prompt
    assert not any(whole.mask[: len(prompt)])
    if name != "mistral":  # its template writes a space before each answer, after the prompt
        assert whole.mask[len(prompt)]


@pytest.mark.parametrize("name", ["llama3", "gemma"])
@pytest.mark.parametrize("text", ["  hello", "hello  ", "\n hello \n\n", "\u00a0hello\u2003"])
def test_trimming_template(name, text):
    """A template that trims an answer: the trimmed text and its end are learned."""
    tokenizer, end = TOKENIZERS[name], TEMPLATES[name][2]
    assert learned(encode_chat(chat("q", text), tokenizer), tokenizer) == ["hello" + end]


@pytest.mark.parametrize("name", ["chatml", "phi3", "zephyr", "deepseek", "mistral"])
@pytest.mark.parametrize("text", ["hello\n", "hello ", "hello \n\n"])
def test_end_of_turn_is_learned_after_trailing_space(name, text):
    """A template that keeps an answer's trailing space: the answer must still be taught to end."""
    tokenizer, end = TOKENIZERS[name], TEMPLATES[name][2]
    runs = learned(encode_chat(chat("q", text, "again", "yes"), tokenizer), tokenizer)
    assert "".join(runs).count(end) == 2


@pytest.mark.parametrize("answer", ["a", "ss", "assistant", "hello"])
def test_template_without_generation_prompt(answer):
    """A role header that is plain text must not pass for the answer: right mask, or a refusal."""
    tokenizer = make_tokenizer(
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    )
    try:
        encoded = encode_chat(chat("q", answer), tokenizer)
    except ValueError:
        return
    assert learned(encoded, tokenizer) == [answer + "<|im_end|>"]


@pytest.mark.parametrize("answer", ["a", "assistant", "hello"])
def test_chat_that_the_assistant_opens(answer):
    tokenizer = TOKENIZERS["chatml"]
    messages = [{"role": "assistant", "content": answer}, *chat("q", "yes")]
    try:
        encoded = encode_chat(messages, tokenizer)
    except ValueError:
        return
    assert learned(encoded, tokenizer) == [answer + "<|im_end|>", "yes<|im_end|>"]


def test_prompt_is_never_empty():
    """A chat that the assistant opens has no prompt before its first answer: refused, or the user's turn is asked."""
    row = {"messages": [{"role": "assistant", "content": "Hi!"}, *chat("2+2?", "4")]}
    try:
        document = make_document(row, Source(path="x"), "", None)
        ids = encode_prompt(document, TOKENIZERS["chatml"])
    except ValueError:
        return
    assert "2+2?" in TOKENIZERS["chatml"].decode(ids)


REWRITES = {
    "strips earlier answers": "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] if loop.last or m['role'] == 'user' else m['content'][:1] }}<|im_end|>\n{% endfor %}",
    "counts letters first": "{{ messages[1]['content'] | length }}" + CHATML,
    "upper case": CHATML.replace("m['content']", "m['content'] | upper"),
    "drops answers": CHATML.replace("m['content']", "(m['content'] if m['role'] == 'user' else '')"),
    "changes inner space": CHATML.replace("m['content']", "m['content'] | replace(' ', '_')"),
}


@pytest.mark.parametrize("name", REWRITES)
def test_rewriting_template_is_refused(name):
    tokenizer = make_tokenizer(REWRITES[name])
    with pytest.raises(ValueError, match=r"turn 1: the chat template|do not decode"):
        encode_chat(chat("what now", "first answer", "and then", "second answer"), tokenizer)


def test_template_that_drops_earlier_thinking():
    """Qwen3's way: the reasoning of earlier turns is cut once another user turn follows; the rest is learned."""
    template = CHATML.replace(
        "{{ m['content'] }}",
        "{{ m['content'].split('</think>')[-1] if not loop.last and m['role'] == 'assistant' else m['content'] }}",
    )
    tokenizer = make_tokenizer(template)
    encoded = encode_chat(chat("q", "<think>hm</think>yes", "q", "no"), tokenizer)
    assert learned(encoded, tokenizer) == ["yes<|im_end|>", "no<|im_end|>"]
    assert learned(encode_chat(chat("q", "<think>hm</think>yes"), tokenizer), tokenizer) == [
        "<think>hm</think>yes<|im_end|>"
    ]


@pytest.mark.parametrize("texts", [("only a question",), ("q", ""), ("q", "  \n")])
def test_nothing_to_learn_is_refused(texts):
    with pytest.raises(ValueError, match="no assistant turn"):
        encode_chat(chat(*texts), TOKENIZERS["chatml"])


def test_template_that_raises_is_a_refused_document():
    """Gemma's template refuses a system turn: that document cannot be used, the others can."""
    document = make_document({"messages": chat("q", "a", system="s")}, Source(path="x"), "", None)
    for encode in (encode_document, encode_prompt):
        with pytest.raises(ValueError, match="System role not supported"):
            encode(document, TOKENIZERS["gemma"])


@pytest.mark.parametrize("encode", [encode_document, encode_prompt])
def test_lone_surrogate_is_a_refused_document(encode):
    """JSON can hold half a surrogate pair; no tokenizer takes it."""
    row = json.loads(
        '{"messages": [{"role": "user", "content": "\\ud83d"}, {"role": "assistant", "content": "\\ude00"}]}'
    )
    try:
        document = make_document(row, Source(path="x"), "", None)
        encoded = encode(document, TOKENIZERS["chatml"])
    except ValueError:
        return
    assert (encoded if encode is encode_prompt else encoded.ids)[-1] >= 0


def test_no_chat_template():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    document = make_document({"prompt": "q", "response": "a"}, Source(path="x"), "", None)
    for encode in (encode_document, encode_prompt):
        with pytest.raises(UserError, match="no chat template"):
            encode(document, tokenizer)


def test_special_tokens_are_not_doubled():
    """A tokenizer that adds a BOS by itself, and a template that writes one: one BOS."""
    import tokenizers

    tokenizer = make_tokenizer(*TEMPLATES["llama3"])
    bos = tokenizer.convert_tokens_to_ids("<|begin_of_text|>")
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)]
    )
    assert tokenizer("x")["input_ids"][0] == bos
    document = make_document({"prompt": "q", "response": "a"}, Source(path="x"), "", None)
    assert encode_document(document, tokenizer).ids.count(bos) == 1
    assert encode_prompt(document, tokenizer).count(bos) == 1


# Rows


def jsonl(path: Path, rows: list) -> Path:
    """A .jsonl file; strings are written as they stand."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def corpus_of(path: Path, seed: int = 0, held_out: float = 0.0, **source):
    """The corpus of one file."""
    return read_corpus(CorpusConfig([Source(path=str(path), **source)], held_out=held_out), seed)


def read(path: Path, seed: int = 0, **source) -> tuple[list[Document], Counter[str]]:
    """The documents of one file before they are split, and what was skipped."""
    skipped = Skipped()
    config = Source(path=str(path), **source)
    return list(limited(read_source(config, None, skipped), config.limit, seed)), skipped.counts


FORMS = [
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    {"conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
    {"messages": [{"from": "human", "value": "q"}, {"from": "bot", "value": "a"}]},
    {"prompt": "q", "response": "a"},
    {"prompt": "q", "completion": "a", "id": 3},
    {"question": "q", "answer": "a"},
]


@pytest.mark.parametrize("row", FORMS, ids=lambda row: "-".join(row))
def test_row_forms_mean_the_same(row):
    document = make_document(row, Source(path="set.jsonl", samples=3), "set.jsonl:1", None)
    assert document.messages == tuple(chat("q", "a"))
    assert document.prompt == chat("q")
    assert (document.source, document.place, document.samples, document.text) == ("set", "set.jsonl:1", 3, "")


@pytest.mark.parametrize("row", [{"prompt": "q"}, {"turns": ["q"]}, {"prompt": "q", "response": None}])
def test_rows_without_answer_are_prompts(row):
    document = make_document(row, Source(path="x"), "", None)
    assert list(document.messages) == document.prompt == chat("q")


def test_text_row():
    text = " ".join(f"word{i}" for i in range(20))
    document = make_document({"text": text}, Source(path="x", words=10), "", None)
    assert (document.text, document.words, document.messages) == (text, 10, ())
    tokenizer = TOKENIZERS["chatml"]
    assert tokenizer.decode(encode_prompt(document, tokenizer)) == " ".join(f"word{i}" for i in range(10))
    encoded = encode_document(document, tokenizer)
    assert tokenizer.decode(encoded.ids) == text
    assert encoded.mask == [False] + [True] * (len(encoded.ids) - 1)
    with pytest.raises(ValueError, match="shorter than two prompts"):
        make_document({"text": text}, Source(path="x", words=11), "", None)


def test_prompt_of_text_ends_before_the_text_does():
    """However a text is spaced, a prompt of 10 words leaves something for the target to continue."""
    text = "\n".join(f"word{i}" for i in range(20))
    document = make_document({"text": text}, Source(path="x", words=10), "", None)
    tokenizer = TOKENIZERS["chatml"]
    assert tokenizer.decode(encode_prompt(document, tokenizer)).split() == text.split()[:10]


def test_system_prompt_is_added_where_there_is_none():
    source = Source(path="x")
    added = make_document({"prompt": "q"}, source, "", "be brief")
    assert added.messages == tuple(chat("q", system="be brief"))
    kept = make_document({"messages": chat("q", system="own")}, source, "", "be brief")
    assert kept.messages == tuple(chat("q", system="own"))
    assert added.key == kept.key == make_document({"prompt": "q"}, source, "", None).key


MALFORMED = [
    "{not json",
    "null",
    "3",
    '"text"',
    "[1, 2]",
    "{}",
    '{"messages": null}',
    '{"messages": []}',
    '{"messages": "hello"}',
    '{"messages": {"role": "user"}}',
    '{"messages": [null]}',
    '{"messages": ["hello"]}',
    '{"messages": [{"role": "user"}]}',
    '{"messages": [{"content": "hello"}]}',
    '{"messages": [{"role": "user", "content": null}]}',
    '{"messages": [{"role": "user", "content": 5}]}',
    '{"messages": [{"role": 5, "content": "x"}]}',
    '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}',
    '{"messages": [{"role": "assistant", "content": "no question"}]}',
    '{"messages": [{"role": "system", "content": "no question"}]}',
    '{"prompt": null, "response": "a"}',
    '{"prompt": "", "response": "a"}',
    '{"prompt": " \\n ", "response": "a"}',
    '{"prompt": 5}',
    '{"prompt": ["q"]}',
    '{"turns": []}',
    '{"turns": [null]}',
    '{"turns": [5]}',
    '{"turns": 5}',
    '{"turns": true}',
    '{"turns": {"a": "b"}}',
    '{"text": null}',
    '{"text": "too short"}',
    '{"text": 5}',
    '{"a": NaN}',
    "[" * 20000,
]


@pytest.mark.parametrize("line", MALFORMED, ids=lambda line: line[:40])
def test_malformed_row_is_counted_and_never_fatal(tmp_path, line):
    documents, skipped = read(jsonl(tmp_path / "a.jsonl", [{"prompt": "good"}, line, {"prompt": "also good"}]))
    assert [d.prompt[0]["content"] for d in documents] == ["good", "also good"]
    assert [d.place.rsplit(":", 1)[1] for d in documents] == ["1", "3"]
    assert skipped == Counter({"malformed rows": 1})


def test_lone_surrogates_and_bad_bytes_do_not_stop_the_reader(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "\\ud800 q"}\n\n{"prompt": "caf\xe9"}\n{"text": "' + b"\\ud800 " * 200 + b'"}\n')
    documents, skipped = read(path, words=10)
    assert (documents, skipped["malformed rows"]) == ([], 3)


def test_byte_order_mark(tmp_path):
    """Files written on Windows often begin with one."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"prompt": "first"}\n{"prompt": "second"}\n')
    assert len(read(path)[0]) == 2


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.sampled_from(["user", "assistant", "human"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                "messages conversations role content from value prompt question response turns text".split()  # noqa: SIM905
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(row=JSON)
def test_any_json_is_a_document_or_a_value_error(row):
    try:
        document = make_document(row, Source(path="x", words=1), "", None)
    except ValueError:
        return
    assert document.text or document.messages
    assert all(isinstance(turn["content"], str) for turn in document.messages)


def test_long_text_file_is_cut_into_documents(tmp_path):
    """A .txt file of 20000 characters is many documents, and all of its words are in some."""
    words = [f"word{i:05d}" for i in range(2000)]
    path = tmp_path / "book.txt"
    path.write_text(" ".join(words))
    documents, _ = read(path, words=8)
    assert len(documents) >= 9
    assert {word for d in documents for word in d.text.split()} >= set(words[:1500])


def test_no_sources():
    with pytest.raises(UserError, match=r"corpus\.sources is empty"):
        read_corpus(CorpusConfig(), 0)


@pytest.mark.parametrize("rows", [[], ["{bad"], ["", " "], ['{"text": "short"}', "null"]])
def test_empty_source_is_refused(tmp_path, rows):
    good = jsonl(tmp_path / "good.jsonl", [{"prompt": "q"}])
    empty = jsonl(tmp_path / "empty.jsonl", rows)
    with pytest.raises(UserError, match="corpus source empty: no usable document"):
        read_corpus(CorpusConfig([Source(path=str(good)), Source(path=str(empty))]), 0)


def test_all_held_out_is_refused(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": next(f"q{i}" for i in range(99) if key_rank(f"q{i}") < 0.9)}])
    with pytest.raises(UserError, match="every document was held out"):
        corpus_of(path, held_out=0.9)


def test_nothing_held_out_is_refused(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": f"q{i}"} for i in range(9)])
    with pytest.raises(UserError, match="no document was held out"):
        corpus_of(path, held_out=0.0)


def key_rank(prompt: str, seed: int = 0) -> float:
    """The place of a prompt in the held-out order."""
    return rank_of(make_document({"prompt": prompt}, Source(path="x"), "", None).key, seed)


def test_missing_file_and_wrong_suffix(tmp_path):
    with pytest.raises(UserError, match=r"none\.jsonl: no such file"):
        corpus_of(tmp_path / "none.jsonl")
    (tmp_path / "a.xls").write_text("q,a\n")
    with pytest.raises(UserError, match=r"a\.xls: expected \.jsonl"):
        corpus_of(tmp_path / "a.xls")
    with pytest.raises(UserError, match="no such file"):
        corpus_of(tmp_path)


def sides(corpus) -> tuple[set[str], set[str]]:
    """First user turns on both sides."""
    return tuple(
        {next(t["content"] for t in d.messages if t["role"] == "user") for d in side}
        for side in (corpus.train, corpus.held_out)
    )


@settings(max_examples=20, deadline=None)
@given(order=st.permutations(range(30)), cut=st.integers(1, 29), seed=st.integers(0, 3))
def test_split_depends_on_the_prompt_and_seed_alone(tmp_path_factory, order, cut, seed):
    folder = tmp_path_factory.mktemp("split")
    rows = [{"prompt": f"question {i}"} for i in range(30)]
    straight = sides(corpus_of(jsonl(folder / "all.jsonl", rows), seed, held_out=0.5))
    one = jsonl(folder / "one.jsonl", [{"question": rows[i]["prompt"], "answer": "x"} for i in order[:cut]])
    two = jsonl(folder / "two.jsonl", [{"messages": chat(rows[i]["prompt"], "y", system="s")} for i in order[cut:]])
    config = CorpusConfig([Source(path=str(one)), Source(path=str(two))], held_out=0.5, system="be brief")
    assert sides(read_corpus(config, seed)) == straight
    assert not straight[0] & straight[1]
    assert straight[0] | straight[1] == {row["prompt"] for row in rows}


def test_another_seed_is_another_split(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": f"q{i}"} for i in range(60)])
    assert sides(corpus_of(path, 0, 0.5)) != sides(corpus_of(path, 1, 0.5))


def test_share_held_out_is_about_what_was_asked(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": f"q{i}"} for i in range(2000)])
    held = len(corpus_of(path, 0, 0.25).held_out)
    assert abs(held - 500) < 4 * (2000 * 0.25 * 0.75) ** 0.5


def test_duplicates_are_dropped_and_counted(tmp_path):
    """The same first question, spaced differently or answered differently, is one prompt."""
    others = [{"prompt": f"q{i}"} for i in range(30)]
    rows = [{"prompt": "a  b"}, {"prompt": "a b", "response": "x"}, {"prompt": " a\nb "}, *others]
    corpus = corpus_of(jsonl(tmp_path / "a.jsonl", rows), held_out=0.5)
    places = {int(d.place.rsplit(":", 1)[1]) for d in [*corpus.train, *corpus.held_out]}
    assert places == {1, *range(4, 34)}
    assert corpus.skipped.counts == Counter(duplicates=2)
    again = read_corpus(CorpusConfig([Source(path=str(tmp_path / "a.jsonl"))] * 2, held_out=0.5), 0)
    assert (list(again.train), list(again.held_out)) == (list(corpus.train), list(corpus.held_out))


def asked(documents: list[Document]) -> list[str]:
    """First turns."""
    return [d.messages[0]["content"] for d in documents]


@settings(max_examples=20, deadline=None)
@given(order=st.permutations(range(40)), limit=st.integers(1, 45), seed=st.integers(0, 3))
def test_limit_is_seeded_and_stable(tmp_path_factory, order, limit, seed):
    """The same documents whatever their order in the file, in the file's order; a larger limit only adds."""
    folder = tmp_path_factory.mktemp("limit")
    rows = [{"prompt": f"question {i}"} for i in range(40)]
    plain, mixed = jsonl(folder / "a.jsonl", rows), jsonl(folder / "b.jsonl", [rows[i] for i in order])
    chosen = asked(read(plain, seed, limit=limit)[0])
    assert len(chosen) == min(limit, 40)
    kept = asked(read(mixed, seed, limit=limit)[0])
    assert kept == [rows[i]["prompt"] for i in order if rows[i]["prompt"] in chosen]
    assert set(kept) == set(chosen) <= set(asked(read(plain, seed, limit=limit + 1)[0]))


def test_limit_depends_on_the_seed(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": f"q{i}"} for i in range(40)])
    assert asked(read(path, 0, limit=10)[0]) != asked(read(path, 1, limit=10)[0])


def test_limit_is_not_biased_towards_one_side(tmp_path):
    """Documents that a limit keeps are held out as often as any."""
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": f"q{i}"} for i in range(4000)])
    held = len(corpus_of(path, 0, held_out=0.25, limit=1000).held_out)
    assert abs(held - 250) < 4 * (1000 * 0.25 * 0.75) ** 0.5


def test_malformed_rows_are_reported_with_their_place(tmp_path, capsys):
    path = jsonl(tmp_path / "a.jsonl", ["{bad"] * 9 + [{"prompt": "q"}])
    skipped = Skipped()
    assert len(list(read_source(Source(path=str(path)), None, skipped))) == 1
    out = "".join(capsys.readouterr().out.split())
    assert skipped.counts == Counter({"malformed rows": 9})
    assert "a.jsonl:1:" in out
    assert "a.jsonl:5:" in out
    assert "a.jsonl:6:" not in out


def test_prompt_of_a_document_without_answer_is_all_of_it():
    document = Document("k", "s", "p", 1, tuple(chat("q")))
    assert document.prompt == chat("q")

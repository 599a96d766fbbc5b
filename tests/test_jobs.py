"""Jobs: cut by the corpus and the run alone, within their budgets, with honest estimates."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import CHATML, TAPS, make_tokenizer, tiny_run
from hypothesis import given, settings
from hypothesis import strategies as st
from test_multiturn import FORGETFUL, chat, save_talker, talk_run, write_chats

from headwright.data.chat import Renderer
from headwright.data.corpus import Document, Skipped, hash_of, read_corpus
from headwright.data.harvest import harvest, jobs_of, store_path
from headwright.data.jobs import UNITS, Job, Jobs, decode_job, encode_job, flat, seed_of
from headwright.data.shard import Shard
from headwright.data.store import FeatureReader, bytes_per_token


def text_of(number: int, length: int, sample: int = 0) -> Job:
    """A text of `length` tokens."""
    place = Document(hash_of(str(number)), "s", f"set.jsonl:{number}", 1)
    return Job(place, [7] * length, [token % 3 > 0 for token in range(length)], sample)


def question_of(number: int, length: int, sample: int = 0) -> Job:
    """A prompt of `length` tokens."""
    messages = ({"role": "user", "content": "q"},)
    return Job(Document(hash_of(str(number)), "s", f"set.jsonl:{number}", 9, messages), [7] * length, None, sample)


def make_jobs(lengths: list[int], budget: int, shard_mib: float = 256, kind=text_of) -> Jobs:
    """Jobs of these lengths."""
    harvest_section = {"tokens_per_batch": budget, "shard_mib": shard_mib}
    answers = {"max_new_tokens": 12, "rows": budget}
    run = tiny_run(Path("m"), Path("c"), Path("r"), harvest=harvest_section, answers=answers)
    jobs = Jobs(run, None)
    for number, length in enumerate(lengths):
        jobs.add(kind(number, length))
    return jobs


many = st.lists(st.integers(2, 90), min_size=1, max_size=60)


@settings(max_examples=60, deadline=None)
@given(many, st.integers(1, 400), st.sampled_from([text_of, question_of]))
def test_batches_hold_each_job_once_sorted_and_within_the_budget(lengths, budget, kind):
    jobs = make_jobs(lengths, budget, kind=kind)
    batches = list(jobs.batches())
    order = [number for batch in batches for number in batch]
    assert sorted(order) == list(range(len(lengths)))
    assert all(lengths[a] <= lengths[b] for a, b in pairwise(order))
    size = len if kind is question_of else lambda batch: max(lengths[n] for n in batch) * len(batch)
    assert all(size(batch) <= budget or len(batch) == 1 for batch in batches)
    for batch, following in pairwise(batches):  # none is closed early
        longest, tokens = lengths[following[0]], sum(lengths[n] for n in batch)
        uneven = longest * len(batch) > 1.04 * tokens and tokens > budget / 4
        assert size([*batch, following[0]]) > budget or (kind is text_of and uneven)


@settings(max_examples=60, deadline=None)
@given(many, st.integers(1, 400), st.sampled_from([1e-4, 1e-3, 256]))
def test_units_are_the_batches_in_order_and_about_as_large_as_asked(lengths, budget, shard_mib):
    jobs = make_jobs(lengths, budget, shard_mib)
    units = jobs.units(3, 32)
    batches = list(jobs.batches())
    assert [batch for unit in units for batch in unit] == batches
    assert all(units)
    per_token, per_row = bytes_per_token(3, 32, jobs.run.harvest.dtype)
    weigh = lambda batch: sum(jobs.tokens[n] * per_token + jobs.rows[n] * per_row for n in batch)  # noqa: E731
    size = min(shard_mib * 2**20, jobs.bytes(3, 32) / UNITS)
    for unit in units:
        assert sum(map(weigh, unit[:-1])) + weigh(unit[-1]) / 2 <= size or len(unit) == 1
    assert sum(map(weigh, batches)) == jobs.bytes(3, 32)


@settings(max_examples=30, deadline=None)
@given(many, st.integers(1, 400), st.randoms())
def test_units_do_not_depend_on_the_order_of_the_corpus(lengths, budget, random):
    shuffled = list(enumerate(lengths))
    random.shuffle(shuffled)
    one, two = make_jobs(lengths, budget), make_jobs([], budget)
    for number, length in shuffled:
        two.add(text_of(number, length))
    keys = [[[jobs.spool[n].document.key for n in flat(unit)] for unit in jobs.units(3, 32)] for jobs in (one, two)]
    assert keys[0] == keys[1]


@settings(max_examples=30, deadline=None)
@given(many, st.integers(1, 400))
def test_the_same_corpus_gives_the_same_units_and_another_another_identity(lengths, budget):
    one, two = make_jobs(lengths, budget), make_jobs(lengths, budget)
    assert one.units(3, 32) == two.units(3, 32)
    assert one.content.hexdigest() == two.content.hexdigest()
    two.add(text_of(len(lengths), 5))
    assert one.content.hexdigest() != two.content.hexdigest()


def test_a_job_survives_the_spool():
    for job in (text_of(1, 9), question_of(2, 5, sample=3)):
        back = decode_job(json.loads(json.dumps(encode_job(job))))
        assert (back.ids, back.mask, back.sample) == (job.ids, job.mask, job.sample)
        assert back.note(2) == job.note(2) == job.note() | {"turn": 2}
        assert job.mask or back == job


def test_seeds_belong_to_document_and_sample(model_dir, chats, tmp_path):
    run = tiny_run(model_dir, chats, tmp_path)
    seeds = {seed_of(run, hash_of(str(key)), sample) for key in range(50) for sample in range(4)}
    assert len(seeds) == 200
    run.seed = 1
    assert not seeds & {seed_of(run, hash_of(str(key)), sample) for key in range(50) for sample in range(4)}


# Estimates


def train_jobs(run) -> Jobs:
    """The jobs of the training side."""
    corpus = read_corpus(run.corpus, run.seed)
    return jobs_of(run, make_tokenizer(), 512, "train", corpus.train, Skipped())


def data_bytes(root: Path) -> int:
    """Bytes of a store's features: all but headers, and 32 bytes a document of places and checksums."""
    shards = [Shard(path) for path in root.glob("shard-*")]
    counts = [len(shard.tensor("checksums")) for shard in shards]
    return sum(len(shard.map) - shard.start - 32 * count - 16 for shard, count in zip(shards, counts))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8", "fp8-taps"])
def test_estimate_is_exact_for_texts(model_dir, chats, tmp_path, dtype):
    harvest_section = {"taps": list(TAPS), "tokens_per_batch": 512, "dtype": dtype}
    run = tiny_run(model_dir, chats, tmp_path, answers={"by": "corpus", "max_new_tokens": 4}, harvest=harvest_section)
    harvest(run)
    jobs = train_jobs(run)
    assert data_bytes(store_path(run, "train")) == jobs.bytes(len(TAPS), 32)
    assert sorted(jobs.tokens) == sorted(FeatureReader(store_path(run, "train")).lengths())


def check_bound(run) -> None:
    """No document is longer, and the store no larger, than was foretold."""
    harvest(run)
    jobs, reader = train_jobs(run), FeatureReader(store_path(run, "train"))
    most = {(job.document.key, job.sample): jobs.tokens[number] for number, job in enumerate(jobs.spool)}
    for entry, length in zip(reader.notes, reader.lengths(), strict=True):
        assert length <= most[entry["key"], entry["sample"]]
    assert data_bytes(store_path(run, "train")) <= jobs.bytes(len(TAPS), 32)


def test_estimate_is_a_bound_for_answers(model_dir, chats, tmp_path):
    check_bound(tiny_run(model_dir, chats, tmp_path))


@pytest.mark.parametrize("template", [CHATML, FORGETFUL])
def test_estimate_is_a_bound_for_several_turns(tmp_path, template):
    """A tokenizer may spend a token on each byte, and each answer may become a document of its own."""
    rows = [chat(f"count to {i}", "one", "and then " + "on " * 20, "two", "go on", "three") for i in range(24)]
    path = write_chats(tmp_path / "chats.jsonl", rows)
    check_bound(talk_run(save_talker(tmp_path / "model", template), path, tmp_path))


def test_masks_of_jobs_are_those_of_the_renderer(model_dir, chats, tmp_path):
    run = tiny_run(model_dir, chats, tmp_path, answers={"by": "corpus", "max_new_tokens": 4})
    documents = {document.key: document for document in read_corpus(run.corpus, run.seed).train}
    for job in train_jobs(run).spool:
        encoded = Renderer(make_tokenizer()).encode(documents[job.document.key].messages)
        assert (job.ids, job.mask) == (encoded.ids, encoded.mask)

"""The real instruct model, real prompts, a head that was really trained. Minutes; needs the package registry once."""

import json

import pytest
import torch

from headwright.configs import UserError, load_run
from headwright.data.batch import pack
from headwright.data.generate import Question, answer
from headwright.data.harvest import harvest, store_path
from headwright.data.sampling import Policy
from headwright.data.store import FeatureReader
from headwright.data.target import Target
from headwright.eval.acceptance import evaluate
from headwright.eval.decode import decode_plain, speculate
from headwright.eval.drafters import PromptLookup
from headwright.eval.prompts import held_out_prompts
from headwright.eval.rollout_tau import replay
from headwright.heads.draft_tree import TreeShape
from headwright.heads.export import export_run
from headwright.heads.saved import load_head
from headwright.train.adapt import adapt
from headwright.train.run import train

pytestmark = pytest.mark.slow
CHAIN, TREE = TreeShape("chain", 5, 1, 5), TreeShape("dynamic", 4, 4, 12)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The quick demo, harvested and trained; skipped where the registry cannot be reached."""
    torch.set_num_threads(2)
    runs = tmp_path_factory.mktemp("runs")
    config = load_run(
        "configs/smollm2-eagle3-quick.yaml",
        [
            f"runs={runs}",
            "corpus.held_out=0.25",
            "vocab.size=768",
            "vocab.coverage=0.7",
            "eval.prompts=20",
            "eval.max_new_tokens=32",
            "eval.timed_prompts=2",
        ],
    )
    try:
        harvest(config)
    except UserError as error:
        if "could not fetch" in str(error):
            pytest.skip(str(error))
        raise
    train(config)
    yield config
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def parts(run):
    """Target, trained head, 20 held-out prompts, and their plain greedy answers."""
    reader = FeatureReader(store_path(run, "held-out"))
    target = Target.load(run.target, reader.manifest.taps)
    head = load_head(run.directory / "head", target).eval()
    prompts = [prompt.ids for prompt in held_out_prompts(reader, 20)]
    assert len(prompts) == 20
    return target, head, prompts, [decode_plain(target, ids, 32).tokens for ids in prompts]


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=lambda shape: shape.name)
def test_speculative_text_is_the_plain_text(parts, shape):
    target, head, prompts, plain = parts
    runs = [speculate(target, head, ids, shape, 32) for ids in prompts]
    assert [r.tokens for r in runs] == plain
    assert sum(sum(r.accepted) for r in runs) > 20  # a head that accepts nothing would prove nothing


def test_plain_text_is_that_of_transformers(parts):
    target, _, prompts, plain = parts
    for ids, tokens in zip(prompts[:5], plain):
        assert target.generate_hf(torch.tensor([ids]), 32) == tokens


def test_trained_head_beats_prompt_lookup(parts):
    target, head, prompts, _ = parts

    def tau(drafter):
        runs = [speculate(target, drafter, ids, CHAIN, 32) for ids in prompts]
        return sum(sum(r.emitted) for r in runs) / sum(len(r.emitted) for r in runs)

    ours, lookup = tau(head), tau(PromptLookup())
    assert ours > 1.2
    assert ours > lookup


def test_rollout_tells_the_decoders_counters(parts):
    """On features of the text itself, without rounding, every cycle is the decoder's."""
    target, head, prompts, _ = parts
    documents = answer(target, [Question(ids, Policy()) for ids in prompts[:6]], 32)
    for ids, document in zip(prompts, documents):
        right = head.agreement(pack([document]), target, 5)
        cycles = replay(document.mask_T, right)
        decoded = speculate(target, head, ids, CHAIN, 32)
        assert (cycles.accepted, cycles.emitted) == (decoded.accepted, decoded.emitted)


def test_report_and_export(run):
    evaluate(run)
    export_run(run)
    report = json.loads((run.directory / "report.json").read_text())
    assert all(entry["lossless"]["greedy_identity"] == 1.0 for entry in report["entries"])
    exported = json.loads((run.directory / "export" / "portable" / "headwright.json").read_text())
    assert exported["read_back"]["equal"] == exported["read_back"]["drafted"] > 0


def test_the_head_goes_to_russian(run, tmp_path):
    """The recipe, small: more Russian can be said and is accepted, the text stays the target's, what was lost is told."""
    config = load_run(
        "configs/smollm2-russian.yaml",
        [
            f"runs={tmp_path}",
            f"adapt.head={run.directory / 'head'}",
            "adapt.budget=1.0",
            "corpus.sources.0.limit=30",
            "corpus.sources.2.limit=30",
            "corpus.held_out=0.2",
            "answers.max_new_tokens=48",
            "vocab.size=2560",
            "eval.prompts=6",
            "eval.max_new_tokens=24",
            "eval.timed_prompts=1",
            "eval.patience=0",
            "eval.shapes=[{kind: chain, depth: 5}]",
            "eval.baselines=[]",
        ],
    )
    try:
        adapt(config)
    except UserError as error:
        if "could not fetch" in str(error):
            pytest.skip(str(error))
        raise
    found = json.loads((config.directory / "adaptation.json").read_text(encoding="utf-8"))
    assert found["coverage"]["Cyrillic"]["before"] < 0.2 < 0.8 < found["coverage"]["Cyrillic"]["after"]
    groups = {row["group"]: row for row in found["groups"] if row["by"] == "domain"}
    assert groups["handbook-ru"]["tau"] > groups["handbook-ru"]["tau_base"]
    assert {"gsm8k", "humaneval"} <= set(groups)
    assert 1.0 < groups["handbook-ru"]["chars_per_token"] < 2.0  # spelled almost by the letter
    report = json.loads((config.directory / "report.json").read_text())
    assert all(entry["lossless"]["greedy_identity"] == 1.0 for entry in report["entries"])

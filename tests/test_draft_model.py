"""The draft model: cut from the target or loaded, taught by its distributions, saved once, exported for transformers."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import transformers
from conftest import TAPS, VOCAB, make_model, make_target, make_tokenizer, tiny_run
from safetensors.torch import load_file
from test_adapter import Interrupted, log_ratio, make_any, rows_of, texts
from torch import Tensor, nn

from headwright.configs import UserError
from headwright.configs.load import build, load_run
from headwright.data.batch import pack
from headwright.data.harvest import harvest, open_store
from headwright.data.sampling import Policy
from headwright.data.small_model import cut_target, is_tied
from headwright.data.target import EarlyExit, Target
from headwright.eval.decode import decode_plain, generate, speculate
from headwright.eval.settings import Settings
from headwright.heads.base import Context, DraftHead
from headwright.heads.draft_model import Config
from headwright.heads.draft_tree import TreeShape
from headwright.heads.export import export_run
from headwright.heads.saved import load_head, save_head
from headwright.train import loop
from headwright.train.run import train

SHAPES = [TreeShape("chain", 3, 1, 3), TreeShape("dynamic", 3, 2, 6)]
PROMPTS = [[5, 80, 12, 40], [7, 7, 9], [200, 1, 100, 30, 60, 90]]


@pytest.fixture(scope="module")
def target() -> Target:
    """A target that no test changes."""
    return make_target(taps=TAPS)


def stirred(head: DraftHead, seed: int = 4) -> DraftHead:
    """Weights that are not the target's any more."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.05)
    return head.eval()


def small_dir(folder, vocab: int = VOCAB, tokenizer=None, **changes):
    """A small model's directory."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "head_dim": 4, **changes}
    make_model(seed=3, vocab=vocab, **sizes).save_pretrained(folder)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    return folder


# Where it comes from


@pytest.mark.parametrize(
    ("layers", "kept"), [(1, [0]), (2, [0, 7]), (3, [0, 4, 7]), (4, [0, 2, 5, 7]), (7, [0, 1, 2, 4, 5, 6, 7])]
)
def test_cut_target_keeps_evenly_spread_layers(target, layers, kept):
    small = cut_target(target, layers)
    theirs, ours = target.model.state_dict(), small.model.state_dict()
    assert small.spec.num_layers == layers
    assert small.dtype == torch.float32
    for place, layer in enumerate(kept):
        for name, weight in theirs.items():
            if name.startswith(f"model.layers.{layer}."):
                assert torch.equal(ours[name.replace(f"layers.{layer}.", f"layers.{place}.")], weight)
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        assert torch.equal(ours[name], theirs[name])
        assert ours[name].data_ptr() != theirs[name].data_ptr()


def test_first_layers_alone_are_an_early_exit(target):
    """One layer: what the target says after one layer."""
    ids = torch.tensor([PROMPTS[2]])
    small, exit_ = cut_target(target, 1), EarlyExit(target, 1)
    assert torch.equal(small.logits(small.features(ids).last_BND), exit_.logits(exit_.features(ids).last_BND))


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "mistral", "qwen3"])
def test_kinds_of_layers_go_with_them(family):
    """A target of sliding and full layers: each kept layer is of the kind that it was."""
    target = make_target(family)
    small, kept = cut_target(target, 3), [0, 4, 7]
    types = getattr(target.text, "layer_types", None)
    assert getattr(small.text, "layer_types", None) == (types and [types[place] for place in kept])
    head = make_any("draft_model", target, layers=3).eval()
    assert speculate(target, head, PROMPTS[0], SHAPES[0], 12).tokens == decode_plain(target, PROMPTS[0], 12).tokens


@pytest.mark.parametrize("layers", [8, 9])
def test_too_many_layers_are_refused(target, layers):
    with pytest.raises(UserError, match=rf"head\.layers {layers}: the target has 8, a draft model needs fewer"):
        make_any("draft_model", target, layers=layers)


@pytest.mark.parametrize(("key", "value"), [("steps", 2), ("layers", 0)])
def test_impossible_keys_are_refused(key, value):
    with pytest.raises(UserError, match=f"{key}"):
        build(Config, {"kind": "draft_model", key: value}, "test")


def test_a_directory_is_loaded(target, tmp_path):
    """Its weights and its own width; once saved, the head needs the directory no more."""
    folder = small_dir(tmp_path / "small")
    head = make_any("draft_model", target, model=str(folder)).eval()
    weights = load_file(folder / "model.safetensors")
    assert torch.equal(head.small.lm_head.weight, weights["lm_head.weight"])
    assert head.config.described["hidden_size"] == 16
    save_head(head, tmp_path / "head")
    shutil.rmtree(folder)
    again = load_head(tmp_path / "head", target).eval()
    for shape in SHAPES:
        ours, theirs = (speculate(target, each, PROMPTS[1], shape, 16) for each in (head, again))
        assert (ours.tokens, ours.accepted) == (theirs.tokens, theirs.accepted)


def test_another_tokenizer_is_refused(target, tmp_path):
    folder = small_dir(
        tmp_path / "small", tokenizer=make_tokenizer(special=["<|endoftext|>", "<|im_end|>", "<|other|>"])
    )
    with pytest.raises(UserError, match=r"its tokenizer is not that of tiny-llama .* a draft model must share it"):
        make_any("draft_model", target, model=str(folder))


def test_a_shorter_context_is_refused(target, tmp_path):
    folder = small_dir(tmp_path / "small", max_position_embeddings=128)
    with pytest.raises(UserError, match=r"its context of 128 is shorter than the target's \(512\)"):
        make_any("draft_model", target, model=str(folder))


def test_a_missing_directory_is_refused(target, tmp_path):
    with pytest.raises(UserError, match=r"no such model directory"):
        make_any("draft_model", target, model=str(tmp_path / "none"))


def test_a_model_with_fewer_rows_needs_a_smaller_vocabulary(target, tmp_path):
    """As Qwen2.5's sizes pad their tables differently: the rows beyond are of no token."""
    with pytest.raises(UserError, match=r"264 tokens, and the draft vocabulary reaches to token 271: set vocab\.size"):
        make_any("draft_model", target, model=str(small_dir(tmp_path, vocab=264)))


def test_a_model_with_more_rows_drafts_the_target_s_tokens(target, tmp_path):
    head = make_any("draft_model", target, model=str(small_dir(tmp_path, vocab=288))).eval()
    with torch.no_grad():
        head.small.lm_head.weight[VOCAB:] *= 8
    assert speculate(target, head, PROMPTS[0], SHAPES[0], 20).tokens == decode_plain(target, PROMPTS[0], 20).tokens


# What it learns


def plain_loss(head: DraftHead, target: Target, documents, drop: bool) -> tuple[float, int]:
    """KL by hand: each document through transformers, alone; target and model over the draft vocabulary."""
    total, rows, ids_W = 0.0, 0, head.vocab.ids_W
    with torch.no_grad():
        for document in documents:
            p, q = (model(document.ids_T[None]).logits[0] for model in (make_model(), head.small.model))
            for t, _ in rows_of(document, 1):
                if drop and int(p[t + 1].argmax()) not in ids_W:
                    continue
                total += float(log_ratio(p[t + 1, ids_W], q[t + 1, ids_W]))
                rows += 1
    return total, rows


@pytest.mark.parametrize(("size", "out_of_vocab"), [(None, "drop"), (100, "drop"), (100, "renormalise")])
def test_loss_is_the_kl_of_its_logits(target, size, out_of_vocab):
    documents = texts(target, 3)
    head = stirred(make_any("draft_model", target, size, layers=3, out_of_vocab=out_of_vocab))
    out = head.loss(pack(documents), target)
    wanted, rows = plain_loss(head, target, documents, out_of_vocab == "drop")
    assert out.total.item() == pytest.approx(wanted, rel=1e-4)
    assert int(out.metrics["loss_0"][1]) == rows > 5
    assert wanted > 1


def test_every_weight_learns(target):
    """Tables, layers and norms, and nothing of the target's."""
    head = make_any("draft_model", target, layers=2)
    head.loss(pack(texts(target)), target).total.backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in head.parameters())
    assert len(list(head.parameters())) == len(list(head.small.model.parameters())) == 3 + 2 * 9
    assert not any(weight.requires_grad for weight in target.model.parameters())


def test_agreement_and_ranks_are_of_its_own_logits(target):
    """Teacher-forced: its guess after the text so far, at any depth."""
    documents = texts(target, 2)
    head = stirred(make_any("draft_model", target, 150))
    right, ranks = (call(pack(documents), target, 3) for call in (head.agreement, head.ranks))
    start, seen = 0, 0
    for document in documents:
        with torch.no_grad():
            said = head.small.model(document.ids_T[None]).logits[0][:, head.vocab.ids_W]
        for t, i in rows_of(document, 3):
            token = int(document.ids_T[t + 2 + i])
            order = head.vocab.ids_W[said[t + 1 + i].argsort(descending=True)].tolist()
            assert bool(right[start + t, i]) == (order[0] == token)
            assert int(ranks[start + t, i]) == (order.index(token) if token in order else -1)
            seen += 1
        start += len(document.ids_T)
    assert seen > 20


# How it drafts


@pytest.mark.parametrize("size", [None, 90])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_text_is_the_target_s_own(target, size, shape):
    head = stirred(make_any("draft_model", target, size, layers=6))
    for prompt in PROMPTS:
        out = speculate(target, head, prompt, shape, 24)
        assert out.tokens == decode_plain(target, prompt, 24).tokens
    assert sum(out.drafted) > 0


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_batch_of_texts_is_each_alone(target, shape):
    head = stirred(make_any("draft_model", target, layers=5))
    outcome = generate(target, head, PROMPTS, Settings(shape, 18, Policy(), batch=2))
    for prompt, out in zip(PROMPTS, outcome.generations):
        alone = speculate(target, head, prompt, shape, 18)
        assert (out.tokens, out.accepted) == (alone.tokens, alone.accepted)


def chain(head: DraftHead, target: Target, prompt: list[int], count: int) -> list[int]:
    """The head's own greedy chain behind a prompt."""
    features = target.features(torch.tensor([prompt[:-1]]))
    context = Context(
        target,
        torch.tensor([prompt[1:]]),
        features.taps_BNKD,
        features.last_BND,
        Policy(),
        lambda: torch.zeros(1, dtype=torch.float64),
        texts=[prompt],
    )
    state = head.start(1, len(prompt) + count)
    tree = head.propose(state, context, TreeShape("chain", count, 1, count))
    assert state.lengths == [len(prompt)]
    return tree.tokens_BN[0, 1:].tolist()


def continued(model: nn.Module, prompt: list[int], count: int, ids_W: Tensor | None = None) -> list[int]:
    """transformers, token by token, without a cache."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            said = model(torch.tensor([tokens])).logits[0, -1]
        tokens.append(int(said.argmax() if ids_W is None else ids_W[said[ids_W].argmax()]))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("size", [None, 60])
def test_drafts_are_the_model_s_own_continuation(target, size):
    head = stirred(make_any("draft_model", target, size, layers=3))
    ids_W = None if size is None else head.vocab.ids_W
    for prompt in PROMPTS:
        assert chain(head, target, prompt, 5) == continued(head.small.model, prompt, 5, ids_W)


# Saved


@pytest.mark.parametrize("tied", [True, False])
def test_tied_tables_are_saved_once_and_tied_again(tied, tmp_path):
    target = make_target(taps=TAPS, tie_word_embeddings=tied)
    head = stirred(make_any("draft_model", target, layers=2))
    assert is_tied(head.small) == tied
    save_head(head, tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert ("model.lm_head.weight" in names) != tied
    assert "model.model.embed_tokens.weight" in names
    assert len(names) == 3 + 2 * 9 - tied + 1  # and the vocabulary
    again = load_head(tmp_path, target).eval()
    assert is_tied(again.small) == tied
    own, other = (each.small.model.state_dict() for each in (head, again))
    assert own.keys() == other.keys()
    for name in own:
        assert torch.equal(own[name], other[name]), name
    for prompt in PROMPTS:
        assert chain(again, target, prompt, 5) == chain(head, target, prompt, 5)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_tables_stay_tied_in_training(tied):
    target = make_target(taps=TAPS, tie_word_embeddings=tied)
    head = make_any("draft_model", target, layers=2)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    for _ in range(2):
        head.loss(pack(texts(target)), target).total.backward()
        optimizer.step()
    tables = head.small.lm_head.weight, head.small.model.get_input_embeddings().weight
    assert torch.equal(*tables) == tied
    assert not torch.equal(tables[0], target.lm_head.weight)


def test_a_missing_tensor_is_refused(target, tmp_path):
    """As for every head: weights and description must fit."""
    save_head(make_any("draft_model", target, layers=2), tmp_path)
    raw = json.loads((tmp_path / "head.json").read_text(encoding="utf-8"))
    raw["head"]["described"]["num_hidden_layers"] = 3
    (tmp_path / "head.json").write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(UserError, match="do not fit together"):
        load_head(tmp_path, target)


# The whole run


@pytest.fixture(scope="module")
def make_run(model_dir, chats, tmp_path_factory):
    """Runs over one harvest; the head reads no state, so that any tap will do."""
    runs = tmp_path_factory.mktemp("runs")

    def make(name: str, **head):
        run = tiny_run(
            model_dir,
            chats,
            runs,
            corpus={"sources": [{"path": str(chats), "samples": 1}], "held_out": 0.25, "max_length": 256},
            answers={"by": "corpus"},
            harvest={"taps": [3], "tokens_per_batch": 512, "dtype": "float32"},
            head={"kind": "draft_model", "layers": 2, **head},
            train={"epochs": 1, "tokens_per_batch": 512, "lr": 1e-3, "log_every": 1, "evals": 2, "saves": 4},
            export={"prompts": 3, "engines": ["huggingface"]},
        )
        run.name, run.features = name, None if name == "first" else "first"
        return run

    harvest(make("first"))
    return make


def with_all_tokens(run):
    """The same run with the target's whole vocabulary."""
    run.vocab = replace(run.vocab, size=None)
    return run


@pytest.fixture(scope="module")
def done(make_run):
    """A trained and exported run."""
    run = with_all_tokens(make_run("first"))
    train(run)
    export_run(run)
    return run


def test_transformers_reads_the_export(done):
    """By itself: same logits, same text from its own generate; drafts equal those of the kept head."""
    folder = done.directory / "export" / "huggingface"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    target = Target.load(done.target, (3,))
    head = load_head(done.directory / "head", target).eval()
    ids = torch.tensor([PROMPTS[2]])
    assert model.config.num_hidden_layers == 2
    with torch.no_grad():
        assert torch.equal(model(ids).logits, head.small.model(ids).logits)
    for prompt in PROMPTS:
        assert chain(head, target, prompt, 5) == continued(model, prompt, 5)
    plain = transformers.GenerationConfig(do_sample=False, max_new_tokens=4, pad_token_id=0)
    assert model.generate(ids, generation_config=plain)[0, 6:].tolist() == continued(model, PROMPTS[2], 4)


def test_export_says_how_it_is_served(done):
    folder = done.directory / "export" / "huggingface"
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "SERVE.md",
        "headwright.json",
    }
    notes = (folder / "SERVE.md").read_text(encoding="utf-8")
    assert '"method": "draft_model"' in notes
    assert "--speculative-algorithm STANDALONE" in notes
    proof = json.loads((folder / "headwright.json").read_text(encoding="utf-8"))
    assert proof["read_back"]["equal"] == proof["read_back"]["drafted"] == 15
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert (config["model_type"], config["dtype"], config["torch_dtype"]) == ("llama", "float32", "float32")


def test_export_does_not_say_that_its_embedding_is_missing(done):
    notes = (done.directory / "export" / "huggingface" / "SERVE.md").read_text(encoding="utf-8")
    assert "is not in this directory" not in notes


def test_other_engines_are_refused(target):
    with pytest.raises(UserError, match=r"export\.engines 'vllm': a draft model exports as: huggingface"):
        make_any("draft_model", target).export("vllm")


def test_a_tied_export_holds_one_table(tmp_path):
    target = make_target(taps=TAPS, tie_word_embeddings=True)
    export = make_any("draft_model", target).export("huggingface")
    assert "lm_head.weight" not in export.tensors
    assert export.config["tie_word_embeddings"] is True
    assert {name: tuple(tensor.shape) for name, tensor in export.tensors.items()} == export.shapes


def starts_as(monkeypatch, run) -> dict[str, Tensor]:
    """The weights that the first step of a training would see."""
    found = {}

    def look(strategy, *_):
        found.update({name: value.clone() for name, value in strategy.head.state_dict().items()})
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(loop, "one_step", look)
        with pytest.raises(Interrupted):
            train(run)
    return found


def test_the_kept_config_starts_where_the_first_did(monkeypatch, done, make_run, tmp_path):
    """runs/NAME/config.yaml under another name: the same run again."""
    path = tmp_path / "again.yaml"
    text = (done.directory / "config.yaml").read_text(encoding="utf-8").replace("name: first", "name: again")
    path.write_text(text, encoding="utf-8")
    again = load_run(path)
    again.features = "first"
    one, two = starts_as(monkeypatch, with_all_tokens(make_run("fresh"))), starts_as(monkeypatch, again)
    assert all(torch.equal(one[name], two[name]) for name in one)


NOT_RESUMED = "`described` has integer keys (id2label), a checkpoint keeps strings: every continued training is refused"


def test_finished_training_again_changes_nothing(make_run, done):
    """The description that the first training filled in is no other run."""
    before = (done.directory / "head" / "model.safetensors").read_bytes()
    run = with_all_tokens(make_run("first"))
    train(run)
    assert (done.directory / "head" / "model.safetensors").read_bytes() == before


def test_killed_and_resumed_equals_straight(monkeypatch, done, make_run):
    """The same bits, after a crash behind the first checkpoint."""
    real, count = loop.one_step, iter(range(10**6))

    def dying(*arguments):
        if next(count) == 2:
            raise Interrupted
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "one_step", dying)
        with pytest.raises(Interrupted):
            train(with_all_tokens(make_run("killed")))
    run = with_all_tokens(make_run("killed"))
    assert list((run.directory / "checkpoints").glob("step-*"))
    train(run)
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (load_file(next(each.directory.glob(f"checkpoints/step-*/{name}"))) for each in (run, done))
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_any_tap_will_do(make_run):
    """Features keep one tap at least; the head reads none."""
    run = make_run("other")
    assert open_store(run, "train").manifest.taps == [3]
    assert run.head.choose_taps(8) == (8,)

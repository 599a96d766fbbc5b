"""The target: its states are Hugging Face's own, and a tree in one pass equals each of its paths alone."""

import pytest
import torch
from conftest import FAMILIES, TAPS, VOCAB, make_model, make_target, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from headwright.configs import UserError
from headwright.configs.schema import TargetConfig
from headwright.data.target import AttentionPlan, Target, choose_taps
from headwright.heads.eagle3 import Config

TARGETS = {family: make_target(family) for family in FAMILIES}
WINDOWED = [family for family in FAMILIES if getattr(TARGETS[family].text, "sliding_window", None)]


def close(mine: torch.Tensor, reference: torch.Tensor) -> None:
    """Equal in fp32, relative to the size of the states."""
    torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-4 * float(reference.abs().max()))


def random_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Any token ids."""
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def hugging_face(target: Target, ids: torch.Tensor):
    """The model's own output, under its own attention."""
    with target.attention("eager"):
        return target.model(input_ids=ids, output_hidden_states=True, use_cache=False)


def prefilled(target: Target, ids_BN: torch.Tensor, slots: int = 80):
    """A cache that holds `ids`, and the features of that prefill."""
    cache = target.new_cache(len(ids_BN), slots)
    features = target.extend(ids_BN, cache)
    cache.advance(ids_BN.shape[1])
    return cache, features


def test_the_families_cover_windows_and_caps():
    assert set(WINDOWED) >= {"gemma2", "gemma3", "mistral"}
    assert TARGETS["gemma2"].text.final_logit_softcapping
    assert TARGETS["gemma2"].text.attn_logit_softcapping


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 8, 30])
def test_states_and_logits_are_hugging_faces(family, length):
    target, ids = TARGETS[family], random_ids(2, length, seed=1)
    theirs = hugging_face(target, ids)
    cached = target.extend(ids, target.new_cache(2, length))
    for ours in (target.features(ids), cached):
        assert ours.taps_BNKD.shape == (2, length, len(TAPS), 32)
        for place, tap in enumerate(TAPS):
            close(ours.taps_BNKD[:, :, place], theirs.hidden_states[tap])
        close(ours.last_BND, theirs.hidden_states[-1])
        close(target.logits(ours.last_BND), theirs.logits)


def test_soft_cap_matters():
    """Without the cap the logits would differ: the test above would notice."""
    target = TARGETS["gemma2"]
    last = target.features(random_ids(1, 12)).last_BND * 20
    cap = target.text.final_logit_softcapping
    assert (target.logits(last) - target.lm_head(last)).abs().max() > 1
    assert target.logits(last).abs().max() <= cap


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("ids", [[5], [0, 3, 270], list(range(0, VOCAB, 7))])
def test_logits_of_some_ids(family, ids):
    target = TARGETS[family]
    last = target.features(random_ids(2, 9)).last_BND
    wanted = torch.tensor(ids)
    for _ in range(2):  # the second call reads what the first one kept
        close(target.logits(last, wanted), target.logits(last)[..., wanted])
    other = wanted.flip(0)
    close(target.logits(last, other), target.logits(last)[..., other])


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        ("GraniteConfig", {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5}),
        ("CohereConfig", {"logit_scale": 0.25}),
        ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 4}),
        ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ],
)
def test_other_scalings_are_reproduced(config, changes):
    import transformers

    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": None,
        "eos_token_id": 258,
        "pad_token_id": 258,
        "initializer_range": 0.2,
    }
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**shape, **changes))
    target = Target(model, make_tokenizer(), config, Config().choose_taps)
    assert target.taps == (2, 3, 4)
    ids = random_ids(1, 12)
    close(target.logits(target.features(ids).last_BND), hugging_face(target, ids).logits)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_tap_after_all_layers_is_the_state_before_the_final_norm(family):
    target = make_target(family, taps=(0, 8))
    ids = random_ids(1, 12)
    ours = target.features(ids)
    close(ours.taps_BNKD[:, :, 0], hugging_face(target, ids).hidden_states[0])
    with torch.no_grad():
        close(target.body.norm(ours.taps_BNKD[:, :, 1]), ours.last_BND)
    assert (ours.taps_BNKD[:, :, 1] - ours.last_BND).abs().max() > 0.1


def test_embed_is_the_unscaled_table():
    target = TARGETS["gemma2"]
    ids = random_ids(2, 3)
    assert torch.equal(target.embed(ids), target.model.get_input_embeddings().weight[ids])


# Trees


def random_tree(data, nodes: int) -> list[int]:
    """Parent of each node, -1 for the root's; parents come first."""
    return [-1] + [data.draw(st.integers(-1, i - 1)) for i in range(1, nodes)]


def path_to(parents: list[int], node: int) -> list[int]:
    """Nodes from the top to `node`."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def ancestry(parents: list[int]) -> torch.Tensor:
    """Which node sees which: itself and its ancestors."""
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        mask[node, path_to(parents, node)] = True
    return mask


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_tree_in_one_pass_is_each_path_alone(family, data):
    """Two ragged rows, each with its own tree, over prompts longer than the sliding window; then the same after keep."""
    target = TARGETS[family]
    lengths = [data.draw(st.integers(1, 24)), data.draw(st.integers(10, 24))]
    nodes = data.draw(st.integers(1, 9))
    seed = data.draw(st.integers(0, 99))
    prompts = [random_ids(1, length, seed + i)[0] for i, length in enumerate(lengths)]
    width = max(lengths)
    padded = torch.stack([torch.cat([p, torch.full((width - len(p),), 7)]) for p in prompts])
    cache = target.new_cache(2, width + 2 * nodes + 3)
    target.extend(padded, cache)
    cache.advance(lengths)
    texts = [prompt.tolist() for prompt in prompts]
    for turn in range(2):
        trees = [random_tree(data, nodes) for _ in range(2)]
        tokens = random_ids(2, nodes, seed + 50 + turn)
        depths = torch.tensor([[len(path_to(tree, node)) - 1 for node in range(nodes)] for tree in trees])
        positions = torch.tensor(cache.lengths)[:, None] + depths
        features = target.extend(tokens, cache, positions, torch.stack([ancestry(tree) for tree in trees]))
        for row, tree in enumerate(trees):
            paths = [path_to(tree, node) for node in range(nodes)]
            full = [torch.tensor(texts[row] + tokens[row, path].tolist()) for path in paths]
            alone = target.features(torch.nn.utils.rnn.pad_sequence(full, batch_first=True))
            ends = torch.arange(nodes), torch.tensor([len(ids) - 1 for ids in full])
            close(features.taps_BNKD[row], alone.taps_BNKD[ends])
            close(target.logits(features.last_BND[row]), target.logits(alone.last_BND[ends]))
            kept = path_to(tree, data.draw(st.integers(0, nodes - 1)))
            cache.keep(row, kept)
            texts[row] += tokens[row, kept].tolist()
    tokens = random_ids(2, 3, seed + 90)
    features = target.extend(tokens, cache)
    for row in range(2):
        alone = target.features(torch.tensor([texts[row] + tokens[row].tolist()]))
        close(features.last_BND[row], alone.last_BND[0, -3:])


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_batch_is_each_row_alone(family):
    target = TARGETS[family]
    lengths = [3, 17, 25, 11]
    ids = random_ids(4, 25, seed=3)
    cache = target.new_cache(4, 40)
    whole = target.extend(ids, cache)
    cache.advance(lengths)
    more = random_ids(4, 6, seed=4)
    after = target.extend(more, cache)
    right_padded = target.features(ids)
    for row, length in enumerate(lengths):
        own, first = prefilled(target, ids[row : row + 1, :length])
        close(whole.last_BND[row, :length], first.last_BND[0])
        close(right_padded.taps_BNKD[row, :length], first.taps_BNKD[0])
        close(after.taps_BNKD[row], target.extend(more[row : row + 1], own).taps_BNKD[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_selected_and_truncated_rows_go_on_as_if_alone(family):
    target = TARGETS[family]
    ids = random_ids(3, 20, seed=5)
    cache, _ = prefilled(target, ids)
    cache.select([2, 0])
    cache.truncate(0, 13)
    more = random_ids(2, 4, seed=6)
    after = target.extend(more, cache)
    for row, (source, length) in enumerate([(2, 13), (0, 20)]):
        alone = target.features(torch.cat([ids[source, :length], more[row]])[None])
        close(after.last_BND[row], alone.last_BND[0, -4:])


@pytest.mark.parametrize("family", ["llama", *WINDOWED])
def test_token_by_token_is_one_prefill(family):
    target = TARGETS[family]
    ids = random_ids(1, 30, seed=7)
    cache = target.new_cache(1, 30)
    steps = []
    for place in range(30):
        steps.append(target.extend(ids[:, place : place + 1], cache).last_BND)
        cache.advance(1)
    close(torch.cat(steps, 1), target.features(ids).last_BND)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 5, 31])
def test_a_beginning_is_what_its_mask_says(family, length):
    target, ids = TARGETS[family], random_ids(2, length, seed=8)
    among = torch.ones(2, length, length, dtype=torch.bool).tril()
    caches = [target.new_cache(2, 40) for _ in range(2)]
    plain, masked = target.extend(ids, caches[0]), target.extend(ids, caches[1], among_BNN=among)
    close(plain.taps_BNKD, masked.taps_BNKD)
    close(plain.last_BND, masked.last_BND)
    for keys, others in zip(caches[0].keys, caches[1].keys):
        close(keys, others)


def test_no_mask_is_made_for_a_long_prompt(monkeypatch):
    """It would be larger than all the states."""
    monkeypatch.setattr(AttentionPlan, "mask_BNS", property(lambda plan: pytest.fail("a mask was made")))
    target, ids = TARGETS["llama"], random_ids(1, 64)
    cache = target.new_cache(1, 80)
    close(target.extend(ids, cache).last_BND, target.features(ids).last_BND)


@pytest.mark.parametrize("family", WINDOWED)
def test_window_matters(family):
    """A token beyond every layer's window of one layer changes nothing there, so the tests above test the window."""
    target = TARGETS[family]
    ids = random_ids(1, 9 * 9 + 3)
    other = ids.clone()
    other[0, 0] = (ids[0, 0] + 1) % VOCAB
    one, two = (target.features(x).taps_BNKD[0, -1, 0] for x in (ids, other))  # after one layer
    assert torch.equal(one, two)


# Refusals


@pytest.mark.parametrize("taps", [[], [3, 1], [1, 1], [-1, 2], [2, 9], [100]])
def test_bad_taps(taps):
    with pytest.raises(UserError, match=r"harvest\.taps .* give ascending, distinct numbers from 0 to 8"):
        choose_taps(taps, 8, "x")


def test_auto_taps():
    assert choose_taps(Config().choose_taps, 32, "x") == (2, 16, 29)
    assert choose_taps(Config().choose_taps, 7, "x") == (2, 3, 4)
    with pytest.raises(UserError, match=r"has 6 layers: harvest\.taps auto needs 7"):
        choose_taps(Config().choose_taps, 6, "x")


def test_missing_directory(tmp_path):
    for model in (tmp_path / "none", tmp_path):
        with pytest.raises(UserError, match="no such model directory"):
            Target.load(TargetConfig(str(model)))


@pytest.mark.parametrize("damage", ["no weights", "not JSON", "cut weights", "no tokenizer", "unknown type"])
def test_broken_directory(tmp_path, damage):
    make_model().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    if damage == "no weights":
        weights.unlink()
    elif damage == "not JSON":
        (tmp_path / "config.json").write_text("{")
    elif damage == "cut weights":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "no tokenizer":
        for path in tmp_path.glob("tokenizer*"):
            path.unlink()
    else:
        (tmp_path / "config.json").write_text('{"model_type": "nonesuch", "architectures": ["Nonesuch"]}')
    with pytest.raises(UserError, match=r"target\.model"):
        Target.load(TargetConfig(str(tmp_path)), TAPS)


def test_missing_tensor_is_refused(tmp_path):
    """transformers fills a tensor that the file lacks with noise: such a model is not the target."""
    from safetensors.torch import load_file, save_file

    make_model().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["model.layers.3.mlp.up_proj.weight"]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError):
        Target.load(TargetConfig(str(tmp_path)), TAPS)


def test_loaded_model_is_the_saved_one(model_dir):
    target = Target.load(TargetConfig(str(model_dir), dtype="float32"), TAPS)
    fresh = make_target()
    assert target.spec.fingerprint == fresh.spec.fingerprint
    assert target.spec.eos_token_ids == (258, target.tokenizer.eos_token_id)  # the model's and the tokenizer's
    ids = random_ids(1, 9)
    assert torch.equal(target.features(ids).last_BND, fresh.features(ids).last_BND)
    assert not any(weight.requires_grad for weight in target.model.parameters())


def test_fingerprint_changes_with_the_weights():
    prints = {make_target(seed=seed).spec.fingerprint for seed in range(3)}
    assert len(prints) == 3


def test_logits_that_are_not_reproduced_are_refused(monkeypatch):
    original = Target.logits
    monkeypatch.setattr(Target, "logits", lambda self, last, ids=None: original(self, last, ids) * 1.01)
    with pytest.raises(UserError, match=r"the logits differs from Hugging Face's own"):
        make_target()


def test_model_with_an_unknown_last_step_is_refused():
    """A model that does something between lm_head's input and its logits that the contract does not know."""
    model = make_model()
    forward = model.forward

    def shifted(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = out.logits + torch.arange(VOCAB) * 0.05
        return out

    model.forward = shifted
    with pytest.raises(UserError, match="the logits differs"):
        Target(model, make_tokenizer(), "odd", TAPS)


def test_model_whose_layers_compute_something_else_is_refused(monkeypatch):
    """An attention that ignores what ours is told shows in the first tap behind it."""
    monkeypatch.setattr(
        AttentionPlan, "mask", lambda self, window, groups, device: self.mask_BNS.repeat(1, groups, 1)[:, None]
    )
    make_target("llama")
    with pytest.raises(UserError, match="differs from Hugging Face's own"):
        make_target("mistral")


def test_nan_weights_are_refused():
    model = make_model()
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match="differs from"):
        Target(model, make_tokenizer(), "nan", TAPS)


def test_model_without_decoder_layers_is_refused():
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=7, n_head=4, bos_token_id=None, eos_token_id=258
    )
    with pytest.raises(UserError, match="no list of decoder layers"):
        Target(transformers.GPT2LMHeadModel(config), make_tokenizer(), "gpt2", (1, 2))


def test_nothing_is_left_behind():
    """The model's own attention is back after each call, also after one that failed."""
    target = make_target()
    before = target.text._attn_implementation
    target.features(random_ids(1, 4))
    assert target.text._attn_implementation == before
    with pytest.raises(IndexError):
        target.features(torch.full((1, 3), VOCAB + 5))
    assert target.text._attn_implementation == before
    reference = hugging_face(target, random_ids(1, 4)).logits
    close(target.logits(target.features(random_ids(1, 4)).last_BND), reference)


def test_four_bits_need_a_gpu_and_a_library(tmp_path):
    """Said before anything is loaded."""
    with pytest.raises(UserError, match=r"needs a CUDA GPU and bitsandbytes"):
        Target.load(TargetConfig(str(tmp_path / "nowhere"), quantize="nf4"))

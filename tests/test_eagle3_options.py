"""Every combination of EAGLE-3's options is served as it was trained, or refused with the reason."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from conftest import TAPS, make_target
from safetensors.torch import load_file
from test_adapter import make_any, texts

from headwright.configs import UserError
from headwright.data.batch import pack
from headwright.data.target import Target
from headwright.eval.decode import decode_plain, speculate
from headwright.heads.base import Case, DraftHead
from headwright.heads.draft_tree import TreeShape
from headwright.heads.eagle3_plain import PlainEagle3
from headwright.heads.export import head_drafts, read_back, shared_tables, with_dtype, write_directory

NORMS = {"none": (False, False), "fc_norm": (True, False), "norm_before_fc": (False, True)}
COMPUTED = list(itertools.product(NORMS, *[(False, True)] * 3, (1, 3), (None, 9)))
SIDES = [("own", None, 100), ("own", 48, 100), ("shared", None, None), ("own", None, None), ("own", 16, None)]
WINDOW = 9


@pytest.fixture(scope="module")
def target() -> Target:
    """A target that no test changes."""
    return make_target()


def options_of(
    norm: str, norm_output: bool, before_residual: bool, qk_norm: bool, layers: int, window: int | None
) -> dict:
    """A combination as keys of the config."""
    fc_norm, norm_before_fc = NORMS[norm]
    return {
        "fc_norm": fc_norm,
        "norm_before_fc": norm_before_fc,
        "norm_output": norm_output,
        "norm_before_residual": before_residual,
        "qk_norm": qk_norm,
        "layers": layers,
        "window": window,
    }


def make(target: Target, size: int | None = 100, seed: int = 1, **options) -> DraftHead:
    """A random head with norms away from one and sharp attention, so that every option shows."""
    head = make_any("eagle3", target, size, seed, **options).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if "norm" in name:
                weight.add_(torch.rand(weight.shape, generator=generator) * 1.5)
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(4)
    return head


def cases(head: DraftHead) -> list[Case]:
    """Contexts shorter and longer than the window."""
    generator = torch.Generator().manual_seed(4)
    return [
        Case(
            torch.randint(272, (count,), generator=generator).tolist(),
            torch.randn(count, len(head.taps), 32, generator=generator) * 3,
            torch.zeros(count, 32),
        )
        for count in (1, 23, 8)
    ]


def written(head: DraftHead, engine: str, folder: Path) -> PlainEagle3:
    """The directory of an engine, read back independently."""
    write_directory(folder, with_dtype(head.export(engine), torch.float32))
    return PlainEagle3.read(folder)


def reason(engine: str, options: dict) -> str | None:
    """Why an engine does not serve a combination, by the contracts: SGLang knows neither the residual after the norm, nor
    normed queries and keys, nor a window of a head's own; vLLM knows all of them.
    """
    if engine == "portable":
        unknown = [name for name in ("norm_before_residual", "qk_norm", "window") if options[name]]
        return f"SGLang does not compute head.{unknown[0]}: export.engines=[vllm]" if unknown else None
    return None


def same_export(head: DraftHead) -> bool:
    """Whether both engines get the same tensors and config."""
    one, two = head.export("portable"), head.export("vllm")
    return one.config == two.config and all(
        torch.equal(one.tensors[k], two.tensors[k]) for k in one.tensors | two.tensors
    )


def test_every_combination_is_served_or_refused(target, tmp_path):
    """Tokens and probabilities of the independent reader are those of the head; tables and vocabularies alternate."""
    served, refused, tables = 0, 0, shared_tables(target)
    for number, combination in enumerate(COMPUTED):
        options = options_of(*combination)
        lm_head, width, size = SIDES[number % len(SIDES)]
        head = make(target, size, number, lm_head=lm_head, hidden_size=width, **options)
        for engine in ("portable", "vllm"):
            why = reason(engine, options)
            if why is not None:
                with pytest.raises(UserError) as caught:
                    head.export(engine)
                assert why in str(caught.value)
                refused += 1
                continue
            served += 1
            if engine == "vllm" and reason("portable", options) is None:
                assert same_export(head)
                continue
            reader = written(head, engine, tmp_path / str(number))
            for case in cases(head)[:2]:
                drafts, ours = reader.draft(tables, case, 5), head_drafts(head, target, case)
                assert drafts.tokens == ours.tokens, (combination, engine)
                assert drafts.logprobs == pytest.approx(ours.logprobs, abs=1e-3), (combination, engine)
                assert len(drafts.tokens) == 5
    assert served + refused == 2 * len(COMPUTED) == 192
    assert (served, refused) == (12 + 96, 84)


@pytest.mark.parametrize(("lm_head", "width", "size"), SIDES)
@pytest.mark.parametrize("norm", NORMS)
def test_tensors_and_shapes_are_those_of_the_contract(target, lm_head, width, size, norm):
    """vLLM 2.3 and SGLang 1.3, written down anew."""
    head = make(
        target, size, lm_head=lm_head, hidden_size=width, intermediate_size=40, qk_norm=True, layers=3, **norms(norm)
    )
    export = head.export("vllm")
    H, D, W = width or 32, 32, size or 272
    heads = {32: (4, 2), 48: (6, 3), 16: (2, 1)}[H]
    wanted = {"fc.weight": (H, 3 * D), "norm.weight": (H,)}
    for name, inputs in (("midlayer", 2 * H), ("layers.1", H), ("layers.2", H)):
        wanted |= {
            f"{name}.self_attn.q_proj.weight": (heads[0] * 8, inputs),
            f"{name}.self_attn.k_proj.weight": (heads[1] * 8, inputs),
            f"{name}.self_attn.v_proj.weight": (heads[1] * 8, inputs),
            f"{name}.self_attn.o_proj.weight": (H, heads[0] * 8),
            f"{name}.self_attn.q_norm.weight": (8,),
            f"{name}.self_attn.k_norm.weight": (8,),
            f"{name}.mlp.gate_proj.weight": (40, H),
            f"{name}.mlp.up_proj.weight": (40, H),
            f"{name}.mlp.down_proj.weight": (H, 40),
            f"{name}.input_layernorm.weight": (H,),
            f"{name}.hidden_norm.weight": (H,),
            f"{name}.post_attention_layernorm.weight": (H,),
        }
    wanted |= {f"fc_norm.{k}.weight": (D,) for k in range(3)} if norm == "fc_norm" else {}
    wanted |= {"input_norm.weight": (3 * D,)} if norm == "norm_before_fc" else {}
    wanted |= {"lm_head.weight": (W, H)} if lm_head == "own" else {}
    wanted |= {"embed_tokens.weight": (272, H)} if width else {}
    wanted |= {"d2t": (W,), "t2d": (272,)} if size else {}
    assert {name: tuple(tensor.shape) for name, tensor in export.tensors.items()} == wanted
    assert export.shapes == wanted
    for number in (1, 2):  # vLLM reads one, SGLang the other
        pair = [export.tensors[f"layers.{number}.{name}.weight"] for name in ("input_layernorm", "hidden_norm")]
        assert torch.equal(*pair)
    assert not torch.equal(*(export.tensors[f"midlayer.{name}.weight"] for name in ("input_layernorm", "hidden_norm")))


def norms(name: str) -> dict:
    """Which norms stand before the fusion."""
    return dict(zip(("fc_norm", "norm_before_fc"), NORMS[name]))


@pytest.mark.parametrize(("lm_head", "width", "size"), SIDES)
def test_config_keys_are_those_that_engines_read(target, lm_head, width, size):
    head = make(target, size, lm_head=lm_head, hidden_size=width, norm_output=True, layers=2)
    config = head.export("portable").config
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["model_type"] == "llama"
    assert config["vocab_size"] == 272
    assert config["draft_vocab_size"] == (None if lm_head == "shared" else size or 272)
    assert (config["hidden_size"], config["num_hidden_layers"]) == (width or 32, 2)
    assert config["head_dim"] * config["num_attention_heads"] == (width or 32)
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert config["tie_word_embeddings"] is config["attention_bias"] is False
    assert config["max_position_embeddings"] == 512
    assert config["num_aux_hidden_states"] == 3
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6]
    assert config["eagle_config"] == {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": [0, 2, 5],
        "norm_before_fc": False,
    }
    assert ("target_hidden_size" in config) == (width is not None)  # null would crash SGLang
    assert config.get("target_hidden_size", 32) == 32
    assert (config["norm_output"], config["norm_before_residual"], config["fc_norm"]) == (True, False, True)
    assert not {"sliding_window", "layer_types", "num_aux_layers"} & config.keys()
    assert json.loads(json.dumps(config)) == config


def test_config_of_what_only_vllm_reads(target):
    """Qwen3's class: its own name for the width of fc, and a window for each layer."""
    config = make(target, qk_norm=True, window=WINDOW, layers=2, norm_before_residual=True).export("vllm").config
    assert config["architectures"] == ["Eagle3Qwen3ForCausalLM"]
    assert (config["model_type"], config["num_aux_layers"], config["num_aux_hidden_states"]) == ("qwen3", 3, 3)
    assert (config["sliding_window"], config["layer_types"]) == (WINDOW, ["sliding_attention"] * 2)
    assert config["norm_before_residual"] is True
    llama = make(target, norm_before_residual=True).export("vllm").config
    assert (llama["architectures"], llama["norm_before_residual"]) == (["LlamaForCausalLMEagle3"], True)
    assert "num_aux_layers" not in llama


def test_norm_before_fc_stands_in_both_places(target):
    """SGLang's nested key wins over the one at the top."""
    config = make(target, fc_norm=False, norm_before_fc=True).export("portable").config
    assert config["norm_before_fc"] is config["eagle_config"]["norm_before_fc"] is True
    assert config["fc_norm"] is False


FAULTS = {  # a key that an engine must not misread, and a head with which it shows
    "norm_output": ({"norm_output": True}, {"norm_output": False}),
    "norm_before_residual": ({"norm_before_residual": True}, {"norm_before_residual": False}),
    "fc_norm": ({}, {"fc_norm": False}),
    "norm_before_fc": ({"fc_norm": False, "norm_before_fc": True}, {"norm_before_fc": False}),
    "layers": ({"layers": 3}, {"num_hidden_layers": 2}),
    "window": ({"qk_norm": True, "window": WINDOW}, {"sliding_window": 23}),
    "window by one": ({"qk_norm": True, "window": WINDOW}, {"sliding_window": WINDOW + 1}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_misread_option_is_found_by_drafting(target, tmp_path, fault):
    """The comparison above can tell: the same directory with one key changed drafts otherwise."""
    options, change = FAULTS[fault]
    head = make(target, **options)
    read_back(written(head, "vllm", tmp_path), head, target, cases(head), torch.float32)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change), encoding="utf-8")
    with pytest.raises(UserError, match="do not serve this"):
        read_back(PlainEagle3.read(tmp_path), head, target, cases(head), torch.float32)


def test_a_missing_query_norm_is_found_by_drafting(target, tmp_path):
    """SGLang would drop them without a word: why it is not offered such heads."""
    head = make(target, qk_norm=True)
    reader = written(head, "vllm", tmp_path)
    del reader.w["midlayer.self_attn.q_norm.weight"]
    with pytest.raises(UserError, match="do not serve this"):
        read_back(reader, head, target, cases(head), torch.float32)


# What is refused


@pytest.mark.parametrize("engine", ["portable", "vllm"])
def test_a_shared_lm_head_of_a_reduced_vocabulary_is_refused(target, engine):
    with pytest.raises(
        UserError, match=r"over the full vocabulary only: train with vocab\.size=null, or with head\.lm_head=own"
    ):
        make(target, 100, lm_head="shared").export(engine)


@pytest.mark.parametrize("taps", [(4,), (0, 4), (3, 8)], ids=str)
def test_states_that_sglang_cannot_capture_are_refused(taps, tmp_path):
    """vLLM takes them, and drafts as the head does."""
    target = make_target(taps=taps)
    head = make(target)
    with pytest.raises(UserError, match=r"the portable format needs two or more, from 1 to 7"):
        head.export("portable")
    proof = read_back(written(head, "vllm", tmp_path), head, target, cases(head), torch.float32)
    assert proof.equal == proof.drafted == 15
    assert json.loads((tmp_path / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == list(taps)


def test_a_head_as_wide_as_all_states_is_refused(target):
    """`fc` is applied only if the captured width differs from the embedding's (sglang_contract.md 1.3)."""
    with pytest.raises(UserError):
        make(target, hidden_size=96).export("portable")


@pytest.mark.parametrize("engine", ["sglang", "medusa", ""])
def test_unknown_engines_name_the_known(target, engine):
    with pytest.raises(UserError, match=r"an EAGLE-3 head exports as: portable, vllm"):
        make(target).export(engine)


def test_newer_options_are_warned_of(target):
    """By name, and only where there are some."""
    assert make(target, fc_norm=False).export("portable").warnings == []
    [warning] = make(target, norm_output=True).export("portable").warnings
    assert warning.startswith("head.fc_norm, head.norm_output: ")


# Training and drafting with each option


OPTIONS = [
    {"fc_norm": False},
    {"fc_norm": False, "norm_before_fc": True},
    {"norm_output": True},
    {"norm_before_residual": True},
    {"qk_norm": True},
    {"layers": 2},
    {"window": 4},
    {"lm_head": "shared"},
    {"hidden_size": 48},
    {"hidden_size": 16, "layers": 2, "norm_output": True, "qk_norm": True, "window": 5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options))
def test_text_is_the_target_s_own(target, options):
    head = make(target, **options)
    for shape in (TreeShape("chain", 3, 1, 3), TreeShape("dynamic", 3, 2, 6)):
        out = speculate(target, head, [5, 80, 12, 40, 7], shape, 20)
        assert out.tokens == decode_plain(target, [5, 80, 12, 40, 7], 20).tokens


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options))
def test_every_parameter_learns(target, options):
    """A tensor without gradient would be exported as it was made."""
    head = make_any("eagle3", target, None, steps=2, **options)
    head.loss(pack(texts(target, 3)), target).total.backward()
    assert not [name for name, weight in head.named_parameters() if weight.grad is None or not weight.grad.any()]


def test_written_weights_are_the_head_s(target, tmp_path):
    """Not a copy under another name."""
    head = make(target, None, layers=2, hidden_size=48)
    written(head, "portable", tmp_path)
    tensors, own = load_file(tmp_path / "model.safetensors"), head.state_dict()
    for name, value in own.items():
        renamed = name.replace("layers.0.", "layers.1.")
        assert torch.equal(tensors.pop(renamed), value), name
    assert set(tensors) == {"layers.1.hidden_norm.weight"}
    assert head.taps == TAPS

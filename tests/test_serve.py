"""From a directory to a server: launch lines, exit codes and files of `headwright doctor`, how long drafts should be,
and `headwright import`.
"""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import engine_cases
import pytest
import torch
from conftest import make_model, make_tokenizer, tiny_run
from engine_cases import GOLDEN, documents, own_texts
from hypothesis import given
from hypothesis import strategies as st
from test_doctor import broken, contents, copied, drop, head_of, keys, random_head, read, written

import headwright.heads.probe
from headwright.configs import UserError
from headwright.data.target import Target
from headwright.heads.doctor import Question, diagnose, doctor, main, parser, write_mended
from headwright.heads.export import head_drafts
from headwright.heads.foreign import taps_in
from headwright.heads.importer import import_head
from headwright.heads.saved import load_head
from headwright.heads.serve import Advice, advise, between, drafted_tokens, lengths, recommended

FOREIGN = Path(__file__).parent / "foreign"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The target of the golden heads that are tried here, as a directory."""
    folder = tmp_path_factory.mktemp("model")
    engine_cases.make_model("llama").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


# The command


def ran(capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit code and what was printed by `headwright doctor …`."""
    code = 0
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


LAUNCH = {  # golden head: lines by engine
    "eagle3": {
        "vllm": [
            'vllm serve T --speculative-config \'{"method": "eagle3", "model": "DIR", "num_speculative_tokens": 3}\'',
        ],
        "sglang": [
            "python -m sglang.launch_server --model-path T --dtype bfloat16 --speculative-algorithm EAGLE3 \\",
            "--speculative-draft-model-path DIR \\",
            "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
        ],
        "tensorrt-llm": [
            "trtllm-serve T --extra_llm_api_options options.yaml",
            '# options.yaml: speculative_config: {"decoding_type": "Eagle3", "max_draft_len": 3, '
            '"speculative_model_dir": "DIR", "eagle3_layers_to_capture": [1, 3, 4]}',
        ],
    },
    "eagle3-four-taps": {"tensorrt-llm": ["trtllm-serve T --extra_llm_api_options options.yaml"]},
    "eagle1": {
        "vllm": [
            'vllm serve T --speculative-config \'{"method": "eagle", "model": "DIR", "num_speculative_tokens": 3}\''
        ],
    },
    "medusa": {
        "vllm": [
            'vllm serve T --speculative-config \'{"method": "medusa", "model": "DIR", "num_speculative_tokens": 3}\'',
        ],
    },
    "mtp-mimo": {
        "vllm": [
            "vllm serve T --hf-overrides '{\"num_nextn_predict_layers\": 1}' "
            '--speculative-config \'{"method": "mtp", "model": "DIR", "num_speculative_tokens": 3}\'',
        ],
        "sglang": [
            "python -m sglang.launch_server --model-path T --dtype bfloat16 --speculative-algorithm NEXTN \\",
            "--speculative-draft-model-path DIR \\",
            "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
        ],
    },
    "speculators": {"vllm": ["vllm serve DIR"]},
}


@pytest.mark.parametrize("name", LAUNCH)
def test_launch_lines_are_printed_to_be_copied(capsys, model, monkeypatch, tmp_path, name):
    """Each on one line, however long the directory's name is."""
    folder = copied(GOLDEN / name, tmp_path / ("a-long-name" * 12) / "head")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "T").symlink_to(model)
    code, out, _ = ran(capsys, folder, "--target", "T")
    assert code == 0
    printed = [line.strip() for line in out.splitlines()]
    for lines in LAUNCH[name].values():
        wanted = [line.replace("DIR", str(folder)) for line in lines]
        start = printed.index(wanted[0])
        assert printed[start : start + len(wanted)] == wanted


def test_eagle1_in_sglang_is_launched_with_a_tree(capsys, tmp_path):
    """Over the tokens of its map."""
    folder = random_head(tmp_path / "head", {"kind": "eagle1"}, "sglang", torch.arange(100))
    code, out, _ = ran(capsys, folder)
    lines = [line.strip() for line in out.splitlines()]
    start = lines.index(
        "python -m sglang.launch_server --model-path TARGET --dtype bfloat16 --speculative-algorithm EAGLE \\"
    )
    assert lines[start + 1 : start + 3] == [
        f"--speculative-draft-model-path {folder} \\",
        "--speculative-num-steps 4 --speculative-eagle-topk 4 --speculative-num-draft-tokens 13 "
        f"--speculative-token-map {folder / 'token_map.pt'}",
    ]
    assert code == 0


def test_llama_cpp_is_given_a_converted_head(capsys, tmp_path):
    folder = written(tmp_path / "head", (1, 3, 6), 100, {"fc_norm": False}, "portable")
    code, out, _ = ran(capsys, folder, "--engine", "llama.cpp")
    lines = [line.strip() for line in out.splitlines()]
    start = lines.index(f"python convert_hf_to_gguf.py {folder} --target-model-dir TARGET --outfile head.gguf")
    assert lines[start + 1] == "llama-server -m target.gguf -md head.gguf --spec-type draft-eagle3 --spec-draft-n-max 3"
    assert "vllm serve" not in out
    assert code == 0


@pytest.mark.parametrize("name", ["with a space", "o'clock"])
def test_a_launch_line_can_be_pasted_whatever_the_directory_is_called(capsys, tmp_path, name):
    folder = copied(GOLDEN / "eagle3", tmp_path / name / "head")
    _, out, _ = ran(capsys, folder, "--engine", "vllm", "--engine", "sglang")
    lines = [line.strip() for line in out.splitlines()]
    (vllm,) = [line for line in lines if line.startswith("vllm serve")]
    assert json.loads(shlex.split(vllm)[-1])["model"] == str(folder)
    (sglang,) = [line for line in lines if line.startswith("--speculative-draft-model-path")]
    assert shlex.split(sglang.removesuffix("\\"))[1:] == [str(folder)]


def test_findings_and_verdicts_are_printed(capsys, tmp_path):
    folder = head_of("eagle3", tmp_path, drop("d2t"))
    code, out, err = ran(capsys, folder, "--engine", "vllm", "--engine", "sglang")
    words = " ".join(out.split())
    assert "eagle3, 17 tensors, 118.6 KiB, of others" in words
    assert "error (vllm, sglang) model.safetensors: d2t: missing, shape (128,) → " in words.lower()
    assert "fix: --fix makes it of t2d" in words
    assert words.count("no: 1 error, first: model.safetensors: d2t missing") == 2
    assert "vllm serve" not in out
    assert code == 1
    assert err.strip() == "no engine that was asked about serves this head as it was trained"


def test_every_engines_consequence_is_shown(capsys, tmp_path):
    folder = head_of("eagle3", tmp_path, drop("lm_head.weight"))
    _, out, _ = ran(capsys, folder, "--engine", "vllm", "--engine", "sglang")
    words = " ".join(out.split())
    assert "vLLM drafts with the first rows of the target's lm_head" in words
    assert "SGLang will serve random memory" in words


def test_exit_codes(capsys, tmp_path):
    """0: an engine serves it; 1: none does; 2: it cannot be examined."""
    tied = head_of("eagle3", tmp_path, keys(tie_word_embeddings=True))
    assert ran(capsys, GOLDEN / "eagle3")[0] == 0
    assert ran(capsys, tied)[0] == 0  # vLLM does
    assert ran(capsys, tied, "--engine", "sglang")[0] == 1
    assert ran(capsys, tied, "--engine", "sglang", "--engine", "vllm")[0] == 0
    assert ran(capsys, tmp_path)[0] == 2
    assert ran(capsys, GOLDEN / "medusa", "--engine", "sglang")[0] == 2
    assert ran(capsys, tied, "--engine", "sglang", "--fix", tmp_path / "out")[0] == 0
    assert ran(capsys, GOLDEN / "eagle3", "--engine", "other")[0] == 2


def test_a_fix_never_touches_what_is_examined_or_exists(capsys, tmp_path):
    folder = head_of("eagle3", tmp_path, keys(tie_word_embeddings=True))
    (folder / "notes.txt").write_text("mine")
    (tmp_path / "there").mkdir()
    before = contents(tmp_path)
    for out in (tmp_path / "there", folder):
        code, _, err = ran(capsys, folder, "--fix", out)
        assert code == 2
        assert "exists; give a new directory" in err
    assert contents(tmp_path) == before
    code, out, _ = ran(capsys, folder, "--fix", tmp_path / "new" / "place")
    assert code == 0
    assert "1 corrected: config.json: tie_word_embeddings" in " ".join(out.split())
    assert "engines, of" in out
    assert contents(folder) == {name.removeprefix("head/"): data for name, data in before.items() if "head/" in name}
    assert contents(tmp_path / "new").keys() == {"place/config.json", "place/model.safetensors"}


def test_eagle1_is_mended_for_one_engine(capsys, tmp_path):
    """The two want different files."""
    folder = copied(GOLDEN / "eagle1", tmp_path / "head")
    code, _, err = ran(capsys, folder, "--fix", tmp_path / "out")
    assert code == 2
    assert "give one --engine" in err
    assert not (tmp_path / "out").exists()
    assert ran(capsys, folder, "--fix", tmp_path / "out", "--engine", "sglang")[0] == 0
    assert ran(capsys, tmp_path / "out", "--engine", "sglang")[0] == 0


def test_a_mended_copy_has_its_token_map(tmp_path):
    good = random_head(tmp_path / "good", {"kind": "eagle1"}, "sglang", torch.arange(100))
    folder = broken(good, tmp_path / "head", keys(dtype=None, torch_dtype=None))
    assert (folder / "token_map.pt").is_file()
    write_mended(diagnose(folder, Question(engines=("sglang",))), ["sglang"], tmp_path / "out")
    assert (tmp_path / "out" / "token_map.pt").is_file()


def test_a_token_map_that_is_announced_and_absent(tmp_path):
    folder = random_head(tmp_path, {"kind": "eagle1"}, "sglang", torch.arange(100))
    (folder / "token_map.pt").unlink()
    assert diagnose(folder, Question(engines=("sglang",))).errors("sglang")


def test_what_was_found_as_json(capsys, tmp_path):
    folder = head_of("eagle3", tmp_path, keys(tie_word_embeddings=True))
    ran(capsys, folder, "--json", tmp_path / "found.json", "--engine", "vllm", "--engine", "sglang")
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    findings = found.pop("findings")
    assert [(finding["level"], finding["engine"]) for finding in findings] == [("error", "sglang"), ("warning", "vllm")]
    assert "lm_head" in findings[0].pop("consequence")
    assert findings[0] == {
        "level": "error",
        "engine": "sglang",
        "where": "config.json: tie_word_embeddings",
        "what": "is true, must be false",
        "fix": "set it to false",
    }
    assert found == {
        "directory": str(folder),
        "method": "eagle3",
        "serves": {"vllm": True, "sglang": False},
        "coverage": {},
        "guesses": [],
        "draft_tokens": [],
    }


def test_json_and_the_table_have_the_guesses(capsys, monkeypatch, tmp_path, model):
    """On the prompts that the golden head knows, which no line of text gives."""
    texts = documents(engine_cases.make_target("llama", tuple(range(9))), own_texts(engine_cases.target_of("eagle3")))
    monkeypatch.setattr(headwright.heads.probe, "own_text", lambda target, prompts: texts)
    target = model
    code, out, _ = ran(capsys, GOLDEN / "eagle3", "--target", target, "--probe", "--json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found["guesses"][0]["head"] == "as it stands"
    assert found["guesses"][0]["first"] > 0.7
    assert "guesses on the target's own text" in out
    assert "as it stands" in out
    assert code == 0


def test_measured_costs_choose_the_number_of_drafts(capsys, tmp_path):
    """What an export carries about its run goes into the launch line, the table and the JSON."""
    folder, told = copied(GOLDEN / "eagle3", tmp_path / "head"), {"method": "eagle3"}
    flat = {str(count): 10.0 for count in (1, 2, 4, 8)}
    costs = {"verify": flat, "first": {"1": 0.1}, "level": {"1": 0.1}, "overhead": 0.0}
    told["measured"] = {
        "chain": {"accepted_per_position": [0.8, 0.6, 0.5, 0.4, 0.3]},
        "costs_ms": costs,
        "device": "a toaster",
    }
    (folder / "headwright.json").write_text(json.dumps(told), encoding="utf-8")
    code, out, _ = ran(capsys, folder, "--engine", "vllm", "--json", tmp_path / "found.json")
    assert '"num_speculative_tokens": 5}' in out
    assert "| 1 | 5 |" in out
    assert "a toaster" in out
    advised = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["draft_tokens"]
    assert [(entry["batch"], entry["tokens"]) for entry in advised] == [(1, 5), (2, 3), (4, 1), (8, 0)]
    assert code == 0


def test_prompts_are_read_from_a_file(capsys, tmp_path, model):
    (tmp_path / "empty").write_text("\n \n", encoding="utf-8")
    for path, words in ((tmp_path / "empty", "holds no line of text"), (tmp_path / "none", "--prompts")):
        code, _, err = ran(capsys, GOLDEN / "eagle3", "--target", model, "--prompts", path)
        assert code == 2
        assert words in err
    code, _, err = ran(capsys, GOLDEN / "eagle3", "--probe")
    assert code == 2
    assert "give --target" in err


def test_doctor_returns_the_exit_code(tmp_path):
    folder = head_of("eagle3", tmp_path, drop("norm.weight"))
    assert doctor(parser().parse_args([str(folder)])) == 1
    assert doctor(parser().parse_args([str(GOLDEN / "eagle3")])) == 0


def test_as_users_run_it(tmp_path):
    """In a process of its own: one message, no traceback."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    (tmp_path / "config.json").write_text("[", encoding="utf-8")
    for folder, code, words in ((GOLDEN / "eagle3", 0, "vllm serve TARGET"), (tmp_path, 2, "not readable as JSON")):
        done = subprocess.run(
            [sys.executable, "-m", "headwright.train.cli", "doctor", str(folder)],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
        )
        assert done.returncode == code
        assert words in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


# How long drafts should be


def priced(verify: dict[int, float], first: float = 0.0, level: float = 0.0, overhead: float = 0.0) -> dict:
    """Costs as `headwright tune` writes them."""
    passes = {str(count): value for count, value in verify.items()}
    return {"verify": passes, "first": {"1": first}, "level": {"1": level}, "overhead": overhead}


RATES = st.lists(st.floats(0, 1), min_size=1, max_size=12).map(lambda rates: sorted(rates, reverse=True))
MILLISECONDS = st.floats(0.01, 100)
PASSES = st.dictionaries(st.sampled_from([2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128]), MILLISECONDS).flatmap(
    lambda passes: MILLISECONDS.map(lambda plain: {1: plain} | passes)
)


@given(RATES, PASSES, MILLISECONDS, MILLISECONDS, st.floats(0, 10))
def test_advice_keeps_within_what_was_measured(rates, verify, first, level, overhead):
    """No more drafts than rates, none that a measured pass would not hold; never slower than not drafting."""
    found = advise(rates, priced(verify, first, level, overhead))
    assert [advice.batch for advice in found] == [batch for batch in (1, 2, 4, 8, 16, 32) if batch <= max(verify)]
    for advice in found:
        assert 0 <= advice.tokens <= min(len(rates), 8)
        assert advice.tokens == 0 or advice.batch * (advice.tokens + 1) <= max(verify)
        assert advice.speedup >= 1.0
        assert (advice.tokens == 0) == (advice.speedup == 1.0)


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=12), st.floats(0.1, 100))
def test_free_drafts_and_flat_passes_are_drafted_as_deep_as_can_be(rates, cost):
    found = advise(rates, priced({1: cost, 512: cost}))
    assert [advice.tokens for advice in found] == [min(len(rates), 8)] * 6
    assert found[0].speedup == pytest.approx(1 + sum(rates[:8]))


@given(st.integers(1, 12), PASSES, MILLISECONDS, MILLISECONDS)
def test_what_is_never_accepted_is_not_drafted(count, verify, first, level):
    rising = {number: 10 + number for number in verify}
    for advice in advise([0.0] * count, priced(rising, first, level)):
        assert (advice.tokens, advice.speedup) == (0, 1.0)


@given(RATES, PASSES, MILLISECONDS, MILLISECONDS, st.floats(1.0, 10.0))
def test_dearer_drafts_never_speed_up(rates, verify, first, level, dearer):
    """Nor does a lower acceptance."""
    plain = advise(rates, priced(verify, first, level))
    costly = advise(rates, priced(verify, first * dearer, level * dearer))
    poorer = advise([rate / dearer for rate in rates], priced(verify, first, level))
    for cheap, dear, poor in zip(plain, costly, poorer):
        assert dear.speedup <= cheap.speedup + 1e-9
        assert poor.speedup <= cheap.speedup + 1e-9


def test_a_cycle_by_hand():
    """Passes of 1, 2, 4 tokens; drafts of 1 and 0.5 ms; overhead 0.5."""
    costs = priced({1: 10.0, 2: 10.0, 4: 12.0}, 1.0, 0.5, 0.5)
    two = 10 * (1 + 0.8 + 0.6) / (11 + 1.5 + 0.5)
    three = 10 * (1 + 0.8 + 0.6 + 0.1) / (12 + 2.0 + 0.5)
    assert three < two
    found = advise([0.8, 0.6, 0.1, 0.1], costs)
    assert [(advice.batch, advice.tokens) for advice in found] == [(1, 2), (2, 1), (4, 0)]
    assert found[0].speedup == pytest.approx(two)
    assert found[1].speedup == pytest.approx(10 * 1.8 / (12 + 1.5))


def test_costs_between_passes_are_interpolated():
    measured = {1: 10.0, 4: 13.0, 8: 21.0}
    wanted = {1: 10.0, 2: 11.0, 4: 13.0, 6: 17.0, 8: 21.0, 10: 25.0, 0: 9.0}
    assert {place: between(measured, place) for place in wanted} == wanted
    assert between({3: 7.0}, 100) == 7.0


def test_batches_beyond_the_longest_pass_are_not_answered():
    assert [advice.batch for advice in advise([0.9], priced({1: 1.0, 8: 1.0}))] == [1, 2, 4, 8]
    assert advise([0.9], priced({1: 1.0, 8: 1.0}))[-1] == Advice(8, 0, 1.0)
    assert [advice.batch for advice in advise([0.9], priced({1: 1.0, 8: 1.0}), (3, 5))] == [3, 5]


@pytest.mark.parametrize(
    "ours",
    [
        {},
        {"measured": None},
        {"measured": {}},
        {"measured": {"chain": {"accepted_per_position": [0.5]}}},
        {"measured": {"costs_ms": {"verify": {"1": 1.0}}}},
        {"measured": {"chain": None, "costs_ms": {"verify": {"1": 1.0}}}},
    ],
)
def test_nothing_is_recommended_where_nothing_was_measured(ours):
    assert recommended(ours) == []
    assert drafted_tokens(recommended(ours)) == 3
    assert lengths(recommended(ours), "cpu") == "Not measured: run `headwright tune`, then export again."


def test_a_launch_line_always_drafts():
    """Even where not to draft is better at batch 1: the table says so beside it."""
    advice = [Advice(1, 0, 1.0), Advice(2, 4, 1.5)]
    assert drafted_tokens(advice) == 1
    assert drafted_tokens([Advice(1, 4, 1.5)]) == 4
    table = lengths(advice, "a toaster")
    assert "| 1 | do not draft | 1.00× |" in table
    assert "| 2 | 4 | 1.50× |" in table
    assert "measured on a toaster" in table


# Importing


@pytest.fixture
def run(model_dir, chats, tmp_path):
    """A run over the target of tests/foreign."""
    return tiny_run(model_dir, chats, tmp_path / "runs")


def of_others(name: str, folder: Path) -> Path:
    """A head that another project wrote."""
    copied(FOREIGN / name, folder)
    (folder / "expected.safetensors").unlink()
    return folder


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("angelslim", "eagle3"),
        ("eagle", "eagle1"),
        ("eagle3", "eagle3"),
        ("medusa", "medusa"),
        ("specforge", "eagle3"),
        ("speculators-qwen3", "eagle3"),
    ],
)
def test_a_head_of_others_becomes_the_runs_own(run, tmp_path, capsys, name, kind):
    folder = of_others(name, tmp_path / "head")
    before = contents(folder)
    head = import_head(run, folder)
    assert head.config.kind == kind
    out = run.directory / "head"
    assert (out / "head.json").is_file()
    assert "headwright eval" in capsys.readouterr().out
    assert contents(folder) == before
    target = Target.load(run.target, taps_in(folder, 8))
    again, direct = load_head(out, target, torch.float32).eval(), load_head(folder, target, torch.float32).eval()
    assert again.config == direct.config
    saved, found = again.state_dict(), direct.state_dict()
    assert saved.keys() == found.keys()
    assert all(torch.equal(saved[key], found[key]) for key in saved)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(7, len(target.taps), 32, generator=generator)
    case = headwright.heads.base.Case(list(range(7)), states, torch.randn(7, 32, generator=generator))
    assert head_drafts(again, target, case) == head_drafts(direct, target, case)


def test_an_import_never_takes_another_heads_place(run, tmp_path):
    folder = of_others("eagle", tmp_path / "head")
    import_head(run, folder)
    before = contents(run.directory)
    with pytest.raises(UserError, match=r"there is a head already: give the run another name"):
        import_head(run, of_others("medusa", tmp_path / "other"))
    assert contents(run.directory) == before


def test_a_dry_run_writes_nothing(run, tmp_path):
    assert import_head(run, of_others("specforge", tmp_path / "head"), dry_run=True).config.kind == "eagle3"
    assert not run.directory.exists()


def test_a_wrong_target_is_refused(run, tmp_path):
    make_model(vocab=300).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    other = replace(run, target=replace(run.target, model=str(tmp_path / "model")))
    for name in ("specforge", "eagle", "speculators"):
        with pytest.raises(UserError, match="is 272, the target has 300 tokens"):
            import_head(other, of_others(name, tmp_path / name))
    assert not other.directory.exists()


@pytest.mark.parametrize(
    ("files", "words"),
    [({}, "holds no config.json: no head"), ({"head.json": "{}"}, "already a head of ours")],
)
def test_what_is_no_head_of_others_is_refused(run, tmp_path, files, words):
    folder = tmp_path / "head"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=words):
        import_head(run, folder)


def test_a_broken_head_is_refused(run, tmp_path):
    folder = broken(of_others("specforge", tmp_path / "good"), tmp_path / "head", drop("midlayer.mlp.up_proj.weight"))
    with pytest.raises(UserError, match=r"not a whole head: midlayer\.mlp\.up_proj\.weight: missing"):
        import_head(run, folder)
    assert not run.directory.exists()


@pytest.mark.parametrize("change", [{"rms_norm_eps": 0.5}, {"rope_theta": 50.0, "rope_parameters": None}])
def test_an_mtp_module_of_another_layer_than_the_targets_is_refused(tmp_path, change):
    folder = broken(GOLDEN / "mtp-mimo", tmp_path / "head", keys(**change))
    with pytest.raises(UserError):
        load_head(folder, engine_cases.target_of("mtp-mimo"), torch.float32)


def test_a_missing_map_is_made_of_the_other(tmp_path):
    folder = head_of("eagle3", tmp_path, drop("d2t"))
    write_mended(diagnose(folder, Question(engines=("vllm",))), ["vllm"], tmp_path / "out")
    assert torch.equal(read(tmp_path / "out")[1]["d2t"], read(GOLDEN / "eagle3")[1]["d2t"])
    assert not diagnose(tmp_path / "out", Question(engines=("vllm",))).errors("vllm")


def test_another_activation_is_named_and_refused(tmp_path):
    folder = head_of("eagle3", tmp_path, keys(hidden_act="gelu"))
    assert [f.where for f in diagnose(folder, Question()).errors("vllm")] == ["config.json: hidden_act"]
    with pytest.raises(UserError, match="gated by gelu"):
        load_head(folder, engine_cases.target_of("eagle3"), torch.float32)


def test_json_tells_of_what_was_examined_not_of_the_copy(capsys, tmp_path):
    folder = head_of("eagle3", tmp_path, keys(tie_word_embeddings=True))
    ran(capsys, folder, "--engine", "sglang", "--fix", tmp_path / "out", "--json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found["directory"] == str(folder)
    assert found["serves"] == {"sglang": False}

"""Run files: what is read is what was written, and what is wrong is named."""

from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headwright.configs import RunConfig, UserError, dump, load, load_run
from headwright.heads import kinds

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = sorted(path for path in (ROOT / "configs").glob("*.yaml") if not path.name.startswith("accelerate-"))
MINIMAL = """
name: small
target: {model: some/model}
corpus:
  sources:
    - {path: chats.jsonl, limit: 5}
    - {hub: owner/set}
head: {kind: eagle3}
"""


@pytest.fixture
def minimal(tmp_path) -> Path:
    """A run file with little in it."""
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_files_load(path):
    run = load_run(path)
    assert run.name == path.stem
    assert run.head.kind in kinds()
    assert run.directory == Path("runs") / path.stem


def test_there_are_shipped_files():
    assert len(SHIPPED) >= 3


@pytest.mark.parametrize(
    ("override", "unknown", "near"),
    [
        ("trian.lr=1", "trian", "train"),
        ("train.lrr=1", "train.lrr", "train.lr"),
        ("train.track.wanbd=off", "train.track.wanbd", "train.track.wandb"),
        ("target.modle=x", "target.modle", "target.model"),
        ("corpus.sources.0.limt=3", "corpus.sources[0].limt", "corpus.sources[0].limit"),
        ("corpus.sources.1.splt=train", "corpus.sources[1].splt", "corpus.sources[1].split"),
        ("head.step=3", "step", "steps"),
        ("head.step_wieght=0.5", "step_wieght", "step_weight"),
    ],
)
def test_unknown_key_names_the_nearest(minimal, override, unknown, near):
    with pytest.raises(UserError, match="did you mean") as caught:
        load_run(minimal, [override])
    assert f"unknown key {unknown};" in str(caught.value)
    assert f"did you mean {near}?" in str(caught.value)
    assert str(minimal) in str(caught.value)


def test_unknown_key_inside_a_list_of_shapes(minimal):
    with pytest.raises(
        UserError, match=r"unknown key eval\.shapes\[1\]\.dept; did you mean eval\.shapes\[1\]\.depth\?"
    ):
        load_run(minimal, ["eval.shapes=[{kind: chain}, {kind: chain, dept: 3}]"])


def test_unknown_key_unlike_any_lists_the_known(minimal):
    with pytest.raises(UserError, match="known keys: wandb, project"):
        load_run(minimal, ["train.track.zzzzzz=1"])


def test_unknown_head_kind_names_the_nearest(minimal):
    with pytest.raises(UserError, match=r"did you mean eagle3\?"):
        load_run(minimal, ["head.kind=eagel3"])
    with pytest.raises(UserError, match=r"there are: .*eagle3"):
        load_run(minimal, ["head.kind=zzzzz"])


@pytest.mark.parametrize("value", ["null", "eagle3", "{steps: 3}"])
def test_head_without_kind(minimal, value):
    with pytest.raises(UserError, match=r"head\.kind is missing"):
        load_run(minimal, [f"head={value}"])


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.0e-4", "1.e-4", ".1e-3", "+1e-4", "0.0001"])
def test_exponents_are_numbers_in_files_and_overrides(minimal, text):
    minimal.write_text(MINIMAL + f"train: {{lr: {text}, betas: [9e-1, 95e-2]}}\n")
    run = load_run(minimal)
    assert run.train.lr == 1e-4
    assert isinstance(run.train.lr, float)
    assert run.train.betas == (0.9, 0.95)
    assert load_run(minimal, [f"train.lr={text}"]).train.lr == 1e-4
    assert load_run(minimal, ["eval.temperatures=[0, 7e-1]"]).eval.temperatures == [0.0, 0.7]


@pytest.mark.parametrize("text", ["e5", "1e", "12e5x", "1-e5"])
def test_what_only_looks_like_a_number_stays_text(minimal, text):
    assert load_run(minimal, [f"target.revision={text}"]).target.revision == text


def test_overrides_reach_every_level(minimal):
    run = load_run(
        minimal,
        [
            "seed=7",
            "train.lr=2e-3",
            "train.track.wandb=offline",
            "corpus.sources.0.limit=20",
            "corpus.sources.1={path: b.txt}",
            "harvest.taps=[1, 2]",
            "head.steps=5",
            "vocab.size=null",
            "target.tokenizer=a=b",
        ],
    )
    assert (run.seed, run.train.lr, run.train.track.wandb) == (7, 2e-3, "offline")
    assert [(s.path, s.hub, s.limit) for s in run.corpus.sources] == [("chats.jsonl", None, 20), ("b.txt", None, None)]
    assert (run.harvest.taps, run.head.steps, run.vocab.size, run.target.tokenizer) == ([1, 2], 5, None, "a=b")


def test_last_override_wins(minimal):
    assert load_run(minimal, ["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lr", "write section.key=value"),
        ("=3", "write section.key=value"),
        ("", "write section.key=value"),
        ("corpus.sources.2.limit=3", "'2' is not an index below 2"),
        ("corpus.sources.first.limit=3", "'first' is not an index below 2"),
        ("corpus.sources.-1.limit=3", "'-1' is not an index below 2"),
        ("corpus.sources.9={path: a.txt}", "'9' is not an index below 2"),
        ("name.part=3", "name is a value, not a section"),
        ("train.lr=[1,", "not valid YAML"),
        ("train=3", "train must be a section of keys"),
        ("corpus.sources.0=3", r"corpus\.sources\[0\] must be a section of keys"),
    ],
)
def test_bad_overrides(minimal, override, message):
    with pytest.raises(UserError, match=message):
        load_run(minimal, [override])


@pytest.mark.parametrize("override", ["eval.temperatures.0.x=1", "eval.temperatures.0.x.y=1", "harvest.taps.².x=1"])
def test_override_through_a_list_of_values(minimal, override):
    """A step through a list's element that is no section is refused, like any other."""
    minimal.write_text(MINIMAL + "eval: {temperatures: [0.0, 1.0]}\nharvest: {taps: [1, 2]}\n")
    with pytest.raises(UserError, match="override"):
        load_run(minimal, [override])


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("train.lr=fast", "train.lr"),
        ("train.epochs=[1]", "train.epochs"),
        ("seed=one", "seed"),
        ("seed=1.5", "seed"),
        ("train.betas=[0.9]", "train.betas"),
        ("harvest.taps=[a]", "harvest.taps"),
        ("harvest.taps=all", "harvest.taps"),
        ("harvest.dtype=int8", "harvest.dtype"),
        ("target.model=[a, b]", "target.model"),
        ("corpus.sources.1.limit=many", "corpus.sources.1.limit"),
        ("corpus.sources={path: a.txt}", "corpus.sources"),
        ("eval.shapes=[{kind: star}]", "eval.shapes.0.kind"),
        ("head.steps=three", "steps"),
        ("train=null", "train"),
    ],
)
def test_wrong_type_names_the_key(minimal, override, key):
    with pytest.raises(UserError) as caught:
        load_run(minimal, [override])
    assert f" {key}" in str(caught.value)
    assert str(minimal) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.lr", "0"),
        ("train.lr", "-0.5"),
        ("train.lr", ".nan"),
        ("train.epochs", "0"),
        ("train.tokens_per_batch", "0"),
        ("train.accumulate", "0"),
        ("train.warmup", "1.5"),
        ("train.final_lr", "-0.1"),
        ("corpus.held_out", "-0.1"),
        ("corpus.held_out", "1.0"),
        ("corpus.max_length", "8"),
        ("corpus.sources.0.limit", "0"),
        ("corpus.sources.0.samples", "0"),
        ("answers.temperature", "-1"),
        ("answers.top_p", "0"),
        ("answers.top_p", "1.01"),
        ("answers.max_new_tokens", "0"),
        ("vocab.size", "-1"),
        ("vocab.coverage", "2"),
        ("eval.prompts", "0"),
        ("harvest.tokens_per_batch", "0"),
        ("head.steps", "0"),
        ("head.step_weight", "1.5"),
    ],
)
def test_out_of_range_names_key_and_value(minimal, key, value):
    with pytest.raises(UserError) as caught:
        load_run(minimal, [f"{key}={value}"])
    assert key.removeprefix("head.") in str(caught.value)
    assert value.strip(".").removesuffix(".0") in str(caught.value)


@pytest.mark.parametrize("name", ["''", "../up", "a/b", ".hidden", "a b", "-x"])
def test_name_is_a_plain_directory_name(minimal, name):
    with pytest.raises(UserError, match="name is"):
        load_run(minimal, [f"name={name}"])


def test_target_is_required(minimal):
    with pytest.raises(UserError, match=r"target\.model is empty"):
        load_run(minimal, ["target.model=''"])


@pytest.mark.parametrize("source", ["{}", "{path: a.txt, demo: gsm8k}", "{path: a.txt, hub: a/b, demo: c}"])
def test_source_is_exactly_one(minimal, source):
    with pytest.raises(UserError, match=r"corpus\.sources\[1\] names .* give exactly one"):
        load_run(minimal, [f"corpus.sources.1={source}"])


def test_missing_file(tmp_path):
    with pytest.raises(UserError, match=r"none\.yaml: no such file"):
        load_run(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="no such file"):
        load_run(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected sections of keys"),
        (b"- a\n- b\n", "expected sections of keys, found list"),
        (b"just text", "expected sections of keys, found str"),
        (b"name: [", "not valid YAML"),
        (b"name: a\n\tb: c\n", "not valid YAML"),
        (b"\x00\x01", "not valid YAML"),
        (b"name: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
        (b"name: caf\xe9\n", "not valid|UTF-8"),
    ],
    ids=["empty", "list", "text", "open", "tab", "binary", "python-object", "latin-1"],
)
def test_broken_files(tmp_path, content, message):
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_run(path)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_dump_then_load_is_the_same(path, tmp_path):
    run = load_run(path, ["train.lr=3e-5", "target.revision=main", "corpus.system=Ответь кратко 🙂"])
    written = tmp_path / "run.yaml"
    written.write_text(dump(run), encoding="utf-8")
    assert load_run(written) == run
    assert dump(load_run(written)) == dump(run)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**40),
    lr=st.floats(1e-12, 10),
    system=st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    taps=st.just("auto") | st.lists(st.integers(0, 99), min_size=1, max_size=4),
    limit=st.none() | st.integers(1, 10**9),
)
@example(seed=0, lr=1.0, system="\x85 \u2028", taps="auto", limit=None)
def test_round_trip_of_any_values(tmp_path_factory, seed, lr, system, taps, limit):
    run = load_run(SHIPPED[0])
    run.seed, run.train.lr, run.corpus.system, run.harvest.taps = seed, lr, system, taps
    run.corpus.sources[0].limit = limit
    written = tmp_path_factory.getbasetemp() / "round.yaml"
    written.write_text(dump(run), encoding="utf-8")
    assert load_run(written) == run


def test_defaults_are_the_dataclass(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("name: x\n")
    assert load(RunConfig, path) == RunConfig(name="x")


def test_dump_is_plain_yaml(minimal):
    """Any YAML reader can read it: no Python tags."""
    plain = yaml.safe_load(dump(load_run(minimal)))
    assert plain["head"]["kind"] == "eagle3"
    assert plain["train"]["betas"] == [0.9, 0.95]

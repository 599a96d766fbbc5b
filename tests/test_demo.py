"""The embedded demo: what is fetched is what was meant, and the converted model is the one in the file."""

import hashlib
import io
import json
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch

import headwright.data.demo as demo
import headwright.data.embedded as embedded
import headwright.data.packages as packages
from headwright.configs import UserError
from headwright.data.demo import DemoSet, demo_originals, demo_rows
from headwright.data.embedded import embedded_target
from headwright.data.packages import Package, fetch, read_member


def wheel(files: dict[str, str]) -> bytes:
    """A zip file, the same bytes each time."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name), text)
    return buffer.getvalue()


GOOD = wheel({"toy/rows.jsonl": '{"prompt": "one"}\n{"prompt": "two"}\n'})
TOY = Package("toy-set", "1.0", hashlib.sha256(GOOD).hexdigest())
FILE = "toy_set-1.0-py3-none-any.whl"


@pytest.fixture
def registry(monkeypatch, tmp_path):
    """A cache of its own, and a pip that serves `registry["blob"]` and counts its calls."""
    monkeypatch.setenv("HEADWRIGHT_CACHE", str(tmp_path))
    state = {"blob": GOOD, "calls": 0, "code": 0, "stderr": ""}

    def run(command, **_):
        state["calls"] += 1
        assert command[1:4] == ["-m", "pip", "download"]
        assert command[-1] == "toy-set==1.0"
        if not state["code"]:
            (Path(command[command.index("--dest") + 1]) / FILE).write_bytes(state["blob"])
        return subprocess.CompletedProcess(command, state["code"], "", state["stderr"])

    monkeypatch.setattr(packages.subprocess, "run", run)
    return state


def test_fetched_once(registry, tmp_path):
    path = fetch(TOY)
    assert path == tmp_path / "packages" / FILE
    assert path.read_bytes() == GOOD
    assert fetch(TOY) == path
    assert registry["calls"] == 1
    assert [p.name for p in path.parent.iterdir()] == [FILE]


def test_tampered_file_is_fetched_again(registry, tmp_path):
    path = fetch(TOY)
    path.write_bytes(GOOD[:-1] + b"x")
    assert fetch(TOY).read_bytes() == GOOD
    assert registry["calls"] == 2


def test_tampered_registry_is_refused(registry, tmp_path):
    registry["blob"] = GOOD + b"x"
    with pytest.raises(UserError, match=r"SHA-256 is not the expected .* nothing was kept"):
        fetch(TOY)
    assert list((tmp_path / "packages").iterdir()) == []


def test_tampered_file_and_registry_are_refused(registry, tmp_path):
    fetch(TOY).write_bytes(b"bad")
    registry["blob"] = b"worse"
    with pytest.raises(UserError, match="SHA-256"):
        fetch(TOY)


@pytest.mark.parametrize(
    ("stderr", "words"),
    [("WARNING: x\nERROR: No matching distribution found\n", "No matching distribution found"), ("", "pip failed")],
)
def test_fetch_failure_is_one_message(registry, stderr, words):
    registry.update(code=1, stderr=stderr)
    with pytest.raises(UserError, match=rf"could not fetch toy-set==1\.0: .*{words}"):
        fetch(TOY)


def test_rows_of_a_set(registry, monkeypatch):
    monkeypatch.setitem(demo.SETS, "toy", DemoSet(TOY, "toy/rows.jsonl", "MIT", lambda row: row["prompt"]))
    assert list(demo_rows("toy")) == [
        ("toy-set/rows.jsonl:1", {"prompt": "one"}),
        ("toy-set/rows.jsonl:2", {"prompt": "two"}),
    ]


def test_line_separators_inside_a_row(registry, monkeypatch):
    """U+2028 and U+0085 may stand unescaped in JSON strings: they end no row."""
    registry["blob"] = blob = wheel(
        {"toy/rows.jsonl": '{"prompt": "one", "note": "a\u2028b\u0085c"}\n{"prompt": "two"}\n'}
    )
    package = Package("toy-set", "1.0", hashlib.sha256(blob).hexdigest())
    monkeypatch.setitem(demo.SETS, "toy", DemoSet(package, "toy/rows.jsonl", "MIT", lambda row: row["prompt"]))
    assert [row["prompt"] for _, row in demo_rows("toy")] == ["one", "two"]


def test_originals_are_rows_as_their_authors_wrote_them(registry, monkeypatch):
    """All turns, and what demo_rows leaves out; places are the same."""
    rows = [{"turns": ["one", "two"], "category": "c"}, {"turns": ["\u4e00"], "category": "d"}]
    registry["blob"] = blob = wheel({"toy/rows.jsonl": "".join(json.dumps(row) + "\n" for row in rows)})
    package = Package("toy-set", "1.0", hashlib.sha256(blob).hexdigest())
    monkeypatch.setitem(demo.SETS, "toy", DemoSet(package, "toy/rows.jsonl", "MIT", demo.first_turn, True))
    assert list(demo_originals("toy")) == [("toy-set/rows.jsonl:1", rows[0]), ("toy-set/rows.jsonl:2", rows[1])]
    assert list(demo_rows("toy")) == [("toy-set/rows.jsonl:1", {"prompt": "one"})]
    with pytest.raises(UserError, match="no demo set 'tyo'"):
        list(demo_originals("tyo"))


def test_unknown_names():
    with pytest.raises(UserError, match="no demo set 'gsm9k'; there are gsm8k, humaneval"):
        list(demo_rows("gsm9k"))
    with pytest.raises(UserError, match="no embedded model 'gpt'"):
        embedded_target("gpt")


def test_standard_library_is_text():
    places = []
    for place, row in demo_rows("python-stdlib"):
        assert len(row["text"]) > 2000
        places.append(place)
        if len(places) == 40:
            break
    assert len(set(places)) == 40
    assert all(place.endswith(".py") and not Path(place).is_absolute() for place in places)


def test_failed_conversion_leaves_nothing(registry, monkeypatch, tmp_path):
    """A conversion that is interrupted is made again, not half used."""
    blob = wheel({embedded.GGUF_MEMBER: "not a model"})
    toy = Package("toy-set", "1.0", hashlib.sha256(blob).hexdigest())
    registry["blob"] = blob

    def convert(gguf_file, out):
        out.mkdir()
        (out / "config.json").write_text("{}")
        raise KeyboardInterrupt

    model = embedded.Model((toy,), (embedded.GGUF_MEMBER,), None, convert)
    monkeypatch.setitem(embedded.MODELS, "smollm2-135m-instruct", model)
    with pytest.raises(KeyboardInterrupt):
        embedded_target("smollm2-135m-instruct")
    assert list((tmp_path / "models").iterdir()) == []


# The real thing


def or_skip(call):
    """The result of a call that needs the registry, or a skipped test."""
    try:
        return call()
    except UserError as error:
        if "could not fetch" in str(error):
            pytest.skip(f"the package registry cannot be reached: {error}")
        raise


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("gsm8k", 100), ("humaneval", 164), ("mt-bench", 80), ("vicuna", 80)])
def test_demo_sets_have_all_their_rows(name, count):
    rows = or_skip(lambda: list(demo_rows(name)))
    assert len(rows) == count
    assert len({place for place, _ in rows}) == count
    assert all(row["prompt"].strip() for _, row in rows)


@pytest.mark.slow
def test_every_set_is_readable():
    for name in demo.SETS:
        assert or_skip(lambda name=name: list(demo_rows(name)))


@pytest.mark.slow
def test_converted_model_is_what_transformers_reads(tmp_path):
    import transformers

    home = or_skip(lambda: embedded_target("smollm2-135m-instruct"))
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(read_member(embedded.SMOLLM2, embedded.GGUF_MEMBER))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=gguf.name, dtype=torch.float32)
    ours = transformers.AutoModelForCausalLM.from_pretrained(home)
    mine, reference = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == reference.keys()
    assert [name for name in mine if not torch.equal(mine[name], reference[name])] == []
    for key in ("rms_norm_eps", "num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings"):
        assert getattr(ours.config, key) == pytest.approx(getattr(theirs.config, key), rel=1e-6)
    assert ours.config.rope_parameters["rope_theta"] == theirs.config.rope_parameters["rope_theta"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(home)
    messages = [{"role": "user", "content": "What is 2+2? Привет 🙂"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>assistant\n")
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.convert_ids_to_tokens(ours.generation_config.eos_token_id) == "<|im_end|>"
    assert json.loads((home / "config.json").read_text())["model_type"] == "llama"

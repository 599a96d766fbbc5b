"""What `headwright doctor` is given and cannot trust: one clear message each, nothing unpickled, nothing huge read.

Values of the wrong kind are tried by name first, then at random.
"""

import contextlib
import json
import pickle
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import GOLDEN
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from test_doctor import broken, copied, drop, read, write

from headwright.configs import UserError
from headwright.heads.directory import Directory
from headwright.heads.doctor import Diagnosis, Question, as_json, diagnose, main, show, tables, write_mended
from headwright.heads.examine import ALL
from headwright.heads.foreign import open_plain

SHAPES = ("eagle1", "eagle3", "eagle3-qwen3-layer", "medusa", "mtp-ernie", "mtp-mimo", "speculators")


class Unpickled(Exception):
    """Somebody opened a pickle."""


class Late(Exception):
    """It took too long."""


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_unpickled():
    """Not in any test of this file."""

    def refuse(*arguments, **named):
        raise Unpickled

    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((torch, "load"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
            patch.setattr(module, name, refuse)
        yield


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fail where it takes longer: a loop over a number out of a file has no end."""

    def late(*arguments):
        raise Late

    before, over = signal.signal(signal.SIGALRM, late), False
    signal.alarm(seconds)
    try:
        yield
    except Late:
        over = True  # its own traceback may end nowhere
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    if over:
        pytest.fail(f"took more than {seconds} s", pytrace=False)


def refused(folder: Path, words: str) -> None:
    """One message that names the place, by every way in."""
    for attempt in (lambda: diagnose(folder, Question()), lambda: open_plain(folder)):
        with pytest.raises(UserError, match=words) as caught:
            attempt()
        assert str(caught.value).startswith(str(folder))
        assert "\n" not in str(caught.value)


def with_config(folder: Path, text: str | bytes) -> Path:
    """A golden head whose config.json holds something else."""
    copied(GOLDEN / "eagle3", folder)
    (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


# What is no directory of a head


def test_what_is_not_there(tmp_path):
    refused(tmp_path / "none", "no such directory")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "no such directory")


def test_an_empty_directory(tmp_path):
    refused(tmp_path, r"config\.json is missing: not a directory that an engine loads")


def test_a_trained_head_of_ours(tmp_path):
    folder = copied(GOLDEN / "eagle3", tmp_path / "head")
    (folder / "head.json").write_text("{}")
    with pytest.raises(UserError, match="`headwright export` writes what they load"):
        diagnose(folder, Question())


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "medusa_lm_head.pth", "head.ckpt", "x.pkl"])
def test_nothing_but_a_pickle(tmp_path, name):
    """With the line that converts it."""
    folder = copied(GOLDEN / "eagle3", tmp_path / "head")
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"\x80\x04cos\nsystem\n(S'false'\ntR.")
    refused(folder, rf"{name}.* never unpickled here.*torch\.load\(\"{name}\", weights_only=True\)")


def test_no_weights_at_all(tmp_path):
    folder = copied(GOLDEN / "eagle3", tmp_path / "head")
    (folder / "model.safetensors").unlink()
    refused(folder, r"no \*\.safetensors in it")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not readable as JSON"),
        ("{", "not readable as JSON"),
        (b"\xff\xfe", "not readable as JSON"),
        ("[" * 100_000, "not readable as JSON"),
        ("[]", "holds a list, an object is expected"),
        ("5", "holds a int, an object is expected"),
        ("null", "holds a NoneType, an object is expected"),
    ],
    ids=range(7),
)
def test_a_config_that_is_no_object(tmp_path, text, words):
    refused(with_config(tmp_path / "head", text), rf"config\.json: {words}")


def test_a_config_that_is_a_directory(tmp_path):
    folder = copied(GOLDEN / "eagle3", tmp_path / "head")
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    refused(folder, r"config\.json: not readable")


def test_a_huge_config_is_not_read(tmp_path, monkeypatch):
    folder = copied(GOLDEN / "eagle3", tmp_path / "head")
    with (folder / "config.json").open("r+b") as file:
        file.truncate(10 << 30)
    monkeypatch.setattr(Path, "read_text", lambda *arguments, **named: pytest.fail("read"))
    refused(folder, r"config\.json: 10\.0 GiB of JSON")


@pytest.mark.parametrize("keep", [0, 5, 8, 300, 100_000])
def test_a_truncated_file(tmp_path, keep):
    folder = copied(GOLDEN / "eagle3", tmp_path / "head")
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(keep)
    refused(folder, r"model\.safetensors: not a whole safetensors file .*truncated\?")


def test_a_file_that_is_something_else(tmp_path):
    folder = copied(GOLDEN / "eagle3", tmp_path / "head")
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    refused(folder, "not a whole safetensors file")


def giant(folder: Path, name: str, shape: list[int], dtype: str = "F32") -> Path:
    """A safetensors file of one tensor, with a sound header and a hole for its numbers."""
    count = torch.Size(shape).numel() * {"F32": 4, "I64": 8}[dtype]
    text = json.dumps({name: {"dtype": dtype, "shape": shape, "data_offsets": [0, count]}}).encode()
    path = folder / "model-giant.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + count)
    return path


GIANTS = {
    "fc.weight": [100_000, 100_000],
    "odd.weight": [10_000_000_000],
    "embed_tokens.weight": [10_000_000, 1000],
    "d2t": [5_000_000_000],
}


@pytest.fixture
def _nothing_is_read(monkeypatch):
    """No tensor may be asked for."""
    monkeypatch.setattr(Directory, "read", lambda self, name: pytest.fail(f"{name} was read"))


@pytest.mark.parametrize("name", GIANTS)
@pytest.mark.parametrize(
    "share",
    [
        1,
        20,
    ],
)
@pytest.mark.usefixtures("_nothing_is_read")
def test_forty_gigabytes_are_refused_unread(tmp_path, name, share):
    """And two. They take no disk here."""
    folder = broken(GOLDEN / "eagle3", tmp_path / "head", lambda config, tensors: tensors.pop(name, None))
    first, *rest = GIANTS[name]
    path = giant(folder, name, [first // share, *rest], "I64" if name == "d2t" else "F32")
    assert path.stat().st_size > (35 << 30) // share
    assert path.stat().st_blocks * 512 < 1 << 20
    refused(folder, r"its weights take \d+\.\d GiB, a head of this config \d+\.\d KiB at most.*nothing of it was read")


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.usefixtures("_nothing_is_read")
def test_every_kind_refuses_a_giant(tmp_path, name):
    folder = copied(GOLDEN / name, tmp_path / "head")
    giant(folder, "odd.weight", [500_000_000])
    with pytest.raises(UserError, match="nothing of it was read"):
        diagnose(folder, Question())


@pytest.mark.parametrize("name", ["eagle1", "eagle3", "speculators"])
@pytest.mark.usefixtures("_nothing_is_read")
def test_a_giant_is_refused_where_the_config_names_no_sizes(tmp_path, name):
    def bare(config: dict, tensors: dict) -> None:
        config.pop("hidden_size", None)
        config.get("transformer_layer_config", {}).pop("hidden_size", None)

    folder = broken(GOLDEN / name, tmp_path / "head", bare)
    giant(folder, "odd.weight", [500_000_000])
    with pytest.raises(UserError):
        diagnose(folder, Question())


# Indices


def indexed(folder: Path, weight_map: Any) -> Path:
    """A golden head with an index."""
    copied(GOLDEN / "eagle3", folder)
    text = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    "file",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "../other/model.safetensors",
        "/other/model.safetensors",
        "below/model.safetensors",
        "./model.safetensors",
        "pytorch_model.bin",
        "",
        "..",
    ],
)
def test_an_index_stays_in_its_directory(tmp_path, monkeypatch, file):
    (tmp_path / "other").mkdir()
    save_file({"norm.weight": torch.ones(3)}, tmp_path / "other" / "model.safetensors")
    folder = indexed(tmp_path / "head", {"norm.weight": "model.safetensors", "fc.weight": file})
    monkeypatch.setattr("headwright.heads.directory.header", lambda path: pytest.fail(f"{path} was opened"))
    refused(folder, "names a file outside the directory, or no safetensors file: .*: not read")


@pytest.mark.parametrize("weight_map", [None, 5, ["model.safetensors"], {"a": 5}, {"a": None}, {"a": ["b"]}])
def test_an_index_that_is_none(tmp_path, weight_map):
    refused(indexed(tmp_path / "head", weight_map), "has no weight_map of tensors and files")


def test_an_index_of_files_that_are_not_there(tmp_path):
    refused(indexed(tmp_path / "head", {"norm.weight": "model-1.safetensors"}), "model-1.safetensors: not a whole")


def test_an_index_that_names_a_tensor_too_many(tmp_path):
    names = [*read(GOLDEN / "eagle3")[1], "lost.weight"]
    folder = indexed(tmp_path / "head", dict.fromkeys(names, "model.safetensors"))
    refused(folder, r"names lost\.weight, which model\.safetensors does not hold")


def test_a_sharded_head_is_one_head(tmp_path):
    """Files beside those that the index names are not looked at."""
    config, tensors = read(GOLDEN / "eagle3")
    folder, names = copied(GOLDEN / "eagle3", tmp_path / "head"), sorted(tensors)
    (folder / "model.safetensors").unlink()
    where = {}
    for number, part in enumerate((names[:5], names[5:])):
        save_file({name: tensors[name] for name in part}, folder / f"model-{number}.safetensors")
        where |= dict.fromkeys(part, f"model-{number}.safetensors")
    save_file({"odd.weight": torch.ones(3)}, folder / "optimizer.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}), encoding="utf-8")
    diagnosis = diagnose(folder, Question(engines=("vllm",)))
    assert not diagnosis.errors("vllm")
    write_mended(diagnosis, ["vllm"], tmp_path / "out")
    again, copies = read(tmp_path / "out")
    assert again == config
    assert all(torch.equal(copies[name], tensors[name]) for name in tensors | copies)


# What is no head


@pytest.mark.parametrize(
    "names",
    [
        ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"],
        ["x"],
        [""],
        ["../../etc/passwd"],
        ["midlayerish.weight"],
    ],
)
def test_tensors_of_an_unknown_kind(tmp_path, names):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}), encoding="utf-8")
    save_file({name: torch.ones(3) for name in names}, tmp_path / "model.safetensors")
    refused(
        tmp_path, r"no draft head that is known \(architectures \['GPT2LMHeadModel'\], tensors .*known are .*eagle3"
    )


def test_a_file_without_tensors(tmp_path):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    save_file({}, tmp_path / "model.safetensors")
    refused(tmp_path, r"no \*\.safetensors in it|no draft head that is known")


def test_what_cannot_be_examined_ends_with_one_line(tmp_path, capsys):
    """Of the command too."""
    folder = with_config(tmp_path / "head", "[")
    with pytest.raises(SystemExit) as stopped:
        main([str(folder)])
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: {folder}")
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""


# Values of the wrong kind


def put(config: Any, path: tuple, value: Any) -> None:
    """Set a nested value; "REMOVED" removes it."""
    for step in path[:-1]:
        config = config[step]
    if value == "REMOVED":
        del config[path[-1]]
    else:
        config[path[-1]] = value


def examined(folder: Path, out: Path | None = None) -> Diagnosis | None:
    """The whole examination, shown and mended; None where it is refused. Anything but a UserError is a fault."""
    try:
        with within(2):
            diagnosis = diagnose(folder, Question())
            engines = [engine for engine in diagnosis.findings if engine != ALL]
            show(diagnosis, "T", engines)
            json.dumps(as_json(diagnosis, engines))
            if out is not None:
                write_mended(diagnosis, engines if diagnosis.method.portable else engines[:1], out)
                diagnose(out, Question())
            return diagnosis
    except UserError:
        return None


LAYER = ("transformer_layer_config",)
IDS = "eagle_aux_hidden_state_layer_ids"
TRACEBACKS = {  # where a value of the wrong kind ends in a traceback: golden head, place, value
    "identify: architectures": [
        ("mtp-mimo", ("architectures",), 5),
        ("mtp-mimo", ("architectures",), [5]),
        ("medusa", ("architectures",), [None]),
    ],
    "plain_config: no sizes": [
        ("eagle3", ("hidden_size",), "REMOVED"),
        ("speculators", (*LAYER, "hidden_size"), "REMOVED"),
        ("speculators", LAYER, "x"),
        ("speculators", LAYER, 1.5),
        ("eagle1", ("hidden_size",), "64"),
    ],
    "with_defaults: the rotary embedding": [
        ("eagle3", ("rope_parameters",), "default"),
        ("eagle3", ("rope_parameters", "rope_theta"), None),
        ("eagle3", ("rope_parameters", "rope_type"), None),
        ("eagle1", ("rope_scaling",), 3),
        ("eagle1", ("rope_parameters",), {"rope_theta": None}),
    ],
    "expected_bytes: sizes that are none": [
        ("eagle3", ("hidden_size",), "64"),
        ("eagle3", ("intermediate_size",), None),
        ("eagle3", ("vocab_size",), [272]),
        ("eagle3", ("num_attention_heads",), "2"),
        ("eagle3", ("hidden_size",), 2**70),
        ("eagle3", ("hidden_size",), 64.0),
        ("eagle3", ("eagle_config",), 1.5),
        ("eagle1", ("vocab_size",), {}),
        ("medusa", ("hidden_size",), {}),
        ("mtp-mimo", ("intermediate_size",), 1.5),
    ],
    "shapes_of: a loop over a number out of the file": [
        ("eagle3", ("num_hidden_layers",), 10**9),
        ("eagle3", ("num_aux_hidden_states",), 10**9),
        ("medusa", ("num_heads",), 10**9),
        ("medusa", ("num_hidden_layers",), 10**9),
    ],
    "launch_tensorrt: taps that are no numbers": [
        ("eagle3", (IDS,), 3),
        ("eagle3", (IDS, 0), [1]),
        ("eagle3", (IDS,), "245"),
        ("eagle3", (IDS, 1), None),
    ],
    "check_map: a vocabulary that is no number": [("speculators", (*LAYER, "vocab_size"), [272])],
}


SAID = [  # what ends as it should
    ("eagle3", ("architectures",), 5),
    ("eagle3", ("architectures",), [5]),
    ("eagle3", ("architectures",), None),
    ("mtp-mimo", ("architectures",), []),
    ("eagle1", ("architectures",), [None]),
    ("eagle3", ("hidden_size",), -64),
    ("eagle3", ("hidden_size",), 0),
    ("eagle3", ("max_position_embeddings",), None),
    ("medusa", ("num_heads",), "3"),
    ("speculators", ("speculators_config",), []),
    ("speculators", ("speculators_config", "verifier"), None),
]


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [case for cases in TRACEBACKS.values() for case in cases] + SAID,
)
def test_a_config_value_of_the_wrong_kind(tmp_path, name, path, value):
    """Nor is vLLM said to serve such a head."""
    folder = broken(GOLDEN / name, tmp_path / "head", lambda config, tensors: put(config, path, value))
    diagnosis = examined(folder, tmp_path / "out")
    assert diagnosis is None or diagnosis.errors("vllm")


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 3, 64, 2**40, 2**70, -0.5, 1.5, 1e308, float("nan"), float("inf")]),
    st.sampled_from(["", "64", "llama", "x" * 1000, "\u0000", "REMOVED"]),
    st.lists(st.one_of(st.none(), st.integers(-1, 3), st.just("a"), st.just([1])), max_size=4),
    st.dictionaries(
        st.sampled_from(["rope_theta", "rope_type", "type", "a", IDS]), st.sampled_from([None, 5, "x", [1]])
    ),
)


def places(config: Any, before: tuple = ()) -> Iterator[tuple]:
    """Every path into a nested value."""
    steps = config if isinstance(config, dict) else range(len(config)) if isinstance(config, list) else ()
    for step in steps:
        yield (*before, step)
        yield from places(config[step], (*before, step))


FUZZ = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@FUZZ
@given(st.data())
def test_random_configs(tmp_path, data):
    """A diagnosis or a UserError, whatever values there are."""
    name = data.draw(st.sampled_from(SHAPES))
    config, _ = read(GOLDEN / name)
    for _ in range(data.draw(st.integers(1, 3))):
        put(config, data.draw(st.sampled_from(list(places(config)))), data.draw(JUNK))
    folder = tmp_path / name
    if not folder.exists():
        copied(GOLDEN / name, folder)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    examined(folder)


NAMES = st.one_of(
    st.sampled_from(
        [
            "",
            "x",
            "d2t",
            "t2d",
            "token_map",
            "norm.weight",
            "embed_tokens.weight",
            "lm_head.weight",
            "fc.bias",
            "é.weight",
        ]
    ),
    st.sampled_from(["midlayer.x", "layers.9.a.weight", "layers.x.y", "../../e", "blocks.7.layers.0.weight", "model."]),
    st.sampled_from(["medusa_heads.0.0.linear.weight", "0.0.linear.bias", "0.1.weight", "midlayer.hidden_norm.weight"]),
)
DTYPES = st.sampled_from(
    [
        torch.float32,
        torch.bfloat16,
        torch.float64,
        torch.int64,
        torch.int32,
        torch.bool,
        torch.uint8,
        torch.float8_e4m3fn,
    ]
)
SIZES = st.sampled_from([(), (0,), (1,), (64,), (3, 5), (272, 64), (64, 64), (0, 64), (1, 2, 3)])


def test_a_medusa_block_without_dimensions(tmp_path):
    def change(config: dict, tensors: dict) -> None:
        tensors["blocks.0.layers.0.weight"] = torch.tensor(1.0)

    examined(broken(GOLDEN / "medusa", tmp_path / "head", change))


@FUZZ
@given(st.data())
def test_random_tensors(tmp_path, data):
    """Tensors left out, put in, of other shapes and dtypes."""
    name = data.draw(st.sampled_from(SHAPES))
    config, tensors = read(GOLDEN / name)
    for _ in range(data.draw(st.integers(1, 3))):
        chosen = data.draw(st.sampled_from(sorted(tensors)))
        fault = data.draw(st.sampled_from(["drop", "put", "dtype", "shape", "flat"]))
        if fault == "drop" and len(tensors) > 1:
            del tensors[chosen]
        elif fault == "put":
            tensors[data.draw(NAMES)] = torch.ones(data.draw(SIZES)).to(data.draw(DTYPES))
        elif fault == "dtype":
            tensors[chosen] = tensors[chosen].to(data.draw(DTYPES))
        elif fault == "shape" and not (name == "medusa" and "blocks.0" in chosen):  # the test above
            tensors[chosen] = torch.ones(data.draw(SIZES)).to(tensors[chosen].dtype)
        else:
            tensors[chosen] = tensors[chosen].flatten()[:7].clone()
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    examined(write(folder, config, tensors))


TOLD = {
    "method": "eagle3",
    "target": {
        "name": "t",
        "revision": None,
        "architecture": "LlamaForCausalLM",
        "vocab_size": 272,
        "hidden_size": 64,
        "num_layers": 8,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 32,
        "intermediate_size": 96,
        "rms_norm_eps": 1e-5,
        "rope": {"rope_type": "default", "rope_theta": 10000.0},
        "max_positions": 512,
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_ids": [258],
        "fingerprint": "",
        "template_hash": "",
    },
    "taps": [2, 4, 5],
    "config": {"model_type": "llama"},
    "tensors": {"fc.weight": "0"},
    "measured": {
        "chain": {"accepted_per_position": [0.5, 0.4]},
        "device": "cpu",
        "costs_ms": {"verify": {"1": 1.0, "4": 1.2}, "first": {"1": 0.1}, "level": {"1": 0.1}, "overhead": 0.1},
    },
}


def told(folder: Path, path: tuple, value: Any) -> Path:
    """A golden head with a headwright.json in which something is wrong."""
    ours = json.loads(json.dumps(TOLD))
    put(ours, path, value)
    (copied(GOLDEN / "eagle3", folder) / "headwright.json").write_text(json.dumps(ours), encoding="utf-8")
    return folder


UNTOLD = {
    "changed_since_export": [("tensors", [1]), ("tensors", True), ("config", [1]), ("config", "x")],
    "recommended": [
        ("measured", 5),
        ("measured.chain", [1]),
        ("measured.chain.accepted_per_position", 1.5),
        ("measured.chain.accepted_per_position", ["a"]),
        ("measured.costs_ms", 5),
        ("measured.costs_ms.verify", {}),
        ("measured.costs_ms.verify", "x"),
        ("measured.costs_ms.verify", {"1": "x"}),
        ("measured.costs_ms.first", 5),
        ("measured.costs_ms.level", "REMOVED"),
        ("measured.costs_ms.overhead", {}),
    ],
}


@pytest.mark.parametrize(
    ("path", "value"),
    [case for reason in UNTOLD for case in UNTOLD[reason]],
)
def test_headwright_json_of_the_wrong_kind(tmp_path, path, value):
    examined(told(tmp_path / "head", tuple(path.split(".")), value), tmp_path / "out")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("method", "other"),
        ("method", 5),
        ("method", None),
        ("target", None),
        ("target", {}),
        ("target", [1]),
        ("target", "x"),
        ("target.vocab_size", "x"),
        ("target.max_positions", None),
        ("target.rope", None),
        ("target.eos_token_ids", None),
        ("target.unknown", 1),
        ("taps", None),
        ("taps", "x"),
        ("taps", {}),
        ("tensors", None),
        ("tensors.fc.weight", "REMOVED"),
        ("config", None),
        ("measured", None),
    ],
)
def test_headwright_json_with_something_odd_in_it(tmp_path, path, value):
    steps = ("tensors", "fc.weight") if path == "tensors.fc.weight" else tuple(path.split("."))
    examined(told(tmp_path / "head", steps, value))


@pytest.mark.parametrize("text", ["", "[", "[]", "5"])
def test_headwright_json_that_is_no_object(tmp_path, text):
    folder = copied(GOLDEN / "eagle3", tmp_path / "head")
    (folder / "headwright.json").write_text(text, encoding="utf-8")
    refused(folder, r"headwright\.json: ")


def test_headwright_json_that_names_another_kind(tmp_path):
    """Its word is taken, and the tensors do not fit."""
    folder = told(tmp_path / "head", ("method",), "mtp-mimo")
    assert len(diagnose(folder, Question(engines=("vllm",))).errors("vllm")) > 5


# Nothing but headers is read before shapes are right


def test_misshapen_tensors_are_not_read(tmp_path, monkeypatch):
    """Their numbers say nothing."""

    def change(config: dict, tensors: dict) -> None:
        tensors["midlayer.mlp.up_proj.weight"] = torch.full((5, 5), float("nan"))

    folder, asked, plain = broken(GOLDEN / "eagle3", tmp_path / "head", change), [], Directory.read
    monkeypatch.setattr(Directory, "read", lambda self, name: asked.append(name) or plain(self, name))
    diagnosis = diagnose(folder, Question(engines=("vllm",)))
    assert "midlayer.mlp.up_proj.weight" not in asked
    assert "midlayer.mlp.down_proj.weight" in asked
    assert [finding.what[:9] for finding in diagnosis.errors("vllm")] == ["has shape"]


def test_a_head_that_is_not_whole_is_not_read_either(tmp_path, monkeypatch):
    folder = broken(GOLDEN / "eagle3", tmp_path / "head", drop("norm.weight"))
    monkeypatch.setattr(Directory, "read", lambda self, name: pytest.fail(f"{name} was read"))
    with pytest.raises(UserError, match=r"not a whole head: norm\.weight: missing, shape \(64,\)$"):
        open_plain(folder)


def test_a_file_that_is_cut_after_its_header_was_read(tmp_path):
    directory = Directory.open(copied(GOLDEN / "eagle3", tmp_path / "head"))
    with (directory.path / "model.safetensors").open("r+b") as file:
        file.truncate(20_000)
    with pytest.raises(UserError, match="cannot be read"):
        directory.read("norm.weight")


def test_every_engine_has_a_table_here():
    """Those above are asked about all that there are."""
    assert {table.engine for name in SHAPES for table in tables_of(name)} == {
        "vllm",
        "sglang",
        "tensorrt-llm",
        "llama.cpp",
    }


def tables_of(name: str) -> list:
    """The tables of a golden head's kind."""
    diagnosis = diagnose(GOLDEN / name, Question())
    return tables(diagnosis, list(diagnosis.findings))

"""`headwright doctor`: every fault is named with its consequence, what can be mended drafts again as it did, the
probe finds what names and shapes hide. Launch lines and exit codes: test_serve.py; bad input: test_bad_directories.py.

Good directories are real exports of tiny runs ("ours", with headwright.json) and the golden heads ("strangers", with
config.json and tensors alone), which were trained on their target's answers to six prompts.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import engine_cases
import pytest
import torch
from conftest import make_model, make_target, make_tiny_head, make_tokenizer, tiny_run
from engine_cases import CASES, GOLDEN, PROMPT, K, documents, own_texts, prompts, write_models
from safetensors.torch import load_file, save_file

import headwright.heads.doctor
import headwright.heads.probe
from headwright.configs import UserError
from headwright.configs.load import build
from headwright.data.harvest import harvest
from headwright.data.target import Target
from headwright.data.vocab import DraftVocab
from headwright.heads import get_head
from headwright.heads.base import Case, make_head
from headwright.heads.directory import Directory
from headwright.heads.doctor import Question, diagnose, write_mended
from headwright.heads.eagle3_tables import IDS
from headwright.heads.examine import ALL, Facts, against_target
from headwright.heads.export import export_run, filled, shared_tables, with_dtype, write_directory
from headwright.heads.foreign import identify, open_plain
from headwright.train.run import train

EVERY_TAP = tuple(range(9))
PORTABLE = ("vllm", "sglang", "tensorrt-llm")  # what serves a head with the norms of 3.1
FOUR = (*PORTABLE, "llama.cpp")


@pytest.fixture(scope="module", autouse=True)
def _targets_are_read_once():
    """The facts of a target, which every question with --target reads anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(headwright.heads.doctor, "target_facts", cache(headwright.heads.doctor.target_facts))
        yield


# Directories


def read(folder: Path) -> tuple[dict, dict]:
    """config.json and tensors."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config, {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}


def write(folder: Path, config: dict, tensors: dict) -> Path:
    """The same written anew."""
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "model.safetensors").unlink(missing_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def copied(source: Path, folder: Path) -> Path:
    """A copy without what tests keep beside it."""
    return shutil.copytree(source, folder, ignore=shutil.ignore_patterns("counters.json"))


def broken(source: Path, folder: Path, change: Callable[[dict, dict], None]) -> Path:
    """A copy with a fault in it."""
    config, tensors = read(copied(source, folder))
    change(config, tensors)
    return write(folder, config, tensors)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@cache
def states_of(target: Target) -> list:
    """What a target makes of every prompt."""
    return [target.features(torch.tensor([prompt])) for prompt in prompts()]


def drafts(folder: Path, target: Target) -> list[list[int]]:
    """What the independent reader drafts after every prompt. `target` gives all its states."""
    plain = open_plain(folder)
    reader, tables = plain.method.reader(plain.config, plain.tensors), shared_tables(target)
    taps, found = list(plain.config.get(IDS) or (2, 4, 5)), []
    for prompt, states in zip(prompts(), states_of(target)):
        case = Case(prompt[1:], states.taps_BNKD[0, :-1][:, taps], states.last_BND[0, :-1])
        found.append(reader.draft(tables, case, K).tokens)
    return found


KINDS = {  # a run's head, and the formats that it is exported in
    "eagle3": ({"kind": "eagle3", "steps": 2, "taps": [1, 3, 6]}, ["portable", "vllm", "speculators"]),
    "eagle1": ({"kind": "eagle1", "steps": 2}, ["vllm", "sglang"]),
    "medusa": ({"kind": "medusa", "steps": 2}, ["vllm"]),
    "mimo": ({"kind": "mtp", "steps": 2, "block": "llama"}, ["mimo"]),
    "ernie": ({"kind": "mtp", "steps": 2, "block": "llama", "norm": False, "feed": "raw"}, ["ernie"]),
}
SERVED_BY = {  # the engines that a real export must please
    "eagle3/portable": PORTABLE,
    "eagle3/vllm": ("vllm",),
    "eagle3/speculators": ("vllm",),
    "eagle1/vllm": ("vllm",),
    "eagle1/sglang": ("sglang",),
    "medusa/vllm": ("vllm",),
    "mimo/mimo": ("vllm", "sglang"),
    "ernie/ernie": ("vllm",),
}


@pytest.fixture(scope="module")
def exports(model_dir, chats, tmp_path_factory) -> Path:
    """Runs of every kind that engines serve, trained for a moment on shared features and exported."""
    runs = tmp_path_factory.mktemp("runs")
    for name, (head, engines) in KINDS.items():
        run = tiny_run(
            model_dir,
            chats,
            runs,
            name=name,
            head=head,
            harvest={"taps": [1, 3, 6, 8], "tokens_per_batch": 512, "dtype": "float32"},
            export={"prompts": 2, "engines": engines},
        )
        run.features = None if name == "eagle3" else "eagle3"
        if run.features is None:
            harvest(run)
        train(run)
        export_run(run)
    return runs


def export_of(exports: Path, name: str) -> Path:
    """A run's directory for an engine, by "run/format"."""
    run, engine = name.split("/")
    return exports / run / "export" / engine


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """The golden heads' targets as directories."""
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


@pytest.fixture(scope="module")
def targets() -> dict[str, Target]:
    """The same in memory, with all their states; and "tiny", that of the runs."""
    golden = {family: engine_cases.make_target(family, EVERY_TAP) for family in ("llama", "qwen3")}
    return golden | {"tiny": make_target(taps=EVERY_TAP)}


@dataclass
class World:
    """A good directory, its target in memory and on disk."""

    folder: Path
    target: Target
    model: Path
    taps: list[int]

    def ask(self, *engines: str) -> Question:
        """With the target to compare with."""
        return Question(str(self.model), engines)


@pytest.fixture(params=["ours", "stranger"])
def world(request, exports, models, targets, model_dir) -> World:
    """An EAGLE-3 head in the portable format."""
    if request.param == "stranger":
        return World(GOLDEN / "eagle3", targets["llama"], models / "llama", [2, 4, 5])
    return World(export_of(exports, "eagle3/portable"), targets["tiny"], model_dir, [1, 3, 6])


# The controls: an unbroken directory has no error, a broken one is named, a mended one drafts as before


def drop(name: str) -> Callable[[dict, dict], None]:
    """Leave a tensor out."""
    return lambda config, tensors: tensors.pop(name)


def put(name: str, tensor: torch.Tensor) -> Callable[[dict, dict], None]:
    """Write a tensor."""
    return lambda config, tensors: tensors.update({name: tensor})


def alter(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict, dict], None]:
    """Change a tensor."""
    return lambda config, tensors: tensors.update({name: make(tensors[name]).contiguous()})


def keys(**values) -> Callable[[dict, dict], None]:
    """Set keys; None removes one."""

    def change(config: dict, tensors: dict) -> None:
        config.update(values)
        for name in [name for name, value in values.items() if value is None]:
            del config[name]

    return change


def taps_written(top: list[int] | None, nested: list[int] | None) -> Callable[[dict, dict], None]:
    """The two lists of taps; None leaves one out."""

    def change(config: dict, tensors: dict) -> None:
        config.pop(IDS)
        config["eagle_config"].pop(IDS)
        config.update({} if top is None else {IDS: top})
        config["eagle_config"].update({} if nested is None else {IDS: nested})

    return change


def poisoned(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """One number replaced."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[3] = value
        return tensor

    return change


def turned(tensor: torch.Tensor) -> torch.Tensor:
    """Transposed."""
    return tensor.T


def exchanged(tensor: torch.Tensor) -> torch.Tensor:
    """The halves of the columns changed over."""
    return torch.cat(list(reversed(tensor.chunk(2, 1))), 1)


def swapped_halves(config: dict, tensors: dict) -> None:
    """[feature ; embedding] in EAGLE-3's first layer."""
    for part in "qkv":
        name = f"midlayer.self_attn.{part}_proj.weight"
        tensors[name] = exchanged(tensors[name])


@dataclass(frozen=True)
class Fault:
    """What is broken, what must be found (regular expressions), and by engine what it says will come of it."""

    change: Callable[[dict, dict], None]
    where: str
    what: str
    so: dict[str, str] = field(default_factory=dict)
    mends: bool | None = False  # None: where headwright.json tells how


def everywhere(so: str) -> dict[str, str]:
    """The same consequence in all engines."""
    return dict.fromkeys(PORTABLE, so)


def absolute(config: dict, tensors: dict) -> None:
    """Target ids where offsets belong."""
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


GATE, VALUES = "midlayer.mlp.gate_proj.weight", "midlayer.self_attn.v_proj.weight"
STOPS = "the engine stops when it loads the head"
FAULTS = {
    "missing norm": Fault(
        drop("norm.weight"),
        r": norm\.weight",
        "missing, shape",
        {"vllm": "puts ones there without a word", "sglang": "without a word", "tensorrt-llm": STOPS},
    ),
    "missing norm of the states": Fault(
        drop("midlayer.hidden_norm.weight"),
        r"midlayer\.hidden_norm\.weight",
        "missing, shape",
        {"vllm": "puts ones there without a word", "sglang": "without a word"},
    ),
    "missing matrix": Fault(
        drop("midlayer.mlp.down_proj.weight"),
        r"midlayer\.mlp\.down_proj\.weight",
        "missing, shape",
        {"vllm": "uninitialised memory there without a word: τ = 1.0", "sglang": "accept len 1.00"},
    ),
    "missing lm_head": Fault(
        drop("lm_head.weight"), r": lm_head\.weight", "missing", {"vllm": "τ = 1.0", "sglang": "accept len 1.00"}
    ),
    "missing d2t": Fault(
        drop("d2t"),
        ": d2t",
        "missing, shape",
        {"vllm": "drafts the first ids of the vocabulary", "sglang": "takes draft ids for target ids"},
        mends=True,
    ),
    "absolute d2t": Fault(
        absolute, ": d2t", "holds target ids, not offsets", everywhere("every draft is another token"), mends=True
    ),
    "d2t of another order": Fault(
        alter("d2t", lambda d2t: d2t.flip(0)), ": d2t", "d2t and t2d disagree", everywhere("drafts are other tokens")
    ),
    "a token too many in t2d": Fault(
        alter("t2d", lambda t2d: t2d | (torch.arange(len(t2d)) == int(t2d.long().argmin()))),
        ": d2t",
        "d2t and t2d disagree",
        everywhere("drafts are other tokens"),
    ),
    "d2t in floats": Fault(
        alter("d2t", torch.Tensor.float), ": d2t", "is F32, must be I64", everywhere("read as other values"), mends=True
    ),
    "t2d in bytes": Fault(
        alter("t2d", lambda t2d: t2d.to(torch.uint8)), ": t2d", "is U8, must be BOOL", everywhere("read as"), mends=True
    ),
    "extra tensor": Fault(
        put("verifier_norm.weight", torch.ones(32)),
        r"verifier_norm\.weight",
        "not known to the format",
        {"vllm": "stops: no module or parameter of that name", "tensorrt-llm": "stops at an unknown name"},
        mends=True,
    ),
    "one tap too many": Fault(
        taps_written([1, 3, 4, 6], [0, 2, 3, 5]),
        f"config.json: {IDS}",
        r"\[1, 3, 4, 6\]: must be 3 ascending",
        {"vllm": "feeds the head other states than it was trained on", "sglang": "other states than it was trained on"},
        mends=None,
    ),
    "taps in another order": Fault(
        taps_written([6, 3, 1], [5, 2, 0]),
        f"config.json: {IDS}",
        "must be 3 ascending, distinct",
        {"vllm": "other states", "sglang": "other states"},
        mends=None,
    ),
    "a weight for other taps": Fault(
        alter("fc.weight", lambda fc: fc[:, : 2 * len(fc)]),
        r": fc\.weight",
        r"has shape \(\d+, \d+\), the format wants \(\d+, \d+\)$",
        everywhere("stops at start, or reads other numbers"),
    ),
    "no dtype": Fault(
        keys(dtype=None, torch_dtype=None),
        "config.json: dtype",
        "is missing",
        {"sglang": "runs the head in float16"},
        mends=True,
    ),
    "short context": Fault(
        keys(max_position_embeddings=64),
        "config.json: max_position_embeddings",
        "is 64, the target's context is 512",
        {
            "vllm": "beyond|long texts",
            "sglang": "SGLang refuses to start",
            "tensorrt-llm": "long texts draft badly",
        },
        mends=True,
    ),
    "no context": Fault(
        keys(max_position_embeddings=None),
        "config.json: max_position_embeddings",
        "is missing: engines assume 2048",
        everywhere(""),
        mends=True,
    ),
    "tied": Fault(
        keys(tie_word_embeddings=True),
        "config.json: tie_word_embeddings",
        "is true, must be false",
        {"sglang": "lm_head.* away"},
        mends=True,
    ),
    "no draft_vocab_size": Fault(
        keys(draft_vocab_size=None),
        "config.json: draft_vocab_size",
        "is missing",
        {"sglang": "AttributeError", "tensorrt-llm": "AttributeError"},
    ),
    "a width of null": Fault(
        lambda config, tensors: config.update(target_hidden_size=None),
        "config.json: target_hidden_size",
        "is null",
        {"sglang": "TypeError"},
        mends=True,
    ),
    "another class": Fault(
        keys(architectures=["Eagle3SomethingElse"]),
        "config.json: architectures",
        "none of LlamaForCausalLMEagle3",
        {"vllm": "vLLM stops", "sglang": "builds another class and stops"},
        mends=True,
    ),
    "two rotary bases": Fault(
        keys(rope_theta=77.0),
        "config.json: rope_scaling",
        "rope_theta is 77, and 10000 in rope_parameters",
        everywhere("engines read one or the other"),
        mends=True,
    ),
    "transposed": Fault(
        alter(GATE, turned), GATE, r"has shape .*: transposed$", everywhere("stops at start, or reads"), mends=True
    ),
    "a weight in fp64": Fault(
        alter(VALUES, torch.Tensor.double), VALUES, "is F64, must be F32 or BF16 or F16", everywhere("or refused")
    ),
    "NaN": Fault(
        alter(VALUES, poisoned(float("nan"))),
        VALUES,
        r"holds NaN or infinite values \(1 of \d+\)",
        everywhere("noise"),
    ),
    "infinite": Fault(
        alter("norm.weight", poisoned(float("inf"))), r": norm\.weight", "NaN or infinite", everywhere("noise")
    ),
    "all zero": Fault(alter(VALUES, torch.zeros_like), VALUES, "is all zero", everywhere("τ = 1.0")),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_what_comes_of_it(world, tmp_path, name):
    fault = FAULTS[name]
    folder = broken(world.folder, tmp_path / "head", fault.change)
    good, diagnosis = diagnose(world.folder, world.ask()), diagnose(folder, world.ask())
    for engine, so in fault.so.items():
        assert not good.errors(engine)
        found = [
            f for f in diagnosis.errors(engine) if re.search(fault.where, f.where) and re.search(fault.what, f.what)
        ]
        assert len(found) == 1, diagnosis.errors(engine)
        assert re.search(so, found[0].so)
        assert found[0].fix
        if fault.mends is not True and engine != "vllm":
            continue
        done = write_mended(diagnose(folder, world.ask(engine)), [engine], tmp_path / engine)
        again = diagnose(tmp_path / engine, world.ask(engine))
        if fault.mends:
            assert found[0].where in [finding.where for finding in done]
            assert not again.errors(engine)
            assert drafts(tmp_path / engine, world.target) == drafts(world.folder, world.target)
        elif fault.mends is False:
            assert again.errors(engine)


@pytest.mark.parametrize("name", [name for name in FAULTS if FAULTS[name].mends])
def test_one_copy_mends_it_for_all_engines(world, tmp_path, name):
    folder = broken(world.folder, tmp_path / "head", FAULTS[name].change)
    before = contents(folder)
    write_mended(diagnose(folder, world.ask(*PORTABLE)), PORTABLE, tmp_path / "out")
    again = diagnose(tmp_path / "out", world.ask(*PORTABLE))
    assert not [finding for engine in PORTABLE for finding in again.errors(engine)]
    assert drafts(tmp_path / "out", world.target) == drafts(world.folder, world.target)
    assert contents(folder) == before


def test_a_good_head_is_copied_as_it_is(world, tmp_path):
    assert write_mended(diagnose(world.folder, world.ask("vllm")), ["vllm"], tmp_path / "out") == []
    (config, tensors), (same, copies) = read(world.folder), read(tmp_path / "out")
    assert config == same
    assert tensors.keys() == copies.keys()
    assert all(torch.equal(tensors[name], copies[name]) for name in tensors)


def test_taps_in_the_nested_list_alone_are_off_by_one(world, tmp_path):
    """There they count layers' outputs, which vLLM and llama.cpp take for layers before."""
    nested = [tap - 1 for tap in world.taps]
    folder = broken(world.folder, tmp_path / "head", taps_written(None, nested))
    diagnosis = diagnose(folder, world.ask(*FOUR))
    for engine in ("vllm", "llama.cpp"):
        found = [finding for finding in diagnosis.errors(engine) if finding.what.startswith("stands in eagle_config")]
        assert len(found) == 1
        assert str(nested) in found[0].what
        assert f"{engine} feeds the head other states than it was trained on" in found[0].so
    write_mended(diagnose(folder, world.ask("vllm")), ["vllm"], tmp_path / "out")
    config, _ = read(tmp_path / "out")
    assert (config[IDS], config["eagle_config"][IDS]) == (world.taps, nested)
    assert not diagnose(tmp_path / "out", world.ask("vllm", "sglang")).errors("vllm")
    assert drafts(tmp_path / "out", world.target) == drafts(world.folder, world.target)


def test_sglang_reads_the_nested_list(exports, tmp_path):
    folder = broken(export_of(exports, "eagle3/portable"), tmp_path / "head", taps_written(None, [0, 2, 5]))
    assert not diagnose(folder, Question(engines=("sglang",))).findings["sglang"][:-1]  # the last: fp32


@pytest.mark.parametrize("nested", [[1, 3, 4], [1, 3, 8]])
def test_tensorrt_is_told_the_layers_of_a_nested_list(models, tmp_path, nested):
    """Or that they are wrong: beyond the target's, here."""
    folder = broken(GOLDEN / "eagle3", tmp_path / "head", taps_written(None, nested))
    diagnosis = diagnose(folder, Question(str(models / "llama"), ("tensorrt-llm",)))
    (table,) = [table for table in diagnosis.method.contracts if table.engine == "tensorrt-llm"]
    line = table.launch(diagnosis.directory.config, "T", folder, 3)
    assert diagnosis.errors("tensorrt-llm") or f'"eagle3_layers_to_capture": {[1, 3, 4]}' in line


def test_a_tap_too_many_is_mended_where_headwright_json_knows_better(exports, tmp_path):
    folder = broken(export_of(exports, "eagle3/portable"), tmp_path / "head", FAULTS["one tap too many"].change)
    write_mended(diagnose(folder, Question(engines=("vllm",))), ["vllm"], tmp_path / "out")
    assert not diagnose(tmp_path / "out", Question(engines=("vllm",))).errors("vllm")


def test_taps_at_the_top_alone_are_not_read_by_sglang(world, tmp_path):
    """Unless they are those that it captures when nothing is said."""
    folder = broken(world.folder, tmp_path / "head", taps_written(world.taps, None))
    found = [f for f in diagnose(folder, world.ask("sglang")).errors("sglang") if "stands at the top level" in f.what]
    usual = world.taps == [2, 4, 5]
    assert len(found) == (not usual)
    assert [f for f in diagnose(folder, Question(engines=("vllm",))).errors("vllm") if f.engine == "vllm"] == []
    write_mended(diagnose(folder, world.ask("sglang")), ["sglang"], tmp_path / "out")
    assert not diagnose(tmp_path / "out", world.ask("sglang")).errors("sglang")


def test_lists_that_contradict_each_other(world, tmp_path):
    folder = broken(world.folder, tmp_path / "head", taps_written(world.taps, world.taps))
    for engine in ("vllm", "sglang"):
        found = [finding for finding in diagnose(folder, world.ask(engine)).errors(engine) if IDS in finding.where]
        assert "the latter must be one less each" in found[0].what
        write_mended(diagnose(folder, world.ask(engine)), [engine], tmp_path / engine)
        assert not diagnose(tmp_path / engine, world.ask(engine)).errors(engine)
        assert drafts(tmp_path / engine, world.target) == drafts(world.folder, world.target)


def test_other_taps_than_in_training_are_told_by_headwright_json(exports, tmp_path):
    """Both lists agree with each other, and are wrong."""
    good = export_of(exports, "eagle3/portable")
    folder = broken(good, tmp_path / "head", taps_written([2, 4, 5], [1, 3, 4]))
    for engine in ("vllm", "sglang", "llama.cpp"):
        found = diagnose(folder, Question(engines=(engine,))).findings[engine]
        assert [f for f in found if f.what == "the engine captures [2, 4, 5], the head was trained on [1, 3, 6]"]
    write_mended(diagnose(folder, Question(engines=("vllm", "sglang"))), ("vllm", "sglang"), tmp_path / "out")
    config, _ = read(tmp_path / "out")
    assert (config[IDS], config["eagle_config"][IDS]) == ([1, 3, 6], [0, 2, 5])


def four_taps_at_the_top(config: dict, tensors: dict) -> None:
    """What makes vLLM 0.32 stop: it sizes fc for three states."""
    del config["num_aux_hidden_states"], config["eagle_config"][IDS]


def test_four_taps_that_are_not_counted(targets, models, tmp_path):
    folder = broken(GOLDEN / "eagle3-four-taps", tmp_path / "head", four_taps_at_the_top)
    question = Question(str(models / "llama"), ("vllm",))
    found = [f for f in diagnose(folder, question).errors("vllm") if f.where == "config.json: num_aux_hidden_states"]
    assert [f.what for f in found] == ["is missing, and the head fuses 4 states"]
    assert "stops at the shapes (its issue 54526)" in found[0].so
    write_mended(diagnose(folder, question), ["vllm"], tmp_path / "out")
    assert not diagnose(tmp_path / "out", question).errors("vllm")
    assert drafts(tmp_path / "out", targets["llama"]) == drafts(GOLDEN / "eagle3-four-taps", targets["llama"])


def random_embedding(config: dict, tensors: dict) -> None:
    """Left over from an initialisation."""
    generator = torch.Generator().manual_seed(3)
    tensors["embed_tokens.weight"] = torch.randn(config["vocab_size"], config["hidden_size"], generator=generator)


def test_a_random_embedding_is_told_from_the_targets(world, tmp_path):
    folder = broken(world.folder, tmp_path / "head", random_embedding)
    assert not diagnose(folder, Question(engines=("vllm",))).errors("vllm")  # without the target nobody can tell
    found = [f for f in diagnose(folder, world.ask("vllm")).errors("vllm") if "embed_tokens" in f.where]
    assert "has nothing in common with the target's embedding (mean cosine -0.0" in found[0].what or (
        "has nothing in common with the target's embedding (mean cosine 0.0" in found[0].what
    )
    assert "vLLM keeps it" in found[0].so
    assert "drafts badly without a word" in found[0].so
    write_mended(diagnose(folder, world.ask("vllm")), ["vllm"], tmp_path / "out")
    assert "embed_tokens.weight" not in read(tmp_path / "out")[1]
    assert not diagnose(tmp_path / "out", world.ask("vllm")).errors("vllm")
    assert drafts(tmp_path / "out", world.target) == drafts(world.folder, world.target)


@pytest.mark.parametrize(("dtype", "noise"), [(torch.float32, 0.0), (torch.bfloat16, 0.0), (torch.float32, 0.5)])
def test_a_copy_of_the_targets_embedding_or_a_relative_is_no_error(world, tmp_path, dtype, noise):
    rows = world.target.embed(torch.arange(272))
    rows = rows + noise * rows.std() * torch.randn(rows.shape, generator=torch.Generator().manual_seed(0))
    rows = rows.to(dtype)
    folder = broken(world.folder, tmp_path / "head", put("embed_tokens.weight", rows))
    diagnosis = diagnose(folder, world.ask())
    warned = [finding for finding in diagnosis.all() if "embed_tokens" in finding.where]
    assert not diagnosis.errors("vllm")
    if not noise:
        assert not warned
    else:
        assert [(f.level, f.engine) for f in warned] == [("warning", "sglang")]
        assert "trained with the head" in warned[0].what


def test_sglang_serves_a_head_with_a_random_embedding(world, tmp_path):
    """It puts the target's there."""
    folder = broken(world.folder, tmp_path / "head", random_embedding)
    assert not diagnose(folder, world.ask("sglang")).errors("sglang")


def without_rotation(config: dict, tensors: dict) -> None:
    """Every key of the rotary embedding left out."""
    for name in ("rope_theta", "rope_scaling", "rope_parameters"):
        config.pop(name)


def test_a_rotary_base_that_is_not_written(world, tmp_path):
    """A stranger's may be meant so; of an export of ours headwright.json knows better."""
    folder = broken(world.folder, tmp_path / "head", without_rotation)
    diagnosis, ours = diagnose(folder, world.ask("sglang")), (world.folder / "headwright.json").is_file()
    warned = [f for f in diagnosis.findings["sglang"] if f.where == "config.json: rope_theta"]
    assert [(f.level, f.what) for f in warned] == [
        ("warning", "is missing: engines assume 10000, the target has 10000")
    ]
    assert "turns by wrong angles" in warned[0].so
    changed = {f.where: f.what for f in diagnosis.findings[ALL]}
    if ours:
        assert changed["config.json: rope_theta"] == "is None, was exported as 10000.0"
        assert "config.json: rope_parameters" in changed
        write_mended(diagnosis, ["sglang"], tmp_path / "out")
        assert not diagnose(tmp_path / "out", world.ask("sglang")).errors("sglang")
        assert read(tmp_path / "out")[0]["rope_theta"] == 10000.0
        assert drafts(tmp_path / "out", world.target) == drafts(world.folder, world.target)
    else:
        assert not changed


def test_the_new_spelling_alone_is_a_warning(world, tmp_path):
    folder = broken(world.folder, tmp_path / "head", lambda config, tensors: config.pop("rope_theta"))
    found = [f for f in diagnose(folder, world.ask("vllm")).findings["vllm"] if f.where.endswith("rope_parameters")]
    assert [(f.level, f.what) for f in found] == [("warning", "stands in rope_parameters only")]
    write_mended(diagnose(folder, world.ask("vllm")), ["vllm"], tmp_path / "out")
    assert read(tmp_path / "out")[0]["rope_theta"] == 10000.0


SILENT = {  # right names and shapes
    "halves exchanged": (swapped_halves, [f"midlayer.self_attn.{part}_proj.weight" for part in "kqv"]),
    "square matrix transposed": (
        alter("midlayer.self_attn.o_proj.weight", turned),
        ["midlayer.self_attn.o_proj.weight"],
    ),
    "one number": (alter("fc.weight", poisoned(0.125)), ["fc.weight"]),
    "other precision": (alter("fc.weight", lambda fc: fc.bfloat16()), ["fc.weight"]),
}


@pytest.mark.parametrize("name", SILENT)
def test_a_changed_tensor_of_ours_is_told_by_its_checksum(exports, tmp_path, name):
    change, names = SILENT[name]
    good = export_of(exports, "eagle3/portable")
    assert not diagnose(good, Question(engines=PORTABLE)).errors("vllm")
    diagnosis = diagnose(broken(good, tmp_path / "head", change), Question(engines=PORTABLE))
    assert [(f.where, f.what) for f in diagnosis.findings[ALL]] == [
        (f"model.safetensors: {tensor}", "is not the tensor that was exported") for tensor in names
    ]
    assert "what the export proved" in diagnosis.findings[ALL][0].so
    assert all(diagnosis.errors(engine) for engine in PORTABLE)


def test_a_changed_key_of_ours_is_named_and_written_back(exports, targets, tmp_path):
    good = export_of(exports, "eagle3/portable")
    folder = broken(good, tmp_path / "head", keys(rms_norm_eps=0.25, fc_norm=None, of_a_stranger=1))
    found = {f.where: f.what for f in diagnose(folder, Question(engines=("vllm",))).findings[ALL]}
    assert found == {
        "config.json: fc_norm": "is None, was exported as True",
        "config.json: of_a_stranger": "is 1, was exported as None",
        "config.json: rms_norm_eps": "is 0.25, was exported as 1e-06",
    }
    write_mended(diagnose(folder, Question(engines=("vllm",))), ["vllm"], tmp_path / "out")
    config, _ = read(tmp_path / "out")
    assert (config["rms_norm_eps"], config["fc_norm"]) == (1e-06, True)
    assert drafts(tmp_path / "out", targets["tiny"]) == drafts(good, targets["tiny"])


def test_a_mended_export_no_longer_claims_its_proof(exports, tmp_path):
    good = export_of(exports, "eagle3/portable")
    folder = broken(good, tmp_path / "head", keys(tie_word_embeddings=True))
    write_mended(diagnose(folder, Question(engines=("sglang",))), ["sglang"], tmp_path / "out")
    told = json.loads((tmp_path / "out" / "headwright.json").read_text(encoding="utf-8"))
    assert told.keys() == {"method", "head", "target", "taps", "mended"}
    assert told["mended"][0] == "config.json: tie_word_embeddings: is true, must be false"


def test_fp32_and_no_dtype_become_float16_in_sglang(exports, tmp_path):
    good = export_of(exports, "eagle3/portable")  # of a target in fp32
    found = [f for f in diagnose(good, Question(engines=("sglang",))).all() if f.where == "config.json: dtype"]
    assert [(f.level, f.what) for f in found] == [("warning", "is float32")]
    assert "float16" in found[0].so
    assert not [f for f in diagnose(good, Question(engines=("vllm",))).all() if f.where == "config.json: dtype"]
    folder = broken(GOLDEN / "eagle3", tmp_path / "head", keys(dtype=None, torch_dtype=None))
    levels = {f.engine: f.level for f in diagnose(folder, Question()).all() if f.where == "config.json: dtype"}
    assert levels == {"vllm": "warning", "sglang": "error", "tensorrt-llm": "warning", "llama.cpp": "warning"}


def test_one_spelling_of_the_dtype_is_a_note(tmp_path):
    folder = broken(GOLDEN / "eagle3", tmp_path / "head", keys(torch_dtype=None))
    found = [f for f in diagnose(folder, Question(engines=("sglang",))).all() if f.where == "config.json: dtype"]
    assert [(f.level, f.what) for f in found] == [("note", "torch_dtype is missing")]
    write_mended(diagnose(folder, Question(engines=("sglang",))), ["sglang"], tmp_path / "out")
    assert read(tmp_path / "out")[0]["torch_dtype"] == "bfloat16"


# The other kinds


def head_of(name: str, tmp_path: Path, change: Callable[[dict, dict], None]) -> Path:
    """A golden head with a fault."""
    return broken(GOLDEN / name, tmp_path / "head", change)


def in_table(folder: Path, engine: str, where: str) -> list:
    """What an engine's own table says about a place."""
    return [f for f in diagnose(folder, Question(engines=(engine,))).findings[engine] if f.where == where]


def check_mended(name: str, folder: Path, engine: str, targets: dict[str, Target], out: Path) -> None:
    """The corrected copy has no error and drafts as the golden head does."""
    write_mended(diagnose(folder, Question(engines=(engine,))), [engine], out)
    assert not diagnose(out, Question(engines=(engine,))).errors(engine)
    target = targets[CASES[name][0]]
    assert drafts(out, target) == drafts(GOLDEN / name, target)


def test_eagle1_with_an_lm_head(tmp_path):
    """vLLM stops at it, SGLang takes the target's."""
    folder = head_of("eagle1", tmp_path, put("lm_head.weight", torch.randn(272, 64)))
    assert not diagnose(GOLDEN / "eagle1", Question(engines=("vllm",))).errors("vllm")
    (found,) = in_table(folder, "vllm", "model.safetensors: lm_head.weight")
    assert (found.level, found.what) == ("error", "not known to the format")
    assert "vLLM stops" in found.so
    assert not in_table(folder, "sglang", "model.safetensors: lm_head.weight")


def test_an_lm_head_is_left_out_of_eagle1(targets, tmp_path):
    folder = head_of("eagle1", tmp_path, put("lm_head.weight", targets["llama"].lm_head.weight))
    check_mended("eagle1", folder, "vllm", targets, tmp_path / "out")


def test_eagle1_of_vllms_format_lacks_a_bias_in_sglang(targets, tmp_path):
    """Zeros are what the head was trained with."""
    folder = copied(GOLDEN / "eagle1", tmp_path / "head")
    (found,) = in_table(folder, "sglang", "model.safetensors: fc.bias")
    assert found.what == "missing, shape (64,)"
    assert "adds random numbers to every feature" in found.so
    (found,) = in_table(folder, "sglang", "config.json: architectures")
    assert "builds a whole model instead of a head" in found.so
    check_mended("eagle1", folder, "sglang", targets, tmp_path / "out")
    assert not read(tmp_path / "out")[1]["fc.bias"].any()


@pytest.mark.parametrize("extra", ["layers.0.input_layernorm.weight", "norm.weight", "fc.bias"])
def test_eagle1_with_parts_that_vllm_lacks_cannot_be_mended(tmp_path, extra):
    """Leaving them out would change what the head computes."""
    folder = head_of("eagle1", tmp_path, put(extra, torch.full((64,), 0.5)))
    (found,) = in_table(folder, "vllm", f"model.safetensors: {extra}")
    assert "train without" in found.fix
    write_mended(diagnose(folder, Question(engines=("vllm",))), ["vllm"], tmp_path / "out")
    assert extra in read(tmp_path / "out")[1]
    assert diagnose(tmp_path / "out", Question(engines=("vllm",))).errors("vllm")


def test_what_stays_as_it_is_does_not_count_as_corrected(tmp_path):
    folder = head_of("eagle1", tmp_path, put("fc.bias", torch.full((64,), 0.5)))
    assert write_mended(diagnose(folder, Question(engines=("vllm",))), ["vllm"], tmp_path / "out") == []


def test_a_bias_of_zeros_is_left_out_for_vllm(targets, tmp_path):
    folder = head_of("eagle1", tmp_path, put("fc.bias", torch.zeros(64)))
    assert in_table(folder, "vllm", "model.safetensors: fc.bias")
    check_mended("eagle1", folder, "vllm", targets, tmp_path / "out")


def test_eagle1_that_claims_two_layers(tmp_path):
    """Engines make as many, of random memory."""
    folder = head_of("eagle1", tmp_path, keys(num_hidden_layers=2))
    (found,) = in_table(folder, "vllm", "config.json: num_hidden_layers")
    assert "random memory" in found.so


@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
def test_biases_that_are_announced_and_absent(targets, tmp_path, name):
    """vLLM makes them, and nothing fills them."""
    folder = head_of(name, tmp_path, keys(attention_bias=True))
    (found,) = in_table(folder, "vllm", "config.json: attention_bias")
    assert "uninitialised memory" in found.so
    check_mended(name, folder, "vllm", targets, tmp_path / "out")


def test_two_layers_name_a_norm_twice(tmp_path):
    """vLLM reads the second layer's input_layernorm, SGLang its hidden_norm: one that is missing is named there."""
    for name, reader, other in (("input_layernorm", "vllm", "sglang"), ("hidden_norm", "sglang", "vllm")):
        tensor = f"layers.1.{name}.weight"
        folder = broken(GOLDEN / "eagle3-two-layers", tmp_path / name, drop(tensor))
        assert in_table(folder, reader, f"model.safetensors: {tensor}")[0].what == "missing, shape (64,)"
        assert not in_table(folder, other, f"model.safetensors: {tensor}")


def test_layer_0_is_the_midlayer_and_a_prefix_is_sglangs_alone(targets, tmp_path):
    def renamed(config: dict, tensors: dict) -> None:
        for name in [name for name in tensors if name.startswith("midlayer")]:
            tensors[name.replace("midlayer", "layers.0")] = tensors.pop(name)

    def prefixed(config: dict, tensors: dict) -> None:
        for name in [name for name in tensors if "." in name]:
            tensors[f"model.{name}"] = tensors.pop(name)

    folder = broken(GOLDEN / "eagle3", tmp_path / "renamed", renamed)
    assert not [f for engine in PORTABLE for f in diagnose(folder, Question()).errors(engine)]
    assert drafts(folder, targets["llama"]) == drafts(GOLDEN / "eagle3", targets["llama"])
    diagnosis = diagnose(broken(GOLDEN / "eagle3", tmp_path / "prefixed", prefixed), Question())
    assert not diagnosis.errors("sglang")
    assert [f.where for f in diagnosis.errors("vllm") if "model.fc.weight" in f.where]


MTP = "model.mtp_layers.0"


@pytest.mark.parametrize(
    ("name", "engine", "change", "where", "what", "so", "mends"),
    [
        ("mtp-mimo", "vllm", drop(f"{MTP}.self_attn.q_proj.bias"), "q_proj.bias", "missing", "without a word", True),
        ("mtp-mimo", "sglang", drop(f"{MTP}.self_attn.q_proj.bias"), "q_proj.bias", "missing", "without a word", True),
        ("mtp-mimo", "sglang", drop(f"{MTP}.final_layernorm.weight"), "final_l", "missing", "without a word", False),
        ("mtp-mimo", "vllm", keys(num_nextn_predict_layers=None), "num_nextn", "is null, must be 1", "no MTP", True),
        ("mtp-mimo", "vllm", keys(model_type="llama"), "model_type", 'must be "qwen2"', "another config", True),
        (
            "mtp-ernie",
            "vllm",
            drop("model.mtp_hidden_norm.0.weight"),
            "mtp_hidden_norm",
            "missing",
            "vLLM stops",
            False,
        ),
        ("medusa", "vllm", drop("lm_heads.1.weight"), "lm_heads.1", "missing", "vLLM", False),
        ("medusa", "vllm", keys(model_type=None), "model_type", 'must be "medusa"', "another config", True),
        ("medusa", "vllm", keys(medusa_fc_bias=None), "medusa_fc_bias", "drops the heads' biases", "shifted", True),
        ("medusa", "vllm", keys(num_attention_heads=2), "num_heads", "are renamed to one key", "comes last", False),
        ("medusa", "vllm", keys(hidden_size=None), "hidden_size", "missing", "stops at the shapes", True),
        ("medusa", "vllm", keys(truncated_vocab_size=128), "truncated", "is 128 of 272", "token_map was not", False),
        ("medusa", "vllm", put("q.weight", torch.ones(3)), "q.weight", "not known", "drops it without a word", True),
        ("speculators", "vllm", keys(speculators_model_type="dflash"), "speculators_mo", "eagle3", "EAGLE-3", False),
        ("speculators", "vllm", keys(speculators_config={}), "verifier.name", "missing", "by itself: it stops", False),
        pytest.param(
            *(
                "speculators",
                "vllm",
                keys(transformer_layer_config={}),
                "transformer_l",
                "missing",
                "cannot read",
                False,
            )
        ),
        ("speculators", "vllm", drop("norm.weight"), "norm.weight", "missing", "puts ones there", False),
    ],
)
def test_faults_of_other_kinds(targets, tmp_path, name, engine, change, where, what, so, mends):
    assert not diagnose(GOLDEN / name, Question(engines=(engine,))).errors(engine)
    folder = head_of(name, tmp_path, change)
    errors = diagnose(folder, Question(engines=(engine,))).errors(engine)
    found = [finding for finding in errors if where in finding.where and what in finding.what]
    assert found, errors
    assert so in found[0].so
    if mends:
        check_mended(name, folder, engine, targets, tmp_path / "out")


def test_a_residual_that_is_not_said_is_true_in_speculators_format(tmp_path):
    folder = head_of("speculators", tmp_path, keys(norm_before_residual=None))
    (found,) = in_table(folder, "vllm", "config.json: norm_before_residual")
    assert (found.level, found.what) == ("warning", "is missing: true here, false in other formats")


def test_medusa_takes_its_target_sizes_from_the_target(models, targets, tmp_path):
    """Old configs have no sizes: the tensors tell them, --fix writes them."""
    folder = head_of("medusa", tmp_path, keys(hidden_size=None, vocab_size=None))
    question = Question(str(models / "llama"), ("vllm",))
    assert "vLLM assumes 4096" in in_table(folder, "vllm", "config.json: hidden_size")[0].what
    write_mended(diagnose(folder, question), ["vllm"], tmp_path / "out")
    assert not diagnose(tmp_path / "out", question).errors("vllm")
    assert drafts(tmp_path / "out", targets["llama"]) == drafts(GOLDEN / "medusa", targets["llama"])


def test_a_pickle_beside_the_weights_is_a_warning(tmp_path):
    folder = copied(GOLDEN / "eagle3", tmp_path / "head")
    (folder / "pytorch_model.bin").write_bytes(b"x")
    found = [f for f in diagnose(folder, Question()).all() if f.where == "pytorch_model.bin"]
    assert [f.level for f in found] == ["warning"]
    assert "runs whatever code is in it" in found[0].so
    write_mended(diagnose(folder, Question(engines=("vllm",))), ["vllm"], tmp_path / "out")
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()


# Every engine and every kind


@pytest.mark.parametrize("name", SERVED_BY)
def test_real_exports_have_no_error(exports, model_dir, name):
    """For the engines that they are for, with and without the target; nothing is said of headwright.json either."""
    folder = export_of(exports, name)
    for question in (Question(engines=SERVED_BY[name]), Question(str(model_dir), SERVED_BY[name])):
        diagnosis = diagnose(folder, question)
        assert not [f for f in diagnosis.all() if f.level == "error"]
        assert not diagnosis.findings[ALL]
        warned = [finding.where for finding in diagnosis.all() if finding.level == "warning"]
        assert warned == ["config.json: dtype"] * ("sglang" in SERVED_BY[name])  # these targets are in fp32


WIDE = (1, 3, 4, 6)
OPTIONS = [  # taps, draft vocabulary, options, format, engines
    ((1, 3, 6), 100, {}, "portable", PORTABLE),
    ((1, 3, 6), 100, {"fc_norm": False}, "portable", FOUR),
    ((1, 3, 6), None, {"fc_norm": False}, "portable", FOUR),
    ((1, 3, 6), 100, {"fc_norm": False, "norm_before_fc": True}, "portable", FOUR),
    ((1, 3, 6), 100, {"norm_output": True}, "portable", PORTABLE),
    ((1, 3, 6), 100, {"fc_norm": False, "layers": 2}, "portable", PORTABLE),
    ((1, 3, 6), None, {"fc_norm": False, "lm_head": "shared"}, "portable", FOUR),
    ((1, 3, 6), 100, {"fc_norm": False, "hidden_size": 48}, "portable", FOUR),
    ((1, 3, 6), 100, {"fc_norm": False, "intermediate_size": 48}, "portable", FOUR),
    ((2, 5), 100, {"fc_norm": False}, "portable", PORTABLE),
    (WIDE, 100, {"fc_norm": False}, "portable", PORTABLE),
    (WIDE, 100, {"norm_before_residual": True}, "vllm", ("vllm",)),
    (WIDE, 100, {"qk_norm": True}, "vllm", ("vllm",)),
    ((1, 3, 6), 100, {"qk_norm": True, "window": 9}, "vllm", ("vllm",)),
    ((1, 3, 6), 100, {"norm_output": True, "layers": 2}, "speculators", ("vllm",)),
    ((1, 3, 6), None, {"lm_head": "shared"}, "speculators", ("vllm",)),
    ((1, 3, 6), 100, {"hidden_size": 48}, "speculators", ("vllm",)),
    (WIDE, 100, {"qk_norm": True}, "speculators", ("vllm",)),
    (WIDE, 100, {"fc_norm": False}, "speculators", ("vllm",)),
]


def written(folder: Path, taps: tuple[int, ...], size: int | None, options: dict, engine: str) -> Path:
    """A random EAGLE-3 head in bf16."""
    target = make_target(taps=taps)
    export = make_tiny_head(target, size, **options).export(engine)
    write_directory(folder, with_dtype(filled(export, target), torch.bfloat16))
    return folder


@pytest.mark.parametrize(("taps", "size", "options", "engine", "served"), OPTIONS, ids=str)
def test_every_option_of_eagle3_is_served_as_its_export_says(tmp_path, model_dir, taps, size, options, engine, served):
    """Exactly by those engines."""
    diagnosis = diagnose(written(tmp_path, taps, size, options, engine), Question(str(model_dir)))
    assert not diagnosis.findings[ALL]
    fit = tuple(table.engine for table in diagnosis.method.contracts if not diagnosis.errors(table.engine))
    assert fit == served
    warned = {f.where for f in diagnosis.all() if f.level == "warning" and f.engine in served}
    assert warned <= {"config.json: dtype"}  # these targets are in fp32


OTHER_KINDS = [
    ({"kind": "eagle1"}, "vllm", ("vllm",)),
    ({"kind": "eagle1", "fc_bias": True}, "sglang", ("sglang",)),
    ({"kind": "medusa"}, "vllm", ("vllm",)),
    ({"kind": "medusa", "lm_head": "shared", "blocks": 2, "bias": False}, "vllm", ("vllm",)),
    ({"kind": "mtp", "block": "llama"}, "mimo", ("vllm", "sglang")),
    ({"kind": "mtp", "block": "llama", "norm": False, "feed": "raw"}, "ernie", ("vllm",)),
]


def random_head(folder: Path, options: dict, engine: str, vocab: torch.Tensor | None = None) -> Path:
    """A random head of any kind in bf16."""
    config = build(get_head(options["kind"]).Config, options, "test")
    target = make_target(taps=config.choose_taps(8))
    ids = torch.arange(272) if vocab is None else vocab
    head = make_head(config, target.spec, target.taps, DraftVocab(ids, 272))
    head.attach(target)
    head.initialise(target)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    write_directory(folder, with_dtype(filled(head.export(engine), target), torch.bfloat16))
    return folder


@pytest.mark.parametrize(("options", "engine", "served"), OTHER_KINDS, ids=str)
@pytest.mark.parametrize("kept", [None, 100])
def test_every_option_of_other_kinds_is_served(tmp_path, model_dir, options, engine, served, kept):
    folder = random_head(tmp_path, options, engine, None if kept is None else torch.arange(kept))
    diagnosis = diagnose(folder, Question(str(model_dir)))
    assert not diagnosis.findings[ALL]
    fit = tuple(table.engine for table in diagnosis.method.contracts if not diagnosis.errors(table.engine))
    assert fit == served


@pytest.mark.parametrize(
    ("taps", "options", "engine", "asked", "where"),
    [
        (WIDE, {"qk_norm": True}, "vllm", "sglang", "config.json: model_type"),
        (WIDE, {"qk_norm": True}, "vllm", "tensorrt-llm", "config.json: model_type"),
        ((1, 3, 6), {"norm_before_residual": True}, "vllm", "sglang", "config.json: norm_before_residual"),
        ((1, 3, 6), {"norm_before_residual": True}, "vllm", "tensorrt-llm", "config.json: norm_before_residual"),
        ((1, 3, 6), {"qk_norm": True, "window": 9}, "vllm", "sglang", "config.json: sliding_window"),
        ((1, 3, 6), {}, "portable", "llama.cpp", "config.json: fc_norm"),
        ((1, 3, 6), {"fc_norm": False, "norm_output": True}, "portable", "llama.cpp", "config.json: norm_output"),
        ((1, 3, 6), {"fc_norm": False, "layers": 2}, "portable", "llama.cpp", "config.json: num_hidden_layers"),
        (WIDE, {"fc_norm": False}, "portable", "llama.cpp", "config.json: num_aux_hidden_states"),
        ((3,), {"fc_norm": False, "hidden_size": 32}, "vllm", "sglang", "config.json: fc"),
    ],
)
def test_what_an_engine_cannot_serve_is_said(tmp_path, taps, options, engine, asked, where):
    diagnosis = diagnose(written(tmp_path, taps, 100, options, engine), Question(engines=(asked,)))
    (found,) = [finding for finding in diagnosis.errors(asked) if finding.where == where]
    assert found.so


@pytest.mark.parametrize(
    "taps",
    [
        (0, 4, 6),
        (2, 4, 8),
    ],
)
def test_states_that_sglang_cannot_capture(tmp_path, model_dir, taps):
    """The embeddings and the last layer's output: the portable export refuses them for the same reason."""
    folder = written(tmp_path, taps, 100, {"fc_norm": False}, "vllm")
    assert not diagnose(folder, Question(str(model_dir), ("vllm",))).errors("vllm")
    assert diagnose(folder, Question(str(model_dir), ("sglang",))).errors("sglang")


@pytest.mark.parametrize(
    ("name", "engine", "words"),
    [
        ("medusa", "sglang", "sglang does not serve medusa heads; vllm does"),
        ("speculators", "sglang", "sglang does not serve speculators heads; vllm does"),
        ("mtp-ernie", "sglang", "sglang does not serve mtp-ernie heads; vllm does"),
        ("mtp-mimo", "llama.cpp", "llama.cpp does not serve mtp-mimo heads; vllm, sglang do"),
        ("eagle1", "tensorrt-llm", "tensorrt-llm does not serve eagle1 heads"),
    ],
)
def test_an_engine_without_a_kind_of_head_is_refused(name, engine, words):
    with pytest.raises(UserError, match=words):
        diagnose(GOLDEN / name, Question(engines=(engine,)))


# Against the target


def other_model(folder: Path, template: str | None = None, **changes) -> Path:
    """A tiny target like `model_dir`, with some facts changed."""
    make_model(**changes).save_pretrained(folder)
    make_tokenizer(**({} if template is None else {"template": template})).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("changes", "where", "what", "so"),
    [
        ({"vocab": 300}, "vocab_size", "is 272, the target has 300 tokens", "other tokens than the head meant"),
        ({"hidden_size": 40}, "hidden_size", "reads states of width 32, the target's have 40", "stops at the first"),
        ({"max_position_embeddings": 1024}, "max_position_embeddings", "is 512, the target's context is 1024", ""),
    ],
)
def test_another_target_is_told_apart(exports, tmp_path, changes, where, what, so):
    model = other_model(tmp_path, **changes)
    for name in ("eagle3/portable", "eagle3/speculators", "eagle1/vllm", "medusa/vllm", "mimo/mimo"):
        if name == "medusa/vllm" and where.startswith("max"):
            continue  # Medusa reads no positions
        errors = diagnose(export_of(exports, name), Question(str(model), ("vllm",))).errors("vllm")
        found = [finding for finding in errors if finding.where == f"config.json: {where}"]
        assert what in found[0].what
        assert found[0].so
        assert so in found[0].so or name == "medusa/vllm"


def test_a_longer_context_of_the_head_is_no_error(exports, tmp_path):
    model = other_model(tmp_path, max_position_embeddings=256)
    assert not diagnose(export_of(exports, "eagle3/portable"), Question(str(model), PORTABLE)).errors("sglang")


def test_another_chat_template_is_a_warning(exports, tmp_path, model_dir):
    model = other_model(tmp_path, template="{% for m in messages %}{{ m['content'] }}{% endfor %}")
    folder = export_of(exports, "eagle3/portable")
    found = [f for f in diagnose(folder, Question(str(model))).findings[ALL] if "template" in f.where]
    assert [f.level for f in found] == ["warning"]
    assert "τ may be lower" in found[0].so
    assert not [f for f in diagnose(folder, Question(str(model_dir))).findings[ALL] if "template" in f.where]


def test_another_rotary_base_is_a_warning(exports, tmp_path):
    model = other_model(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    for name in ("eagle3/portable", "eagle3/speculators", "eagle1/vllm"):
        found = diagnose(export_of(exports, name), Question(str(model), ("vllm",))).findings["vllm"]
        (told,) = [finding for finding in found if finding.where == "config.json: rope_theta"]
        assert (told.level, told.what) == ("warning", "is 10000, the target has 500")


def test_taps_beyond_the_targets_layers(exports, tmp_path):
    model = other_model(tmp_path, num_hidden_layers=5)
    found = diagnose(export_of(exports, "eagle3/portable"), Question(str(model)))
    for engine in FOUR:
        assert [f for f in found.errors(engine) if f.what.startswith("[1, 3, 6]: the target has 5 layers")]
    assert "the target has 5, more than 5 are needed" in [f.what for f in found.errors("tensorrt-llm")]


def test_an_mtp_module_of_other_sizes_than_the_targets(exports, tmp_path):
    """vLLM builds the layer from the target's config."""
    model = other_model(tmp_path, intermediate_size=48)
    found = diagnose(export_of(exports, "mimo/mimo"), Question(str(model), ("vllm",))).errors("vllm")
    assert [finding.what for finding in found] == ["another layer than the target's: intermediate_size 64 for 48"]
    assert "stops at the shapes" in found[0].so


def test_a_target_that_cannot_be_had(tmp_path):
    with pytest.raises(UserError, match="no such model directory"):
        diagnose(GOLDEN / "eagle3", Question(str(tmp_path / "none")))


# The probe


GOLDEN_TARGETS = {name: case[0] for name, case in CASES.items()}


@pytest.fixture(scope="module")
def texts(targets) -> dict[str, list]:
    """The targets' own answers to the prompts that the golden heads were trained on."""
    return {family: documents(target, own_texts(target)) for family, target in targets.items()}


@pytest.fixture
def probed(monkeypatch, models, targets, texts):
    """Diagnose with the probe. The golden heads know their own prompts alone, which no line of text gives."""

    def ask(name: str, folder: Path, engine: str = "vllm"):
        family = GOLDEN_TARGETS[name]
        monkeypatch.setattr(headwright.heads.probe, "own_text", lambda target, prompts: texts[family])
        monkeypatch.setattr(Target, "load", lambda config, taps, *more: targets[family])
        return diagnose(folder, Question(str(models / family), (engine,), ["x"], True))

    return ask


@pytest.mark.parametrize("name", CASES)
def test_an_unbroken_head_guesses_well(probed, name):
    diagnosis = probed(name, GOLDEN / name)
    assert not diagnosis.errors("vllm")
    assert diagnosis.guesses[0].change == "as it stands"
    assert diagnosis.guesses[0].first > 0.4
    assert len(diagnosis.guesses) > 2


def another_base(config: dict, tensors: dict) -> None:
    """Angles that are far too wide."""
    layer = config.get("transformer_layer_config", config)
    layer |= {"rope_theta": 10.0, "rope_parameters": {"rope_type": "default", "rope_theta": 10.0}}


def reversed_states(config: dict, tensors: dict) -> None:
    """The taps' columns from the last to the first."""
    tensors["fc.weight"] = torch.cat(list(reversed(tensors["fc.weight"].chunk(len(config[IDS]), 1))), 1)


def shifted_taps(step: int) -> Callable[[dict, dict], None]:
    """Every tap a layer further, in both lists."""

    def change(config: dict, tensors: dict) -> None:
        config[IDS] = [tap + step for tap in config[IDS]]
        if "eagle_config" in config:
            config["eagle_config"][IDS] = [tap - 1 for tap in config[IDS]]

    return change


EAGLE3_IN_PROJECTION = "midlayer.self_attn.k_proj.weight"
GUILTY = [  # golden head, fault, what the probe must name first, where
    *(
        (name, alter(place, exchanged), "the halves of its input exchanged", place)
        for name, place in (
            ("eagle1", "fc.weight"),
            ("mtp-mimo", f"{MTP}.input_proj.weight"),
            ("mtp-ernie", "model.mtp_linear_proj.0.weight"),
        )
    ),
    ("eagle3", swapped_halves, "the halves of its input exchanged", "midlayer.self_attn.q_proj.weight"),
    ("speculators", swapped_halves, "the halves of its input exchanged", "midlayer.self_attn.q_proj.weight"),
    *(
        (name, alter(place, turned), "transposed", place)
        for name, place in (
            ("eagle1", "layers.0.self_attn.o_proj.weight"),
            ("eagle3", "midlayer.self_attn.o_proj.weight"),
            ("eagle3-two-layers", "layers.1.self_attn.o_proj.weight"),
            ("speculators", "midlayer.self_attn.o_proj.weight"),
            ("medusa", "blocks.0.layers.0.weight"),
            ("medusa-shared", "blocks.1.layers.0.weight"),
            ("mtp-mimo", f"{MTP}.self_attn.q_proj.weight"),
            ("mtp-ernie", "model.mtp_block.0.self_attn.o_proj.weight"),
        )
    ),
    # EAGLE-1's attention is too flat for the base to show, and MTP layers are built from the target's config
    *(
        (name, another_base, "a rotary base of 10000", "rope_theta")
        for name in ("eagle3", "eagle3-qwen3-layer", "eagle3-two-layers", "speculators", "speculators-qwen3-layer")
    ),
    # the three states of the other heads are too alike for a layer further to be clear
    *(
        (name, shifted_taps(1), f"taps {taps} for {[tap + 1 for tap in taps]}", IDS)
        for name, taps in (("eagle3-four-taps", [1, 2, 4, 5]), ("eagle3-qwen3-layer", [1, 2, 4, 5]))
    ),
    ("eagle3", shifted_taps(-1), "taps [2, 4, 5] for [1, 3, 4]", IDS),
    ("speculators-qwen3-layer", shifted_taps(-1), "taps [1, 2, 4, 5] for [0, 1, 3, 4]", IDS),
    *(
        (name, reversed_states, "states concatenated from the last to the first", "fc.weight")
        for name in ("eagle3", "eagle3-four-taps", "eagle3-qwen3-layer", "speculators")
    ),
]


@pytest.mark.parametrize(("name", "change", "what", "where"), GUILTY)
def test_the_probe_finds_what_was_changed_and_changes_it_back(probed, targets, tmp_path, name, change, what, where):
    folder = head_of(name, tmp_path, change)
    assert not [f for f in diagnose(folder, Question(engines=("vllm",))).all() if f.level == "error"]
    diagnosis = probed(name, folder)
    (found,) = diagnosis.errors("vllm")
    assert found.what.startswith(what)
    assert found.where.endswith(where)
    assert "every engine serves this without a word, badly" in found.so
    assert diagnosis.guesses[1].change.startswith(what)
    assert found in write_mended(diagnosis, ["vllm"], tmp_path / "out")
    assert not probed(name, tmp_path / "out").errors("vllm")
    target = targets[GOLDEN_TARGETS[name]]
    assert drafts(tmp_path / "out", target) == drafts(GOLDEN / name, target)
    assert drafts(folder, target) != drafts(GOLDEN / name, target)


def test_the_probe_finds_a_residual_that_is_another(probed, targets, tmp_path):
    """The golden head's two residuals are alike; with fc enlarged, which its norm undoes, they are not."""
    good = broken(GOLDEN / "eagle3-residual", tmp_path / "good", alter("fc.weight", lambda fc: fc * 16))
    assert drafts(good, targets["llama"]) == drafts(GOLDEN / "eagle3-residual", targets["llama"])
    assert not probed("eagle3-residual", good).errors("vllm")
    folder = broken(good, tmp_path / "head", keys(norm_before_residual=False))
    diagnosis = probed("eagle3-residual", folder)
    (found,) = diagnosis.errors("vllm")
    assert found.what.startswith("norm_before_residual true")
    write_mended(diagnosis, ["vllm"], tmp_path / "out")
    assert not probed("eagle3-residual", tmp_path / "out").errors("vllm")
    assert drafts(tmp_path / "out", targets["llama"]) == drafts(good, targets["llama"])


@pytest.fixture(scope="module")
def alternating(targets, tmp_path_factory) -> Path:
    """A head whose final norm turns every second sign, so that it matters which state is handed on: the normed one."""
    target = engine_cases.target_of("eagle3")
    texts = own_texts(target)
    config = build(get_head("eagle3").Config, {"kind": "eagle3", "norm_output": True, "fc_norm": False}, "test")
    torch.manual_seed(7)
    head = make_head(config, target.spec, (2, 4, 5), engine_cases.draft_vocab(texts, 128))
    head.attach(target)
    head.initialise(target)
    signs = torch.tensor([1.0, -1.0]).repeat(32)
    with torch.no_grad():
        head.norm.weight.mul_(signs)
        head.lm_head.weight.mul_(signs)
    head = engine_cases.fit(head.train(), target, documents(target, texts), 30, 3e-3)
    folder = tmp_path_factory.mktemp("alternating")
    write_directory(folder, with_dtype(head.export("portable"), torch.float32))
    return folder


def test_the_probe_finds_that_another_state_is_handed_on(probed, targets, alternating, tmp_path):
    assert not probed("eagle3", alternating).errors("vllm")
    folder = broken(alternating, tmp_path / "head", keys(norm_output=False))
    diagnosis = probed("eagle3", folder)
    (found,) = diagnosis.errors("vllm")
    assert found.what.startswith("norm_output true")
    assert found.where == "config.json: norm_output"
    write_mended(diagnosis, ["vllm"], tmp_path / "out")
    assert not probed("eagle3", tmp_path / "out").errors("vllm")
    assert drafts(tmp_path / "out", targets["llama"]) == drafts(alternating, targets["llama"])


def test_the_reason_given_is_one(probed, alternating, tmp_path):
    folder = broken(alternating, tmp_path / "head", keys(norm_output=False))
    (found,) = probed("eagle3", folder).errors("vllm")
    assert len(set(re.findall(r"\d+%", found.what))) > 1


@cache
def said_tokens() -> list[int]:
    """Every token of the answers that the golden heads know."""
    return [token for text in own_texts(engine_cases.target_of("eagle3")) for token in text[PROMPT:]]


def few_tokens(count: int, ids: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict, dict], None]:
    """The draft vocabulary cut to the tokens that are said most; d2t made of their ids, no t2d."""

    def change(config: dict, tensors: dict) -> None:
        said = said_tokens()
        kept = torch.tensor(sorted(sorted(set(said), key=lambda token: (-said.count(token), token))[:count]))
        rows = torch.searchsorted(torch.arange(len(tensors["d2t"])) + tensors["d2t"], kept)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][rows]
        tensors["d2t"] = ids(kept)
        del tensors["t2d"]
        config["draft_vocab_size"] = count

    return change


def offsets(ids: torch.Tensor) -> torch.Tensor:
    """As engines want them."""
    return ids - torch.arange(len(ids))


def test_the_probe_tells_target_ids_from_offsets_of_a_few_tokens(probed, targets, tmp_path):
    """Of 16 tokens both readings are possible, and without t2d nothing else tells."""
    good = broken(GOLDEN / "eagle3", tmp_path / "good", few_tokens(16, offsets))
    assert not probed("eagle3", good).errors("vllm")
    folder = broken(GOLDEN / "eagle3", tmp_path / "head", few_tokens(16, torch.Tensor.clone))
    assert not diagnose(folder, Question(engines=("vllm",))).errors("vllm")
    diagnosis = probed("eagle3", folder)
    (found,) = diagnosis.errors("vllm")
    assert found.what.startswith("d2t read as target ids")
    write_mended(diagnosis, ["vllm"], tmp_path / "out")
    assert not probed("eagle3", tmp_path / "out").errors("vllm")
    assert drafts(tmp_path / "out", targets["llama"]) == drafts(good, targets["llama"])


@pytest.mark.parametrize("count", [17, 40])
def test_more_tokens_tell_by_themselves(tmp_path, count):
    """Some of them stand side by side, so that their offsets are equal."""
    good = broken(GOLDEN / "eagle3", tmp_path / "good", few_tokens(count, offsets))
    folder = broken(GOLDEN / "eagle3", tmp_path / "head", few_tokens(count, torch.Tensor.clone))
    assert not diagnose(good, Question(engines=("vllm",))).errors("vllm")
    assert [f.what[:16] for f in diagnose(folder, Question(engines=("vllm",))).errors("vllm")] == ["holds target ids"]


@pytest.mark.parametrize("name", ["eagle1", "eagle3", "medusa", "mtp-mimo", "speculators"])
def test_a_random_head_is_called_one(probed, tmp_path, name):
    def random(config: dict, tensors: dict) -> None:
        generator = torch.Generator().manual_seed(5)
        for key, tensor in tensors.items():
            if tensor.is_floating_point() and tensor.ndim == 2:
                tensors[key] = torch.randn(tensor.shape, generator=generator).to(tensor.dtype) * tensor.std()

    (found,) = probed(name, head_of(name, tmp_path, random)).errors("vllm")
    assert found.what.endswith("no change that was tried helps")
    assert "τ is near 1.0 in every engine" in found.so
    assert found.mend is None


def test_broken_weights_are_not_probed(probed, tmp_path, capsys):
    folder = head_of("eagle3", tmp_path, alter(VALUES, poisoned(float("nan"))))
    assert not probed("eagle3", folder).guesses
    assert "not probed: the weights themselves are broken" in capsys.readouterr().out


def test_a_head_without_all_its_parts_is_not_probed(probed, tmp_path):
    with pytest.raises(UserError, match=r"not a whole head: norm\.weight: missing"):
        probed("eagle3", head_of("eagle3", tmp_path, drop("norm.weight")))


def test_a_probe_wants_a_target():
    with pytest.raises(UserError, match="give --target"):
        diagnose(GOLDEN / "eagle3", Question(probe=True))


def test_the_probe_runs_the_target_on_lines_of_text(models, tmp_path):
    """Nothing replaced: a head trained on what the target says after these lines, and the same with a fault."""
    lines = ["one two three", "to be or not"]
    target = engine_cases.target_of("eagle3")
    texts = headwright.heads.probe.own_text(engine_cases.make_target("llama", EVERY_TAP), lines)
    assert [len(text.ids_T) for text in texts] == [len(line) + 32 for line in lines]
    config = build(get_head("eagle3").Config, {"kind": "eagle3"}, "test")
    head = make_head(config, target.spec, (2, 4, 5), DraftVocab(torch.arange(272), 272))
    head.attach(target)
    head.initialise(target)
    chosen = [replace(text, taps_TKD=text.taps_TKD[:, [2, 4, 5]]) for text in texts]
    head = engine_cases.fit(head.train(), target, chosen, 40, 3e-3)
    write_directory(tmp_path, with_dtype(head.export("portable"), torch.float32))
    question = Question(str(models / "llama"), ("vllm",), lines, True)
    good = diagnose(tmp_path, question)
    assert good.guesses[0].first > 0.6
    assert not good.errors("vllm")
    swapped = diagnose(broken(tmp_path, tmp_path / "swapped", swapped_halves), question)
    assert [f.what[:33] for f in swapped.errors("vllm")] == ["the halves of its input exchanged"]


# What can be said


def test_prompts_that_the_vocabulary_cannot_say(tmp_path, models):
    """Counted in the target's tokens, by script; nothing is run."""
    target = engine_cases.target_of("eagle3")
    said = "the sea is blue and so is the sky"
    kept = torch.tensor(sorted({*target.tokenizer(said)["input_ids"], 258}))
    config = build(get_head("eagle3").Config, {"kind": "eagle3"}, "test")
    head = make_head(config, target.spec, (2, 4, 5), DraftVocab(kept, 272))
    head.attach(target)
    head.initialise(target)
    write_directory(tmp_path, with_dtype(head.export("portable"), torch.float32))
    model = str(models / "llama")
    mixed = diagnose(tmp_path, Question(model, ("vllm",), [said, "море синее, и небо тоже"]))
    [found] = [finding for finding in mixed.findings[ALL] if finding.where.startswith("draft vocabulary")]
    assert found.where == f"draft vocabulary of {len(kept)} tokens"
    assert mixed.covered["Latin"].inside == mixed.covered["Latin"].tokens
    share = mixed.covered["Cyrillic"]
    assert found.what == f"can say {share.inside / share.tokens:.1%} of the tokens of Cyrillic prompts"
    assert found.level == "warning"
    assert f"τ {share.bound.tau:.2f}" in found.so
    assert not mixed.guesses
    plain = diagnose(tmp_path, Question(model, ("vllm",), [said]))
    assert not [finding for finding in plain.findings[ALL] if finding.where.startswith("draft vocabulary")]
    with pytest.raises(UserError, match="--prompts are counted in the target's tokens: give --target"):
        diagnose(tmp_path, Question(None, ("vllm",), [said]))


def test_prompts_do_not_hide_what_is_wrong(tmp_path, models, capsys):
    """A head that cannot be read is examined all the same."""
    folder = broken(GOLDEN / "eagle3", tmp_path / "head", lambda _, tensors: tensors.pop("fc.weight"))
    diagnosis = diagnose(folder, Question(str(models / "llama"), ("vllm",), ["one two"]))
    assert diagnosis.errors("vllm")
    assert not diagnosis.covered
    assert "the prompts were not counted" in capsys.readouterr().out


def test_what_stood_before_every_prompt_of_the_training_is_told(tmp_path):
    folder = tmp_path / "head"
    shutil.copytree(GOLDEN / "eagle3", folder)
    told = json.loads((folder / "headwright.json").read_text()) if (folder / "headwright.json").is_file() else {}
    told["training"] = {"config": {"corpus": {"system": "Be brief.", "template": {"enable_thinking": False}}}}
    (folder / "headwright.json").write_text(json.dumps(told))
    target = engine_cases.target_of("eagle3")
    facts = Facts(target.spec)
    directory = Directory.open(folder)
    found = [f.what for f in against_target(directory, identify(directory), facts)]
    assert "the head was trained with the system prompt 'Be brief.'" in found
    assert "the head was trained with the template arguments {'enable_thinking': False}" in found

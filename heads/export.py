"""Head → engine directories, re-read and checked. Runnable: `python heads/export.py --config …` or `headwright export`.

The writer works from a table of tensor names and shapes and refuses what is missing, extra, mis-shaped, NaN or all
zero: engines are silent about such faults and serve them as τ = 1.0. Formats: vLLM 0.32, SGLang 0.5.23.
"""

import contextlib
import copy
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from headwright.configs import RunConfig, UserError
from headwright.configs.command import run_stage
from headwright.configs.console import duration, say, size, table
from headwright.data.harvest import check_offline, open_store
from headwright.data.sampling import Policy
from headwright.data.store import FeatureReader, checksum, replace_with, save_tensors, write_json, write_text
from headwright.data.target import Target, locate
from headwright.heads.base import Case, Context, DraftHead, Drafts, Export, PlainReader, Tables
from headwright.heads.contract import Finding, check_map, serious
from headwright.heads.directory import Directory
from headwright.heads.draft_tree import TreeShape
from headwright.heads.examine import examine_directory, fingerprint
from headwright.heads.foreign import identify
from headwright.heads.saved import load_head
from headwright.heads.serve import drafted_tokens, launch_lines, recommended, serve_notes

SECTIONS = ("export",)
ABOUT = "Write the head as a directory that vLLM and SGLang load, read it back and compare drafts."
DRAFTS = 5


def check_tensors(export: Export) -> None:
    """Refuse what an engine would serve wrongly without a word."""
    wanted = export.shapes
    missing, extra = (
        sorted(wanted.keys() - export.tensors.keys()),
        sorted(export.tensors.keys() - wanted.keys()),
    )
    if missing or extra:
        raise UserError(f"export: tensors missing {missing}, not known to the format {extra}")
    for name, tensor in export.tensors.items():
        if tuple(tensor.shape) != wanted[name]:
            raise UserError(f"export: {name} has shape {tuple(tensor.shape)}, the format wants {wanted[name]}")
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise UserError(f"export: {name} holds NaN or infinite values: the head is broken")
        if tensor.is_floating_point() and not name.endswith("bias") and not tensor.any():
            raise UserError(f"export: {name} is all zero: the head was not trained")
    for finding in check_maps(export):
        raise UserError(f"export: {finding.where}: {finding.what}")


def check_maps(export: Export) -> Iterator[Finding]:
    """d2t and t2d, before anything is written."""
    if "d2t" not in export.tensors:
        return
    d2t, t2d = export.tensors["d2t"].cpu(), export.tensors["t2d"].cpu()
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool:
        raise UserError(f"export: d2t must be int64 and t2d bool, they are {d2t.dtype} and {t2d.dtype}")
    yield from check_map("d2t", d2t, t2d, len(t2d))


def export_run(run: RunConfig, dry_run: bool = False) -> None:
    """All engine directories of a run."""
    if dry_run:
        check_offline(run)
        return
    started = time.perf_counter()
    reader = open_store(run, "held-out")
    target = Target.load(run.target, reader.manifest.taps, "cpu")
    head = load_head(run.directory / "head", target, torch.float32).eval()
    cases = draft_cases(reader, target, run.export.prompts)
    measured, rows = measurements(run), []
    for engine in run.export.engines:
        folder = run.directory / "export" / engine
        dtype = written_dtype(run, head)
        export = with_dtype(filled(named(head.export(engine), run), target), dtype)
        for warning in export.warnings:
            say(f"warning: {warning}")
        with directory_in_the_making(folder) as scratch:
            if export.into is None:
                write_directory(scratch, export)
            else:
                stitch(scratch, export)
            problems = examine(scratch, export, head)
            proof = read_back(export.reader(scratch), head, target, cases, dtype)
            write_json(scratch / "headwright.json", provenance(head, export, proof, measured) | origin(run))
            write_text(scratch / "SERVE.md", notes_for(run, folder.resolve(), export, problems, measured))
        rows.append(
            (
                engine,
                str(folder),
                size(sum(file.stat().st_size for file in folder.glob("*.safetensors"))),
                str(dtype)[6:],
                f"{proof.equal}/{proof.drafted}",
            )
        )
    table("exports", ("engine", "directory", "size", "dtype", "drafts read back equal"), rows)
    say(f"export took {duration(time.perf_counter() - started)}; launch lines: SERVE.md in each directory")


def named(export: Export, run: RunConfig) -> Export:
    """A format that names the target inside gets the name by which engines find it."""
    inner = export.config.get("speculators_config")
    if inner is not None:
        inner["verifier"]["name_or_path"] = target_name(run)
    return export


def target_name(run: RunConfig) -> str:
    """How engines find the target."""
    return run.export.name_or_path or locate(run.target.model)


def examine(folder: Path, export: Export, head: DraftHead) -> dict[str, list[Finding]]:
    """The written directory by the engines' tables. Raises UserError where an engine that it is for would serve it wrongly; of
    other engines the errors are returned.
    """
    if not export.contracts:
        return {}
    directory = Directory.open(folder)
    found = examine_directory(directory, identify(directory), export.contracts, head.spec)
    strict = [table.engine for table in export.contracts] if export.strict is None else export.strict
    errors = {table.engine: serious(found[table.engine]) for table in export.contracts}
    for engine in strict:
        for finding in errors.get(engine, ()):
            raise UserError(f"export: {finding.where}: {finding.what}: {finding.so}")
    return errors


def notes_for(
    run: RunConfig, folder: Path, export: Export, problems: dict[str, list[Finding]], measured: dict[str, Any] | None
) -> str:
    """SERVE.md of a directory."""
    advice = recommended({"measured": measured})
    count = drafted_tokens(advice)
    if export.launch is not None:
        launch = export.launch(target_name(run), folder, export.config["dtype"])
    else:
        launch = launch_lines(export.contracts, problems, export.config, target_name(run), folder, count)
    return serve_notes(run.target.model, launch, measured, advice, export.shares)


@contextlib.contextmanager
def directory_in_the_making(folder: Path) -> Iterator[Path]:
    """A scratch directory that becomes `folder` when all went well: what was not proven never lies where it would be served."""
    scratch = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        yield scratch
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def written_dtype(run: RunConfig, head: DraftHead) -> torch.dtype:
    """The dtype of the written weights: the target checkpoint's own, whatever it was harvested in."""
    name = head.spec.dtype if run.export.dtype == "target" else run.export.dtype
    found: torch.dtype = getattr(torch, name)
    return found


def filled(export: Export, target: Target) -> Export:
    """With the target's own rows where the format wants them in the file, and rows of all tokens where it wants all."""
    rows = {name: target.lm_head.weight[ids] * target.logit_scale for name, ids in export.from_target.items()}
    tensors = export.tensors | rows
    for name, ids in export.spread.items():
        # the others get the mean of these: a mean of logits is never their maximum, so that no other token is drafted
        whole = tensors[name].mean(0, keepdim=True).repeat(export.shapes[name][0], 1)
        tensors[name] = whole.index_copy(0, ids.to(whole.device), tensors[name])
    return replace(export, tensors=tensors)


def keeps(name: str) -> bool:
    """Whether checkpoints keep a tensor in fp32 whatever the others are: routers' corrections."""
    return name.endswith("e_score_correction_bias")


def with_dtype(export: Export, dtype: torch.dtype) -> Export:
    """Weights in `dtype`, maps as they are; both spellings of the config key, since engines read one or the other."""
    tensors = {
        name: (tensor.to(dtype) if tensor.is_floating_point() and not keeps(name) else tensor)
        .detach()
        .cpu()
        .contiguous()
        for name, tensor in export.tensors.items()
    }
    name = str(dtype).removeprefix("torch.")
    return replace(export, tensors=tensors, config=export.config | {"torch_dtype": name, "dtype": name})


def write_directory(folder: Path, export: Export) -> None:
    """config.json and model.safetensors, checked first."""
    check_tensors(export)
    folder.mkdir(parents=True, exist_ok=True)
    replace_with(folder / "model.safetensors", lambda path: save_tensors(export.tensors, path, {"format": "pt"}))
    write_json(folder / "config.json", export.config)
    if export.beside is not None:
        export.beside(folder)


@dataclass
class Proof:
    """Drafts of the written files against those of the head: tokens, and the largest difference of their log-probabilities."""

    drafted: int
    equal: int
    logprob_difference: float
    dtype: str


def stitch(folder: Path, export: Export) -> None:
    """A copy of a checkpoint with some tensors replaced, each in its own dtype. Raises UserError where one is not there."""
    check_tensors(export)
    assert export.into is not None
    shutil.copytree(export.into, folder)
    left = dict(export.tensors)
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            here = [name for name in file.keys() if name in left]  # noqa: SIM118, a file is no mapping
            metadata = file.metadata()
        if here:
            tensors = load_file(path)
            tensors |= {name: left.pop(name).to(tensors[name].dtype) for name in here}
            replace_with(path, lambda scratch, kept=tensors, notes=metadata: save_tensors(kept, scratch, notes))
    if left:
        raise UserError(
            f"export: {export.into} has no {sorted(left)[0]}: it is not the checkpoint that the head began as"
        )


def draft_cases(reader: FeatureReader, target: Target, count: int) -> list[Case]:
    """Held-out documents, each cut in the middle of its answer."""
    cases = []
    for document in reader:
        answer = torch.nonzero(document.mask_T)[:, 0].tolist()
        if len(answer) < 4:
            continue
        cut = answer[len(answer) // 2]
        taps = document.taps_TKD[:cut].float()
        cases.append(Case(document.ids_T[1 : cut + 1].tolist(), taps, target.last_of(taps)))
        if len(cases) == count:
            return cases
    if not cases:
        raise UserError(f"{reader.root}: no answer long enough to compare drafts on")
    return cases


def shared_tables(target: Target) -> Tables:
    """What engines share with a head."""
    everything = torch.arange(target.spec.vocab_size, device=target.device)
    return Tables(target.embed(everything).float(), target.lm_head.weight.float() * target.logit_scale)


def read_back(
    reader: PlainReader,
    head: DraftHead,
    target: Target,
    cases: Sequence[Case],
    dtype: torch.dtype,
) -> Proof:
    """Draft with the written files and with the head in the same precision: tokens and their probabilities must be equal."""
    tables = shared_tables(target)
    rounded = copy.deepcopy(head).to(dtype).float()
    count = min(DRAFTS, head.deepest or DRAFTS)
    proof = Proof(count * len(cases), 0, 0.0, str(dtype).removeprefix("torch."))
    for case in cases:
        theirs = reader.draft(tables, case, count)
        ours = head_drafts(rounded, target, case)
        proof.equal += sum(a == b for a, b in zip(theirs.tokens, ours.tokens))
        apart = max(abs(a - b) for a, b in zip(theirs.logprobs, ours.logprobs))
        proof.logprob_difference = max(proof.logprob_difference, apart)
        if theirs.tokens != ours.tokens or apart > 1e-3:
            raise UserError(f"export: the written files draft {theirs}, the head drafts {ours}: do not serve this")
    return proof


def head_drafts(head: DraftHead, target: Target, case: Case) -> Drafts:
    """The trained head's greedy chain."""
    context = Context(
        target,
        torch.tensor([case.following]),
        case.taps_TKD[None],
        case.last_TD[None],
        Policy(),
        lambda: torch.zeros(1, dtype=torch.float64),
    )
    state = head.start(1, len(case.following) + DRAFTS)
    tree = head.propose(state, context, TreeShape.chain(min(DRAFTS, head.deepest or DRAFTS)))
    return Drafts(tree.tokens_BN[0, 1:].tolist(), tree.logprobs_BN[0, 1:].tolist())


def measurements(run: RunConfig) -> dict[str, Any] | None:
    """The first chain and the first tree of the run's report, and the costs that `tune` measured, if these are of this head."""
    path = run.directory / "report.json"
    if not path.is_file():
        return None
    report = json.loads(path.read_text(encoding="utf-8"))
    entries = [entry for entry in report["entries"] if entry["drafter"] == entries_of(report)]
    chain = next((entry for entry in entries if entry["shape"]["kind"] == "chain"), None)
    tree = next((entry for entry in entries if entry["shape"]["kind"] != "chain"), None)
    if report["head"] != checksum(run.directory / "head" / "model.safetensors") or not chain:
        return None
    keys = ("drafter", "shape", "temperature", "acceptance_length", "acceptance_length_ci95", "accepted_per_position")
    found = {"chain": {key: chain[key] for key in keys}, "answers": report["answers"]}
    if tree:
        found["tree"] = {key: tree[key] for key in keys}
    return found | tuned(run)


def entries_of(report: dict[str, Any]) -> str:
    """The name under which the head itself stands in a report: first."""
    return str(report["entries"][0]["drafter"])


def tuned(run: RunConfig) -> dict[str, Any]:
    """Costs by `headwright tune`, where it ran for this head."""
    path = run.directory / "tune.json"
    if not path.is_file():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    same = found.get("head") == checksum(run.directory / "head" / "model.safetensors")
    return {"costs_ms": found["costs_ms"], "device": found["device"]} if same else {}


def provenance(head: DraftHead, export: Export, proof: Proof, measured: dict[str, Any] | None) -> dict[str, Any]:
    """headwright.json: where the head comes from, what was measured, and what the weights were when they were written."""
    told = {"method": export.contracts[0].method} if export.contracts else {}
    return told | {
        "head": asdict(head.config),
        "target": asdict(head.spec),
        "taps": list(head.taps),
        "draft_vocab_size": len(head.vocab),
        "read_back": asdict(proof),
        "measured": measured,
        "formats": {table.engine: table.version for table in export.contracts},
        "config": export.config,
        "tensors": {name: fingerprint(tensor) for name, tensor in sorted(export.tensors.items())},
    }


def origin(run: RunConfig) -> dict[str, Any]:
    """Which file of weights was exported, and what is known of its training."""
    folder = run.directory / "head"
    known = folder / "provenance.json"
    training = json.loads(known.read_text(encoding="utf-8")) if known.is_file() else None
    return {"head_file": checksum(folder / "model.safetensors"), "training": training}


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    run_stage("headwright export", ABOUT, SECTIONS, export_run, argv)


if __name__ == "__main__":
    main()

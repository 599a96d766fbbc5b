"""Will an engine load this head, and will it serve what was trained? Runnable: `headwright doctor DIR`.

Any head's directory, ours or a stranger's, against the tables from which exports are written. Nothing in it is trusted: no
pickle is opened, shapes are read before numbers.
"""

import argparse
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from headwright.configs import UserError
from headwright.configs.command import clean_exit, stop
from headwright.configs.console import say, size, table
from headwright.configs.schema import TargetConfig
from headwright.data.coverage import Coverage
from headwright.data.store import replace_with, save_tensors, write_json, write_text
from headwright.data.target import Target, TargetSpec, load_tokenizer, locate, read_facts
from headwright.heads.contract import TITLES, Contract, Draft, Finding, Method, serious
from headwright.heads.directory import Directory
from headwright.heads.engine_tables import ENGINES, TOKEN_MAP
from headwright.heads.examine import (
    ALL,
    Facts,
    against_target,
    beside_weights,
    examine_directory,
    examine_values,
)
from headwright.heads.export import directory_in_the_making
from headwright.heads.foreign import OURS, identify, open_plain
from headwright.heads.mtp_native import Checkpoint
from headwright.heads.probe import PROMPTS, Guesses, judged, probe
from headwright.heads.saved import read_foreign
from headwright.heads.sayable import COLUMNS, rows_of, sayable, unsaid
from headwright.heads.serve import drafted_tokens, launch_lines, lengths, recommended

ORDER = {"error": 0, "warning": 1, "note": 2}


@dataclass
class Diagnosis:
    """What was found, by engine; what is the same for all stands under `ALL`."""

    directory: Directory
    method: Method
    findings: dict[str, list[Finding]]
    guesses: list[Guesses] = field(default_factory=list)
    covered: dict[str, Coverage] = field(default_factory=dict)

    def errors(self, engine: str) -> list[Finding]:
        """What keeps an engine from serving this head as it was trained."""
        return serious([*self.findings[ALL], *self.findings.get(engine, ())])

    def all(self) -> list[Finding]:
        """Worst first."""
        return sorted((f for group in self.findings.values() for f in group), key=lambda finding: ORDER[finding.level])


@dataclass
class Question:
    """What is asked about a directory."""

    target: str | None = None
    engines: Sequence[str] = ()  # none: all
    prompts: Sequence[str] = ()  # lines of text like that of the users
    probe: bool = False  # run head and target, on these or some of our own


def diagnose(folder: Path, question: Question) -> Diagnosis:
    """All checks that the question asks for. Raises UserError for what cannot be examined safely."""
    if (folder / OURS).is_file():
        raise UserError(
            f"{folder}: a trained head, which no engine loads as it is: `headwright export` writes what they load"
        )
    directory = Directory.open(folder)
    method = identify(directory)
    contracts = asked(method, question.engines)
    facts = target_facts(question.target) if question.target else None
    spec = facts.spec if facts else recorded_spec(directory)
    findings = examine_directory(directory, method, contracts, spec)
    shared = [*beside_weights(directory)]
    shared += examine_values(directory, method, [f for group in findings.values() for f in group])
    if facts is not None:
        shared += against_target(directory, method, facts)
    for finding in shared:
        findings.get(finding.engine, []).append(finding)  # one about a single engine counts against it alone
    shared = [finding for finding in shared if finding.engine == ALL]
    diagnosis = Diagnosis(directory, method, {ALL: shared} | findings)
    if question.prompts:
        add_coverage(diagnosis, question, facts)
    if question.probe:
        add_probe(diagnosis, question)
    return diagnosis


def asked(method: Method, engines: Sequence[str]) -> tuple[Contract, ...]:
    """The tables of some engines, or of all that have this kind. Raises UserError where an engine does not serve it."""
    served = [table.engine for table in method.contracts]
    for engine in engines:
        if engine not in served:
            raise UserError(f"{engine} does not serve {method.name} heads; {', '.join(served)} does")
    return tuple(table for table in method.contracts if not engines or table.engine in engines)


def recorded_spec(directory: Directory) -> TargetSpec | None:
    """The target that an export of ours was made for."""
    told = directory.ours.get("target")
    if not told:
        return None
    try:
        return TargetSpec(**told | {"eos_token_ids": tuple(told["eos_token_ids"])})
    except (TypeError, KeyError) as error:
        raise UserError(f"{directory.path / 'headwright.json'}: its target is not readable ({error})") from None


def target_facts(name: str) -> Facts:
    """A target's spec and embedding, of which only that tensor is read."""
    spec, embedding = read_facts(TargetConfig(model=name))
    folder = Path(locate(name))
    checkpoint = Checkpoint(folder) if folder.is_dir() else None
    rows = checkpoint.read(embedding) if checkpoint is not None and embedding in checkpoint.where else None
    return Facts(spec, rows)


def add_coverage(diagnosis: Diagnosis, question: Question, facts: Facts | None) -> None:
    """What the head can say of the prompts."""
    if facts is None or question.target is None:
        raise UserError("--prompts are counted in the target's tokens: give --target")
    try:
        vocab = read_foreign(diagnosis.directory.path, facts.spec).vocab
    except UserError as error:  # what is wrong with the weights stands among the findings
        say(f"the prompts were not counted: {error}")
        return
    diagnosis.covered = sayable(vocab, load_tokenizer(TargetConfig(model=question.target)), question.prompts)
    diagnosis.findings[ALL] += unsaid(vocab, diagnosis.covered)


def add_probe(diagnosis: Diagnosis, question: Question) -> None:
    """Run the head on its target's own text."""
    if question.target is None:
        raise UserError("a probe runs the head on its target's own text: give --target")
    broken = serious(diagnosis.findings[ALL])
    plain = open_plain(diagnosis.directory.path)
    target = Target.load(TargetConfig(model=question.target, dtype="float32"), lambda layers: range(layers + 1))
    if broken:
        say("not probed: the weights themselves are broken")
        return
    diagnosis.guesses = probe(plain, target, question.prompts or PROMPTS)
    diagnosis.findings[ALL] += judged(diagnosis.guesses)


def mended(diagnosis: Diagnosis, engines: Iterable[str]) -> tuple[Draft, list[Finding]]:
    """A corrected copy, and what was corrected. Probed changes go last: they speak of the tensors as they were."""
    directory = diagnosis.directory
    draft = Draft(dict(diagnosis.method.infer(directory.config, directory.entries)), directory.load())
    done: list[Finding] = []
    wanted = [*(f for engine in engines for f in diagnosis.findings.get(engine, ())), *diagnosis.findings[ALL]]
    for finding in wanted:
        if finding.mend is not None and not any(same(finding, other) for other in done):
            before = (dict(draft.config), dict(draft.tensors))
            finding.mend(draft)
            if (
                before[0] != draft.config
                or before[1].keys() != draft.tensors.keys()
                or changed(before[1], draft.tensors)
            ):
                done.append(finding)
    return draft, done


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    """Whether a tensor is another one."""
    return any(after[name] is not tensor for name, tensor in before.items())


def same(finding: Finding, other: Finding) -> bool:
    """Whether two engines found the same thing."""
    return (finding.where, finding.what) == (other.where, other.what)


def write_mended(diagnosis: Diagnosis, engines: Sequence[str], out: Path) -> list[Finding]:
    """The corrected copy as a directory. What an export of ours proved is left out: it was of other files."""
    if len(engines) > 1 and not diagnosis.method.portable:
        raise UserError(f"--fix: engines want {diagnosis.method.name} heads in different formats: give one --engine")
    if out.exists():
        raise UserError(f"--fix {out}: exists; give a new directory (the one that is examined is never changed)")
    draft, done = mended(diagnosis, engines)
    kept = {
        key: value for key, value in diagnosis.directory.ours.items() if key in ("method", "head", "target", "taps")
    }
    with directory_in_the_making(out) as scratch:
        scratch.mkdir(parents=True)
        tensors = {name: tensor.contiguous() for name, tensor in draft.tensors.items()}
        replace_with(scratch / "model.safetensors", lambda path: save_tensors(tensors, path, {"format": "pt"}))
        write_json(scratch / "config.json", draft.config)
        if (diagnosis.directory.path / TOKEN_MAP).is_file():
            shutil.copy(diagnosis.directory.path / TOKEN_MAP, scratch)
        if kept:
            write_json(scratch / "headwright.json", kept | {"mended": [f"{f.where}: {f.what}" for f in done]})
    return done


# Showing


def show(diagnosis: Diagnosis, target: str, engines: Sequence[str]) -> None:
    """Findings, verdicts by engine, launch lines, draft lengths."""
    directory, method = diagnosis.directory, diagnosis.method
    ours = "exported by Headwright" if directory.ours else "of others"
    say(f"{directory.path}: {method.name}, {len(directory.entries)} tensors, {size(directory.bytes)}, {ours}")
    for group in together(diagnosis.all()):
        names = ", ".join(TITLES.get(finding.engine, finding.engine) for finding in group)
        lines = [f"{group[0].level} ({names}) {group[0].where}: {group[0].what}"]
        lines += [f"    → {so}" for so in dict.fromkeys(finding.so for finding in group) if so]
        lines += [f"    fix: {group[0].fix}"] if group[0].fix else []
        say("\n".join(lines))
    if diagnosis.guesses:
        guessed = [(g.change, f"{g.first:.1%}", f"{g.second:.1%}") for g in diagnosis.guesses[:5]]
        table("guesses on the target's own text", ("head", "first right", "second right after it"), guessed)
    if diagnosis.covered:
        table("the draft vocabulary against the prompts", COLUMNS, rows_of(diagnosis.covered))
    verdicts = [(contract.title, verdict(diagnosis, contract)) for contract in tables(diagnosis, engines)]
    table("engines", ("engine", "verdict"), verdicts)
    advice = recommended(directory.ours)
    problems = {engine: diagnosis.errors(engine) for engine in engines}
    fit = [contract for contract in tables(diagnosis, engines) if not problems[contract.engine]]
    print(launch_lines(fit, problems, directory.config, target, directory.path.resolve(), drafted_tokens(advice)))
    say(lengths(advice, (directory.ours.get("measured") or {}).get("device", "")))


def together(findings: Sequence[Finding]) -> list[list[Finding]]:
    """What several engines find alike, once."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.level, finding.where, finding.what), []).append(finding)
    return list(groups.values())


def tables(diagnosis: Diagnosis, engines: Sequence[str]) -> list[Contract]:
    """Of the engines that are asked about."""
    return [contract for contract in diagnosis.method.contracts if contract.engine in engines]


def verdict(diagnosis: Diagnosis, contract: Contract) -> str:
    """One line for an engine."""
    errors = diagnosis.errors(contract.engine)
    if errors:
        return f"no: {len(errors)} error{'s' if len(errors) > 1 else ''}, first: {errors[0].where} {errors[0].what}"
    warned = [f for f in diagnosis.findings[contract.engine] if f.level == "warning"]
    says = "serves it as it was trained" if contract.proven else "serves it, by its sources (the engine was not run)"
    return says + (f"; {len(warned)} to know" if warned else "")


def as_json(diagnosis: Diagnosis, engines: Sequence[str]) -> dict[str, Any]:
    """The same for programs."""
    listed = [
        {"level": f.level, "engine": f.engine, "where": f.where, "what": f.what, "consequence": f.so, "fix": f.fix}
        for f in diagnosis.all()
    ]
    return {
        "directory": str(diagnosis.directory.path),
        "method": diagnosis.method.name,
        "serves": {engine: not diagnosis.errors(engine) for engine in engines},
        "findings": listed,
        "coverage": {name: group.inside / group.tokens for name, group in diagnosis.covered.items()},
        "guesses": [{"head": g.change, "first": g.first, "second": g.second} for g in diagnosis.guesses],
        "draft_tokens": [vars(advice) for advice in recommended(diagnosis.directory.ours)],
    }


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(
        prog="headwright doctor",
        description="Will an engine load this head, and serve what was trained? Checks any head's directory (ours, or of "
        "EAGLE, SpecForge, AngelSlim, speculators, Medusa) against what engines read. Exit code 0: an engine that was asked "
        "about serves it; 1: none does; 2: the directory cannot be examined.",
    )
    out.add_argument("directory", metavar="DIR", help="a head as engines load it: config.json and *.safetensors")
    out.add_argument("--target", metavar="MODEL", help="also compare with its target: hub name, directory, embedded:…")
    out.add_argument(
        "--engine", choices=ENGINES, action="append", default=[], help="ask about this engine (again: and that)"
    )
    out.add_argument("--fix", metavar="OUT", help="write a corrected copy to a new directory OUT, and examine that")
    out.add_argument(
        "--probe", action="store_true", help="run head and target: are its guesses right, and if not, why?"
    )
    out.add_argument(
        "--prompts",
        metavar="FILE",
        help="lines of text like your users': how much of their language can the head say? With --probe run on them, too "
        "(default there: eight short ones)",
    )
    out.add_argument("--json", metavar="FILE", help="write what was found as JSON, too")
    return out


def lines_of(path: str | None) -> list[str]:
    """Prompts, one a line."""
    if path is None:
        return []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"--prompts {path}: {error}") from None
    found = [line for line in lines if line.strip()]
    if not found:
        raise UserError(f"--prompts {path}: holds no line of text")
    return found


def doctor(args: argparse.Namespace) -> int:
    """The whole examination; the exit code."""
    question = Question(args.target, args.engine, lines_of(args.prompts), args.probe)
    diagnosis = diagnose(Path(args.directory), question)
    engines = [contract.engine for contract in asked(diagnosis.method, args.engine)]
    target = args.target or (diagnosis.directory.ours.get("target") or {}).get("name") or "TARGET"
    show(diagnosis, locate(target) if target.startswith("embedded:") else target, engines)
    if args.json:
        write_text(Path(args.json), json.dumps(as_json(diagnosis, engines), indent=2, ensure_ascii=False) + "\n")
    if args.fix:
        done = write_mended(diagnosis, engines, Path(args.fix))
        say(
            f"{args.fix}: written, {len(done)} corrected: "
            + ("; ".join(f"{f.where} {f.what}" for f in done) or "nothing")
        )
        diagnosis = diagnose(Path(args.fix), question)
        rows = [(contract.title, verdict(diagnosis, contract)) for contract in tables(diagnosis, engines)]
        table(f"engines, of {args.fix}", ("engine", "verdict"), rows)
    return 0 if any(not diagnosis.errors(engine) for engine in engines) else 1


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    args = parser().parse_args(argv)
    with clean_exit():
        code = doctor(args)
    if code:
        stop("no engine that was asked about serves this head as it was trained", code)


if __name__ == "__main__":
    main()

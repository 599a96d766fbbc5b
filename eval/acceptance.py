"""What a head is worth: τ, rates per depth, speed against plain decoding, losslessness. Runnable: `headwright eval`.

Writes `runs/<name>/report.json` (schema headwright.acceptance/1) and `report.html`.
"""

import datetime
import itertools
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
import xxhash

from headwright.configs import RunConfig, UserError
from headwright.configs.command import run_stage
from headwright.configs.console import say, table
from headwright.configs.schema import EvalConfig
from headwright.data.batch import last_rows, pack
from headwright.data.harvest import check_offline, open_store
from headwright.data.sampling import Policy
from headwright.data.store import FeatureReader, checksum, write_json
from headwright.data.target import Target
from headwright.eval.baselines import others
from headwright.eval.clock import device_name
from headwright.eval.decode import generate
from headwright.eval.entries import Part, Plain, groups
from headwright.eval.kept import Kept
from headwright.eval.metrics import DEFINITIONS, repeated_4grams
from headwright.eval.model_drafter import ModelDrafter
from headwright.eval.prompts import Prompt, Room, check_sets, read_sets
from headwright.eval.records import SCHEMA
from headwright.eval.report import write_html
from headwright.eval.settings import PLAIN, Settings
from headwright.eval.sides import Contest, Side, Spoken, baselines
from headwright.heads.base import Drafter, DraftHead
from headwright.heads.draft_tree import TreeShape
from headwright.heads.losses import kl
from headwright.heads.saved import load_head

SHIFT_DOCUMENTS = 24  # on which the change of an adapted target is measured
PLAIN_BATCH = 32  # texts at the same time where plain decoding is not timed
SECTIONS = ("eval",)
ABOUT = "Decode held-out prompts with the head and without, and report what it is worth."


def evaluate(run: RunConfig, dry_run: bool = False) -> None:
    """The whole evaluation of a run."""
    shapes = [TreeShape.of(shape) for shape in run.eval.shapes]
    policies = [Policy(temperature) for temperature in run.eval.temperatures]
    check_sets(run.eval.sets)
    if dry_run:
        check_offline(run)
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "the evaluation measures speed, so it runs as one process: python eval/acceptance.py, or headwright eval"
        )
    reader = open_store(run, "held-out")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = Target.load(run.target, reader.manifest.taps, device)
    head = load_head(run.directory / "head", target).eval()
    refuse_too_deep(head, shapes)
    prompts = read_sets(run, target, reader)
    sides = list(sides_of(run, target, head, shapes, policies))
    say(f"evaluating on {len(prompts)} prompts, {run.eval.max_new_tokens} new tokens each, batch 1, {device}")
    kept = Kept(run.directory / "eval.jsonl", identity(run, target, prompts))
    contest = Contest(target, Room.of(run, target), kept, run.seed, run.eval.rounds, patience=run.eval.patience)
    timed, rest = split(run, prompts)
    said, plain = play(run, contest, sides, timed, rest)
    everyone = [Part(run, target, contest.room, side, timed + rest, said[side.key], plain) for side in sides]
    parts = [part for whole in everyone for part in by_set(whole)]
    entries = [part.entry() for part in parts]
    top = header(run, target, timed + rest, plain, everyone) | {"coverage": coverage(head, timed + rest, plain)}
    if head.changes_target():
        top["target_changed"] = kept.recall("target", lambda: target_shift(head, target, reader))
    report = {"schema": SCHEMA, **top, "entries": entries, "seconds": kept.seconds()}
    write_json(run.directory / "report.json", report)
    write_html(run.directory, report)
    show(report)


def refuse_too_deep(head: DraftHead, shapes: Sequence[TreeShape]) -> None:
    """Before anything is measured."""
    for shape in shapes:
        if head.deepest is not None and shape.depth > head.deepest:
            raise UserError(
                f"eval.shapes {shape.name}: {shape.depth} deep, and this {head.config.kind} head guesses {head.deepest} ahead"
            )


def sides_of(
    run: RunConfig, target: Target, head: DraftHead, shapes: Sequence[TreeShape], policies: Sequence[Policy]
) -> Iterator[Side]:
    """The head in every shape, further heads, and the drafters beside them; each at every temperature."""
    heads = [(run.head.kind, head, list(shapes), "")]
    for place in run.eval.heads:
        refuse_adapters(head, "this run's head")
        further = load_head(Path(place), target).eval()
        refuse_adapters(further, place)
        refuse_too_deep(further, shapes)
        marks = [checksum(file)[:8] for file in sorted(Path(place).glob("*.safetensors"))]
        heads.append((f"{further.config.kind} {place}", further, list(shapes), f" {' '.join(marks)}"))
    beside = [(*entry, f" {mark_of(entry[1])}") for entry in others(run, target, shapes)]
    for name, drafter, its_shapes, mark in [*heads, *beside]:
        for policy, shape in itertools.product(policies, its_shapes):
            settings = Settings(
                shape,
                run.eval.max_new_tokens,
                policy,
                verification=run.eval.verification,
                ignore_eos=run.eval.ignore_eos,
            )
            yield Side(name, drafter, settings, mark)


def mark_of(drafter: Drafter) -> str:
    """Which weights a draft model has."""
    return drafter.model.spec.fingerprint if isinstance(drafter, ModelDrafter) else ""


def refuse_adapters(head: DraftHead, name: str) -> None:
    """Heads that change their target cannot share it with others."""
    if head.changes_target() is not None:
        raise UserError(
            f"{name} adapts its target, with which all others would be measured: leave eval.heads empty, or it out of them"
        )


def identity(run: RunConfig, target: Target, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What finished measurements belong to: these weights, these prompts, these settings."""
    asked = "".join(f"{prompt.set} {prompt.place} {prompt.ids} {prompt.rounds}" for prompt in prompts)
    settings = ("max_new_tokens", "verification", "timed_prompts", "rounds", "ignore_eos")
    return {
        "head": checksum(run.directory / "head" / "model.safetensors"),
        "target": target.spec.fingerprint,
        "prompts": xxhash.xxh64_hexdigest(asked.encode()),
        "stack": stack(target),
        "eval": {key: value for key, value in asdict(run.eval).items() if key in settings},
        "seed": run.seed,
    }


def split(run: RunConfig, prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """The first prompts of each set, on which speed is measured, and the others."""
    timed: list[Prompt] = []
    for name in dict.fromkeys(prompt.set for prompt in prompts):
        timed += [prompt for prompt in prompts if prompt.set == name][: run.eval.timed_prompts]
    return timed, [prompt for prompt in prompts if not any(prompt is other for other in timed)]


def play(
    run: RunConfig, contest: Contest, sides: Sequence[Side], timed: Sequence[Prompt], rest: Sequence[Prompt]
) -> tuple[dict[str, list[Spoken]], Plain]:
    """Timed prompts by all sides and both plain baselines in turn; the rest by the sides, and in batches by plain decoding."""
    said = contest.run([*baselines(sides[0].settings), *sides], timed, "timed prompts")
    ours, theirs = (said.pop(plain.key) for plain in baselines(sides[0].settings))
    refuse_silence(timed, ours)
    texts = [[turn.tokens for turn in spoken.turns] for spoken in ours]
    texts += contest.kept.recall("plain texts", partial(plain_texts, contest, rest, run.eval))
    more = replace(contest, rounds=1, first=len(timed), patience=0).run(sides, rest, "further prompts")
    return {side.key: said[side.key] + more[side.key] for side in sides}, Plain(ours, theirs, texts)


def refuse_silence(timed: Sequence[Prompt], ours: Sequence[Spoken]) -> None:
    """A set without a single plain step has no speed."""
    for name in dict.fromkeys(prompt.set for prompt in timed):
        said = [spoken for prompt, spoken in zip(timed, ours) if prompt.set == name]
        if not any(spoken.whole.emitted for spoken in said):
            raise UserError(
                f"{name}: the target ends all of the first {len(said)} answers at their first token: there is nothing to "
                "speed up"
            )


def plain_texts(contest: Contest, prompts: Sequence[Prompt], wanted: EvalConfig) -> list[list[list[int]]]:
    """What the target says by itself, turn by turn, many conversations at the same time."""
    settings = Settings(PLAIN, wanted.max_new_tokens, ignore_eos=wanted.ignore_eos, batch=PLAIN_BATCH)
    texts: list[list[list[int]]] = [[] for _ in prompts]
    live = list(range(len(prompts)))
    while True:
        asked = {number: contest.room.conversation(prompts[number], texts[number]) for number in live}
        live = [number for number in live if asked[number] is not None]
        if not live:
            return texts
        found = generate(contest.target, None, [asked[number] or [] for number in live], settings)
        for number, generation in zip(live, found.generations):
            texts[number].append(generation.tokens)


def by_set(part: Part) -> Iterator[Part]:
    """A part of each prompt set."""
    for name in dict.fromkeys(prompt.set for prompt in part.prompts):
        yield part.chosen([place for place, prompt in enumerate(part.prompts) if prompt.set == name])


@torch.inference_mode()
def target_shift(head: DraftHead, target: Target, reader: FeatureReader) -> dict[str, Any]:
    """How far a head's adapter has moved the target from what the features hold: on the first held-out answers, how often its
    next token is still the same, and KL(the target as it was ‖ as it is).
    """
    same, distance, rows = 0, 0.0, 0
    for document in itertools.islice(reader, SHIFT_DOCUMENTS):
        batch = pack([document])
        last_RD = target.packed(batch.ids_T, batch.segment_T, batch.position_T)[last_rows(document.mask_T)]
        now_RV = target.logits(last_RD).float()
        before_RV = target.logits(document.last_RD.to(last_RD)).float()
        same += int((now_RV.argmax(-1).cpu() == document.argmax_R).sum())
        distance += float(kl(before_RV.softmax(-1), now_RV.log_softmax(-1)).sum())
        rows += len(last_RD)
    shift = {"next_tokens": rows, "same_choice": same / max(rows, 1), "kl": distance / max(rows, 1)}
    return shift | (head.changes_target() or {}) | {"text": changed(shift)}


def header(
    run: RunConfig, target: Target, prompts: Sequence[Prompt], plain: Plain, everyone: Sequence[Part]
) -> dict[str, Any]:
    """The five questions, and what the numbers mean."""
    sets = {name: [p for p in prompts if p.set == name] for name in dict.fromkeys(prompt.set for prompt in prompts)}
    ends = ", end tokens ignored" if run.eval.ignore_eos else ""
    described = "; ".join(f"{len(found)} {name} prompts of {listed(found)}" for name, found in sets.items())
    loads = [spoken.load for part in everyone for spoken in part.said[: len(plain.ours)]]
    often = f", the median of {run.eval.rounds} rounds" if run.eval.rounds > 1 else ""
    return {
        "name": run.name,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "answers": {
            "baseline": "plain greedy decoding, one token per pass: the faster of our own loop and transformers' generate, "
            f"both in turn with every drafter on {len(plain.ours)} timed prompts, after a warm-up{often}",
            "batch_size": 1,
            "stack": stack(target),
            "data": f"{described}; at most {run.eval.max_new_tokens} new tokens a turn{ends}",
            "tree_shape": "named in each entry: chain-K, or tree-depth×top_k-nodes",
        },
        "head": checksum(run.directory / "head" / "model.safetensors"),
        "target": asdict(target.spec),
        "load_average": list(os.getloadavg()),
        "other_load": {"median": statistics.median(loads), "most": max(loads)},
        "baseline_repeated_4grams": repeated_4grams([turn for text in plain.texts for turn in text]),
        "pooled": [pooled(part) for part in everyone],
        "definitions": DEFINITIONS,
    }


def coverage(head: DraftHead, prompts: Sequence[Prompt], plain: Plain) -> dict[str, Any]:
    """How much of the target's own answers the head's vocabulary can say, by language."""
    known, found = set(head.vocab.ids_W.tolist()), {}
    for language in dict.fromkeys(prompt.language for prompt in prompts):
        texts = [text for prompt, text in zip(prompts, plain.texts) if prompt.language == language]
        tokens = [token for text in texts for turn in text for token in turn]
        inside = sum(token in known for token in tokens)
        found[language] = {"tokens": len(tokens), "inside": inside, "coverage": inside / max(len(tokens), 1)}
    return found


def listed(prompts: Sequence[Prompt]) -> str:
    """The domains of some prompts."""
    return ", ".join(sorted({prompt.domain for prompt in prompts}))


def pooled(part: Part) -> dict[str, Any]:
    """A side over all sets: by domain and by language."""
    kinds: dict[str, Callable[[Prompt], str]] = {
        "by_set": lambda prompt: prompt.set,
        "by_domain": lambda prompt: prompt.domain,
        "by_language": lambda prompt: prompt.language,
    }
    settings = part.side.settings
    named = {"drafter": part.side.name, "shape": settings.shape.name, "temperature": settings.policy.temperature}
    return named | {key: groups(part, name) for key, name in kinds.items()}


def stack(target: Target) -> str:
    """Device, threads, dtype and versions."""
    dtype = str(target.dtype).removeprefix("torch.")
    libraries = (
        f"torch {torch.__version__}, transformers {transformers.__version__}, accelerate {accelerate.__version__}"
    )
    threads = f"{torch.get_num_threads()} threads"
    return f"{device_name(target.device)}, {threads}, {dtype}; {libraries}; Python {platform.python_version()}"


def show(report: dict[str, Any]) -> None:
    """The table at the end of the stage."""
    several = len({entry["prompt_set"] for entry in report["entries"]}) > 1
    rows = []
    for entry in report["entries"]:
        low, high = entry["acceptance_length_ci95"]
        slow, fast = entry["speedup_ci95"]
        model, lossless = entry["speedup_model"], entry["lossless"]
        row = (
            entry["drafter"],
            entry["shape"]["name"],
            f"{entry['temperature']:g}",
            f"{entry['acceptance_length']:.2f} [{low:.2f}, {high:.2f}]",
            " ".join(f"{share:.0%}" for share in entry["accepted_per_position"][:3]),
            f"{entry['tokens_per_second']:.1f}",
            f"{entry['speedup']:.2f}× [{slow:.2f}, {fast:.2f}]",
            f"{model['modelled_gpu']:.2f}×",
            same_text(lossless),
        )
        rows.append((entry["prompt_set"], *row) if several else row)
    columns = (
        "drafter",
        "shape",
        "T",
        "τ [95 %]",
        "accepted ≥1 ≥2 …",
        "tok/s",
        "speed-up here [95 %]",
        "modelled GPU",
        "same text",
    )
    first = report["entries"][0]
    title = "acceptance" if several else f"acceptance on {first['prompt_set']} prompts"
    table(title, ("set", *columns) if several else columns, rows)
    say(
        f"plain decoding: {first['baseline_tokens_per_second']:.1f} tok/s (ours), "
        f"{first['baseline_hf_tokens_per_second']:.1f} tok/s (transformers' generate)"
    )
    say(verdict(first))
    if "target_changed" in report:
        say(report["target_changed"]["text"])


def same_text(lossless: dict[str, Any] | None) -> str:
    """The last column."""
    if lossless is None:
        return "–"
    return "not lossless" if "rule" in lossless else f"{lossless['identical']}/{lossless['prompts']}"


def changed(shift: dict[str, Any]) -> str:
    """What an adapter does to the text, in words."""
    return (
        f"this head's adapter changes the target: of {shift['next_tokens']} next tokens of held-out answers it chooses "
        f"{shift['same_choice']:.1%} as before (KL {shift['kl']:.4f}). All the above compares it with itself, adapted"
    )


def verdict(entry: dict[str, Any]) -> str:
    """The result in two sentences."""
    model = entry["speedup_model"]
    even, tau = model["break_even_tau_here"], entry["acceptance_length"]
    worth = "pays" if tau > even else "does not pay"
    return (
        f"One cycle costs {even:.2f} plain steps here, so drafting pays above τ = {even:.2f}; with τ = {tau:.2f} it "
        f"{worth} on this device ({entry['speedup']:.2f}×). The same τ would give {model['modelled_gpu']:.2f}× by the cost "
        f"model of a GPU ({model['modelled_gpu_assumes']})."
    )


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    run_stage("headwright eval", ABOUT, SECTIONS, evaluate, argv)


if __name__ == "__main__":
    main()

"""What a head is worth: τ, rates per depth, speed against plain decoding, losslessness. Runnable: `headwright eval`.

Writes `runs/<name>/report.json` (schema headwright.acceptance/1) and `report.html`.
"""

import datetime
import itertools
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers

from headwright.configs import RunConfig, UserError
from headwright.configs.command import run_stage
from headwright.configs.console import progress, say, table
from headwright.data.batch import last_rows, pack
from headwright.data.generate import Question, answer
from headwright.data.harvest import check_offline, open_store
from headwright.data.sampling import Policy
from headwright.data.store import FeatureReader, checksum, write_json
from headwright.data.target import Target
from headwright.eval.baselines import others
from headwright.eval.clock import device_name
from headwright.eval.decode import Generation, Settings, decode_plain, generate_one
from headwright.eval.drafters import HostDrafter
from headwright.eval.metrics import (
    DEFINITIONS,
    acceptance_length,
    acceptance_metrics,
    bootstrap,
    phase_milliseconds,
    repeated_4grams,
    tokens_per_second,
)
from headwright.eval.model_drafter import ModelDrafter
from headwright.eval.prompts import Prompt, held_out_prompts
from headwright.eval.report import write_html
from headwright.heads.base import Drafter, DraftHead
from headwright.heads.draft_tree import TreeShape
from headwright.heads.losses import kl
from headwright.heads.saved import load_head

SHIFT_DOCUMENTS = 24  # on which the change of an adapted target is measured
SECTIONS = ("eval",)
ABOUT = "Decode held-out prompts with the head and without, and report what it is worth."
SCHEMA = "headwright.acceptance/1"


@dataclass
class Baseline:
    """Plain decoding of the timed prompts, by our loop and by transformers' generate; greedy texts of all prompts."""

    ours: list[Generation]
    hf_seconds: list[float]
    hf_tokens: list[int]
    greedy: list[list[int]]

    @classmethod
    def read(cls, raw: dict[str, Any]) -> "Baseline":
        """From its JSON form."""
        return cls(**raw | {"ours": [Generation(**generation) for generation in raw["ours"]]})

    def step_seconds(self) -> float:
        """One plain target pass."""
        return sum(run.phases["verify"] for run in self.ours) / sum(len(run.emitted) for run in self.ours)

    def per_token(self) -> list[float]:
        """Seconds per new token of each timed prompt, by the faster of the two."""
        ours = [run.seconds / len(run.tokens) for run in self.ours]
        theirs = [seconds / tokens for seconds, tokens in zip(self.hf_seconds, self.hf_tokens)]
        return ours if sum(ours) <= sum(theirs) else theirs


def evaluate(run: RunConfig, dry_run: bool = False) -> None:
    """The whole evaluation of a run."""
    shapes = [TreeShape.of(shape) for shape in run.eval.shapes]
    policies = [Policy(temperature) for temperature in run.eval.temperatures]
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
    prompts = held_out_prompts(reader, run.eval.prompts)
    say(f"evaluating on {len(prompts)} held-out prompts, {run.eval.max_new_tokens} new tokens each, batch 1, {device}")
    done = Finished(run.directory / "eval.json", identity(run, target, prompts))
    baseline = Baseline.read(done.recall("baseline", lambda: asdict(measure_baseline(run, target, prompts))))
    entries = []
    for name, drafter, its_shapes in [(run.head.kind, head, shapes), *others(run, target, shapes)]:
        for policy in policies:
            for shape in its_shapes:
                work = partial(measure, run, target, name, drafter, shape, policy, prompts, baseline)
                entries.append(done.recall(f"{name} {shape.name} T={policy.temperature:g}", work))
    top = done.recall("header", lambda: header(run, target, prompts, baseline))
    if head.changes_target():
        top["target_changed"] = done.recall("target", lambda: target_shift(head, target, reader))
    report = {"schema": SCHEMA, **top, "entries": entries, "seconds": done.seconds()}
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


def identity(run: RunConfig, target: Target, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What finished measurements belong to: these weights, these prompts, these settings."""
    return {
        "head": checksum(run.directory / "head" / "model.safetensors"),
        "target": target.spec.fingerprint,
        "prompts": [prompt.place for prompt in prompts],
        "stack": stack(target),
        "eval": {key: value for key, value in asdict(run.eval).items() if key != "shapes"},
        "seed": run.seed,
    }


class Finished:
    """Measurements that an interrupted evaluation need not repeat. Another identity starts anew."""

    def __init__(self, path: Path, identity: dict[str, Any]):
        self.path = path
        self.kept: dict[str, Any] = {"identity": json.loads(json.dumps(identity)), "parts": {}, "seconds": {}}
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["identity"] == self.kept["identity"]:
                self.kept = found
                say(f"continuing {path}; remove it to measure again")

    def recall(self, name: str, work: Callable[[], Any]) -> Any:
        """The result kept under `name`, or that of `work`, kept from now on."""
        if name not in self.kept["parts"]:
            started = time.perf_counter()
            self.kept["parts"][name] = json.loads(json.dumps(work()))
            self.kept["seconds"][name] = time.perf_counter() - started
            write_json(self.path, self.kept)
        return self.kept["parts"][name]

    def seconds(self) -> float:
        """Time of all that was measured."""
        return sum(self.kept["seconds"].values())


def measure_baseline(run: RunConfig, target: Target, prompts: Sequence[Prompt]) -> Baseline:
    """Plain greedy decoding: alternating ours and transformers' on the timed prompts, batched on the others."""
    limit = run.eval.max_new_tokens
    timed = prompts[: run.eval.timed_prompts]
    decode_plain(target, timed[0].ids, 4)  # warm-up
    target.generate_hf(torch.tensor([timed[0].ids], device=target.device), 4)
    ours, seconds, counts = [], [], []
    for prompt in watched("plain decoding", timed):
        ours.append(decode_plain(target, prompt.ids, limit))
        begun = time.perf_counter()
        tokens = target.generate_hf(torch.tensor([prompt.ids], device=target.device), limit)
        seconds.append(time.perf_counter() - begun)
        counts.append(len(tokens))
    if not any(run.emitted for run in ours):
        raise UserError(
            f"the target ends all of the first {len(timed)} held-out answers at their first token: there is nothing to speed up"
        )
    greedy = [run.tokens for run in ours]
    rest = [Question(prompt.ids, Policy()) for prompt in prompts[len(timed) :]]
    for start in range(0, len(rest), 32):
        group = rest[start : start + 32]
        answers = answer(target, group, limit)
        greedy += [a.ids_T[len(q.ids) :].tolist() for a, q in zip(answers, group)]
    return Baseline(ours, seconds, counts, greedy)


def watched(what: str, items: Sequence[Any]) -> Any:
    """Iterate with a progress bar."""
    with progress() as bar:
        task = bar.add_task(what, total=len(items), note="")
        for item in items:
            yield item
            bar.advance(task)


def measure(
    run: RunConfig,
    target: Target,
    name: str,
    drafter: Drafter,
    shape: TreeShape,
    policy: Policy,
    prompts: Sequence[Prompt],
    baseline: Baseline,
) -> dict[str, Any]:
    """One entry of the report."""
    limit = run.eval.max_new_tokens
    settings = Settings(shape, limit, policy, verification=run.eval.verification)
    warm = generate_one(target, drafter, prompts[0].ids, replace(settings, max_new_tokens=4))
    runs = [
        generate_one(target, drafter, prompt.ids, settings, seed=run.seed + index)
        for index, prompt in enumerate(watched(f"{name} {shape.name} T={policy.temperature:g}", prompts))
    ]
    texts = [r.tokens for r in runs]
    characters = sum(len(target.tokenizer.decode(text)) for text in texts)
    return {
        "drafter": name,
        "shape": asdict(shape) | {"name": shape.name},
        "prompt_set": "held-out",
        "temperature": policy.temperature,
        **acceptance_metrics(runs, shape.depth, run.seed),
        "by_source": by_source(runs, prompts),
        "repeated_4grams": repeated_4grams(texts),
        "tokens_per_second": tokens_per_second(runs),
        "chars_per_second": characters / sum(r.seconds for r in runs),
        **speed(runs, baseline, run.seed),
        "phases_ms": phase_milliseconds(runs),
        "warmup_seconds": sum(r.warmup for r in [warm, *runs]),
        "speedup_model": speed_model(run, runs, shape, baseline, draft_cost(run, drafter, target)),
        "verification": "walk" if isinstance(drafter, HostDrafter) else settings.rule,
        "lossless": losslessness(target, prompts, texts, baseline, settings),
        "samples": [sample(target, r, p) for r, p in list(zip(runs, prompts))[:4]],
    }


def by_source(runs: Sequence[Generation], prompts: Sequence[Prompt]) -> dict[str, Any]:
    """τ and prompts of each corpus source."""
    names = dict.fromkeys(prompt.source for prompt in prompts)
    groups = {name: [r for r, p in zip(runs, prompts) if p.source == name] for name in names}
    return {
        name: {"prompts": len(group), "acceptance_length": acceptance_length(group)} for name, group in groups.items()
    }


def speed(runs: Sequence[Generation], baseline: Baseline, seed: int) -> dict[str, Any]:
    """Speed-up over the faster plain baseline, paired over the timed prompts."""
    pairs = [(plain, r.seconds / len(r.tokens)) for plain, r in zip(baseline.per_token(), runs)]

    def ratio(sample: Sequence[tuple[float, float]]) -> float:
        return sum(plain for plain, _ in sample) / sum(ours for _, ours in sample)

    hf = sum(baseline.hf_tokens) / sum(baseline.hf_seconds)
    return {
        "baseline_tokens_per_second": tokens_per_second(baseline.ours),
        "baseline_hf_tokens_per_second": hf,
        "speedup": ratio(pairs),
        "speedup_ci95": bootstrap(pairs, ratio, seed),
        "timed_prompts": len(pairs),
    }


def speed_model(
    run: RunConfig, runs: Sequence[Generation], shape: TreeShape, baseline: Baseline, draft_cost: float
) -> dict[str, Any]:
    """S = τ / (draft + verify + overhead), in plain steps: as measured here, and modelled for a GPU (not measured)."""
    phases, step = phase_milliseconds(runs), 1000 * baseline.step_seconds()
    tau = acceptance_length(runs)
    overhead = sum(phases[name] for name in ("select", "commit", "other"))
    verify_cost = run.eval.gpu_ceiling[1]
    return {
        "plain_step_ms": step,
        "draft_in_steps": phases["draft"] / step,
        "verify_in_steps": phases["verify"] / step,
        "overhead_in_steps": overhead / step,
        "predicted_here": tau * step / (phases["draft"] + phases["verify"] + overhead),
        "break_even_tau_here": (phases["draft"] + phases["verify"] + overhead) / step,
        "modelled_gpu": tau / (shape.depth * draft_cost + verify_cost),
        "modelled_gpu_assumes": f"draft step {draft_cost:g}, verification {verify_cost:g} plain steps, batch 1; not measured",
    }


def draft_cost(run: RunConfig, drafter: Drafter, target: Target) -> float:
    """One draft step in plain steps, on the modelled GPU: a head's as the run file says, a model's by the weights that
    it reads.
    """
    if isinstance(drafter, DraftHead):
        return run.eval.gpu_ceiling[0]
    return drafter.share(target) if isinstance(drafter, ModelDrafter) else 0.0


def losslessness(
    target: Target, prompts: Sequence[Prompt], texts: Sequence[list[int]], baseline: Baseline, settings: Settings
) -> dict[str, Any] | None:
    """Greedy identity with plain decoding; where texts part, the target's logit gap between the two tokens. None where text is
    sampled: the rule is then exact, and no two texts can be compared.
    """
    if not settings.lossless:
        return {"rule": "typical acceptance is not lossless: this text is not the target's own"}
    if not settings.policy.greedy:
        return None
    different = []
    for prompt, text, plain in zip(prompts, texts, baseline.greedy):
        place = next((i for i, (a, b) in enumerate(zip(text, plain)) if a != b), None)
        if place is None and len(text) == len(plain):
            continue
        place = min(len(text), len(plain)) if place is None else place
        different.append(
            {
                "place": prompt.place,
                "token": place,
                "logit_gap": logit_gap(target, prompt, text, plain, place),
            }
        )
    identical = len(prompts) - len(different)
    return {
        "prompts": len(prompts),
        "identical": identical,
        "greedy_identity": identical / len(prompts),
        "divergences": different,
    }


def logit_gap(target: Target, prompt: Prompt, text: list[int], plain: list[int], place: int) -> float | None:
    """Difference of the target's logits for the two tokens; None where one text merely ends."""
    if place >= min(len(text), len(plain)):
        return None
    ids = torch.tensor([prompt.ids + plain[:place]], device=target.device)
    logits = target.logits(target.features(ids).last_BND[0, -1])
    return float((logits[plain[place]] - logits[text[place]]).abs())


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


def sample(target: Target, generation: Generation, prompt: Prompt) -> dict[str, Any]:
    """A decoded answer, cut into the pieces that each cycle emitted."""
    pieces, start = [], 1
    decode = target.tokenizer.decode
    first = decode(generation.tokens[:1])
    for emitted, accepted in zip(generation.emitted, generation.accepted):
        tokens = generation.tokens[start : start + emitted]
        pieces.append({"accepted": decode(tokens[:accepted]), "target": decode(tokens[accepted:])})
        start += emitted
    return {"source": prompt.source, "place": prompt.place, "first": first, "cycles": pieces}


def header(run: RunConfig, target: Target, prompts: Sequence[Prompt], baseline: Baseline) -> dict[str, Any]:
    """The five questions, and what the numbers mean."""
    sources = sorted({prompt.source for prompt in prompts})
    return {
        "name": run.name,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "answers": {
            "baseline": "plain decoding, one token per pass: the faster of our own loop and transformers' generate",
            "batch_size": 1,
            "stack": stack(target),
            "data": f"{len(prompts)} held-out prompts of {', '.join(sources)}; at most {run.eval.max_new_tokens} new tokens",
            "tree_shape": "named in each entry: chain-K, or tree-depth×top_k-nodes",
        },
        "head": checksum(run.directory / "head" / "model.safetensors"),
        "target": asdict(target.spec),
        "load_average": list(os.getloadavg()),
        "baseline_repeated_4grams": repeated_4grams(baseline.greedy),
        "definitions": DEFINITIONS,
    }


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
    rows = []
    for entry in report["entries"]:
        low, high = entry["acceptance_length_ci95"]
        model, lossless = entry["speedup_model"], entry["lossless"]
        rows.append(
            (
                entry["drafter"],
                entry["shape"]["name"],
                f"{entry['temperature']:g}",
                f"{entry['acceptance_length']:.2f} [{low:.2f}, {high:.2f}]",
                " ".join(f"{share:.0%}" for share in entry["accepted_per_position"][:5]),
                f"{entry['tokens_per_second']:.1f}",
                f"{entry['speedup']:.2f}×",
                f"{model['modelled_gpu']:.2f}×",
                same_text(lossless),
            )
        )
    columns = (
        "drafter",
        "shape",
        "T",
        "τ [95 %]",
        "accepted ≥1 ≥2 …",
        "tok/s",
        "speed-up here",
        "modelled GPU",
        "same text",
    )
    table("acceptance on held-out prompts", columns, rows)
    first = report["entries"][0]
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

"""What a run will take, from short probes of its own stages. Runnable: `headwright plan --config …`.

Tokens are counted with the target's tokenizer over the whole corpus. Seconds come from the real thing: batches of the
harvest, steps of the training and cycles of the evaluation are run for a minute, and multiplied. `headwright summary` puts
what happened beside it.
"""

import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from headwright.configs import RunConfig
from headwright.configs.command import run_stage
from headwright.configs.console import duration, peak_memory, say, size, table
from headwright.configs.schema import StrategyName
from headwright.data.batch import DocumentFeatures, pack
from headwright.data.corpus import read_corpus
from headwright.data.harvest import check_offline, jobs_of, run_batch, store_path, taps_to_harvest, wanted_taps
from headwright.data.jobs import Jobs
from headwright.data.packing import plan_epoch
from headwright.data.sampling import Policy
from headwright.data.store import bytes_per_token, write_json
from headwright.data.target import Target
from headwright.data.vocab import DraftVocab, count_tokens
from headwright.eval.decode import speculate
from headwright.heads.base import DraftHead, Engine, make_head
from headwright.heads.draft_tree import TreeShape
from headwright.train.launch import open_launch
from headwright.train.loop import one_step
from headwright.train.paper import state_bytes
from headwright.train.spread import spread
from headwright.train.track import Meter

SECTIONS = ("corpus", "answers", "harvest", "vocab", "train", "plan")
ABOUT = "Disk, memory and time of a run, from short probes on this machine, before anything is spent."
QUANTILES = (0.5, 0.85, 0.15, 0.7, 0.3, 0.95, 0.05)  # of the batches, by length: which are probed, in this order
NOTE_BYTES = 160  # of a document in a shard: its note, offsets and checksum
SHARDING: tuple[StrategyName, ...] = ("zero1", "zero2", "zero3", "fsdp2")
ADAM_BYTES = 12  # per trained parameter: the weight and two moments, fp32


@dataclass
class Plan:
    """What is expected. Bytes and seconds."""

    documents: int
    tokens: int
    response_tokens: int
    features_bytes: int
    features_bytes_at_most: int
    checkpoint_bytes: int
    free_bytes: int
    harvest_seconds: float
    train_seconds: float
    eval_seconds: float
    harvest_memory: int
    train_memory: int
    device_memory: int
    target_parameters: int
    head_parameters: int
    steps: int
    probes: dict[str, float]


@dataclass
class Harvested:
    """What the harvest's probe saw: its documents, and how long answers are as a share of the longest."""

    documents: list[DocumentFeatures]
    seconds: float
    tokens: int
    shares: dict[bool, float]  # of a prompt's first answer, and of the others


def plan(run: RunConfig, dry_run: bool = False) -> None:
    """Probe, predict, print, and keep the prediction."""
    if dry_run:
        check_offline(run)
        return
    started = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    corpus = read_corpus(run.corpus, run.seed, run.directory)
    target = Target.load(run.target, taps_to_harvest(run), device)
    sides = [
        jobs_of(run, target.tokenizer, target.spec.max_positions, name, documents, corpus.skipped)
        for name, documents in (("train", corpus.train), ("held-out", corpus.held_out))
    ]
    say(f"probing on {device}, for about {run.plan.seconds:.0f} s")
    found = predict(run, target, sides)
    found.probes["all"] = time.perf_counter() - started
    write_json(run.directory / "plan.json", asdict(found))
    show(run, found)


def predict(run: RunConfig, target: Target, sides: Sequence[Jobs]) -> Plan:
    """All probes, multiplied."""
    sample = probe_harvest(run, target, sides[0])
    harvest_memory = peak_memory()
    expected = [expected_tokens(jobs, sample.shares) for jobs in sides]
    per_token, per_row = bytes_per_token(len(target.taps), target.spec.hidden_size, run.harvest.dtype)
    disk = sum(
        tokens * per_token + responses * per_row + NOTE_BYTES * len(jobs)
        for (tokens, responses), jobs in zip(expected, sides)
    )
    narrow(run, target, sample)
    head = probe_head(run, target, sample.documents)
    per_trained, steps = probe_training(run, target, head, sample.documents, expected[0][0])
    parameters = sum(weight.numel() for weight in head.parameters() if weight.requires_grad)
    evaluation = probe_evaluation(run, target, head, sample.documents)
    return Plan(
        documents=len(sides[0]),
        tokens=sum(tokens for tokens, _ in expected),
        response_tokens=sum(responses for _, responses in expected),
        features_bytes=disk,
        features_bytes_at_most=sum(jobs.bytes(len(target.taps), target.spec.hidden_size) for jobs in sides),
        checkpoint_bytes=parameters * (ADAM_BYTES + 4 + 4),
        free_bytes=shutil.disk_usage(run.directory).free,
        harvest_seconds=sum(tokens for tokens, _ in expected) * sample.seconds / sample.tokens,
        train_seconds=run.train.epochs * expected[0][0] * per_trained
        + run.train.evals * expected[1][0] * per_trained / 3,  # a measurement runs forward only
        eval_seconds=evaluation,
        harvest_memory=harvest_memory,
        train_memory=peak_memory(),
        device_memory=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        target_parameters=sum(weight.numel() for weight in target.model.parameters()),
        head_parameters=parameters,
        steps=steps,
        probes={"harvest": sample.seconds},
    )


def probe_harvest(run: RunConfig, target: Target, jobs: Jobs) -> Harvested:
    """Real batches of several lengths, until half of the time is spent; two at least."""
    batches = list(jobs.batches())
    run_batch(run, target, [jobs.spool[batches[0][0]]])  # warm-up
    documents: list[DocumentFeatures] = []
    said: dict[bool, list[int]] = {True: [0, 0], False: [0, 0]}
    seconds = 0.0
    for done, place in enumerate(dict.fromkeys(int(q * len(batches)) for q in QUANTILES)):
        if done >= 2 and seconds > run.plan.seconds / 2:
            break
        started = time.perf_counter()
        these = [jobs.spool[number] for number in batches[place]]
        made = run_batch(run, target, these)
        seconds += time.perf_counter() - started
        for number, job, parts in zip(batches[place], these, made):
            said[job.sample == 0][0] += sum(int(part.mask_T.sum()) for part in parts)
            said[job.sample == 0][1] += jobs.rows[number] if job.mask is None else int(sum(job.mask))
            documents += parts
    overall = sum(a for a, _ in said.values()) / sum(b for _, b in said.values())
    shares = {first: a / b if b else overall for first, (a, b) in said.items()}
    return Harvested(documents, seconds, sum(len(d.ids_T) for d in documents), shares)


def expected_tokens(jobs: Jobs, shares: dict[bool, float]) -> tuple[int, int]:
    """Tokens and response tokens of a side: exact for texts; answers at the share of their limit that was seen."""
    tokens = responses = 0.0
    for number, sample in enumerate(jobs.samples):
        share = shares[sample == 0]
        responses += share * jobs.rows[number]
        tokens += jobs.tokens[number] - (1 - share) * jobs.rows[number]
    return round(tokens), round(responses)


def narrow(run: RunConfig, target: Target, sample: Harvested) -> None:
    """From here on only the taps that the head reads."""
    wanted = wanted_taps(run, target.spec.num_layers, target.taps, f"harvest.taps gives {list(target.taps)}")
    columns = [target.taps.index(tap) for tap in wanted]
    sample.documents = [replace(d, taps_TKD=d.taps_TKD[:, columns]) for d in sample.documents]
    target.taps = wanted


def probe_head(run: RunConfig, target: Target, documents: Sequence[DocumentFeatures]) -> DraftHead:
    """An untrained head of the right size. Its vocabulary is the sample's, filled up with any ids."""
    size = target.spec.vocab_size
    counts = count_tokens((d.ids_T[d.mask_T] for d in documents), size)
    kept = torch.argsort(counts, descending=True, stable=True)[: run.vocab.size or size].sort().values
    head = make_head(run.head, target.spec, target.taps, DraftVocab(kept, size)).to(target.device)
    head.attach(target)
    head.initialise(target)
    return head


def probe_training(
    run: RunConfig, target: Target, head: DraftHead, documents: Sequence[DocumentFeatures], tokens: int
) -> tuple[float, int]:
    """Seconds per packed token, from a few real steps; and how many steps there will be."""
    launch = open_launch(run.train)
    head.engine = Engine(run.train.recompute, run.train.loss_mib)
    strategy = spread(head, run.train, launch)
    lengths, rows = [len(d.ids_T) for d in documents], [len(d.last_RD) for d in documents]
    groups = plan_epoch(lengths, rows, run.train.tokens_per_batch, run.seed, 0, "whole")
    batches = [pack([documents[piece.document] for piece in group]) for group in groups]
    one_step(strategy, [batches[0]], target, Meter())  # warm-up
    seconds, seen = 0.0, 0
    for done, batch in enumerate(batches):
        if done >= 3 and seconds > run.plan.seconds / 4:
            break
        started = time.perf_counter()
        float(one_step(strategy, [batch], target, Meter())[0])
        seconds += time.perf_counter() - started
        seen += len(batch.ids_T)
    per_batch = sum(len(d.ids_T) for d in documents) / len(groups)
    steps = run.train.epochs * tokens / per_batch / run.train.accumulate / launch.world
    return seconds / seen / launch.world, max(1, round(steps))


def probe_evaluation(run: RunConfig, target: Target, head: DraftHead, documents: Sequence[DocumentFeatures]) -> float:
    """Seconds of the evaluation: cycles of every shape with an untrained head, which emit one token each."""
    prompt = documents[0].ids_T[: int(documents[0].mask_T.int().argmax())].tolist()
    count = 12
    head.eval()
    plain = timed_cycle(target, head, prompt, TreeShape("chain", 1, 1, 1), count)
    tokens = sum(wanted.prompts or run.eval.prompts for wanted in run.eval.sets) * run.eval.max_new_tokens
    timed = run.eval.timed_prompts * len(run.eval.sets) * run.eval.rounds
    tau = expected_tau(sum(int(d.mask_T.sum()) for d in documents))
    shapes = [TreeShape.of(shape) for shape in run.eval.shapes]
    cycles = sum(timed_cycle(target, head, prompt, shape, count) for shape in shapes) * len(run.eval.temperatures)
    return 2 * plain * timed * run.eval.max_new_tokens + tokens / tau * (cycles + plain)


def timed_cycle(target: Target, head: DraftHead, prompt: list[int], shape: TreeShape, count: int) -> float:
    """Seconds of one cycle."""
    out = speculate(target, head, prompt, shape, count, Policy())
    return (out.seconds - out.phases["prefill"]) / max(len(out.emitted), 1)


def expected_tau(response_tokens: int) -> float:
    """The middle of the band, for estimating how many cycles there will be."""
    return 1.8 if response_tokens < 1_000_000 else 2.5


def show(run: RunConfig, found: Plan) -> None:
    """Print the plan."""
    stages = (("harvest", found.harvest_seconds), ("train", found.train_seconds), ("eval", found.eval_seconds))
    at_most = f"{size(found.features_bytes)} (at most {size(found.features_bytes_at_most)})"
    rows: list[tuple[str, Any]] = [
        ("training documents", found.documents),
        ("tokens, of them response tokens", f"{found.tokens}, {found.response_tokens}"),
        (
            "target, head parameters",
            f"{found.target_parameters / 1e6:.0f} M, {found.head_parameters / 1e6:.1f} M trained",
        ),
        ("memory: head's weights, gradients, AdamW", state_of(found.head_parameters)),
        ("disk: features", at_most if run.harvest.features != "live" else "none: live"),
        ("disk: checkpoint, head and export", size(found.checkpoint_bytes)),
        ("disk: free", size(found.free_bytes)),
        ("memory: harvest, training (as probed)", f"{size(found.harvest_memory)}, {size(found.train_memory)}"),
        *([("memory: GPU (as probed)", size(found.device_memory))] if found.device_memory else []),
        *((f"time: {name}", duration(seconds)) for name, seconds in stages),
        ("time: together", duration(sum(seconds for _, seconds in stages))),
        ("training steps", found.steps),
    ]
    table(f"plan of {run.name}", ("what", "estimate"), rows)
    say(f"τ to expect: {band(found.response_tokens)}")
    if found.features_bytes_at_most > found.free_bytes and run.harvest.features == "stored":
        say(f"warning: the features may not fit {store_path(run, 'train')}: the harvest will refuse to start")
    say(f"the probes took {duration(found.probes['all'])}; headwright summary compares after the run")


def state_of(trained: int) -> str:
    """On one process, and on each of eight."""
    eight = ", ".join(f"{name} {size(state_bytes(trained, name, 8)[1])}" for name in SHARDING)
    return f"{size(state_bytes(trained, 'single', 1)[1])}; on each of 8: {eight}"


def band(response_tokens: int) -> str:
    """Published and own experience, chain of 3 to 7, greedy, general chat; far outside means a bug."""
    if response_tokens < 1_000_000:
        return (
            "1.6 to 2.1 in a narrow domain (own runs: 135 M target, 10 000 to 72 000 response tokens); less outside it"
        )
    if response_tokens < 50_000_000:
        return "about 1.9 (published runs on 5 000 to 50 000 dialogues)"
    return "2.3 to 3.0 (published runs on 100 000 to 500 000 on-policy dialogues)"


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    run_stage("headwright plan", ABOUT, SECTIONS, plan, argv)


if __name__ == "__main__":
    main()

"""What all studies share: a run's target, head and held-out texts; races of sides, as rows of numbers."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from headwright.configs import RunConfig
from headwright.data.batch import DocumentFeatures
from headwright.data.harvest import open_store
from headwright.data.sampling import Policy
from headwright.data.store import FeatureReader, checksum
from headwright.data.target import Target
from headwright.eval.acceptance import stack
from headwright.eval.entries import Part, Plain
from headwright.eval.kept import Kept
from headwright.eval.metrics import tokens_per_second
from headwright.eval.prompts import Prompt, Room, described_prompts, held_out_prompts
from headwright.eval.settings import Generation, Settings
from headwright.eval.shape import first_answer
from headwright.eval.sides import Contest, Side, baselines
from headwright.eval.tune import answered, length_of, prompt_of
from headwright.heads.base import DraftHead
from headwright.heads.draft_tree import TreeShape, most_nodes
from headwright.heads.saved import load_head

Row = dict[str, Any]


@dataclass
class Scene:
    """A run, opened."""

    run: RunConfig
    target: Target
    head: DraftHead
    reader: FeatureReader
    room: Room
    prompts: list[Prompt]
    folder: Path
    kept: Kept = field(init=False)

    @classmethod
    def open(cls, run: RunConfig) -> "Scene":
        """Load it."""
        reader = open_store(run, "held-out")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        target = Target.load(run.target, reader.manifest.taps, device)
        head = load_head(run.directory / "head", target).eval()
        room = Room.of(run, target)
        prompts = described_prompts(held_out_prompts(reader, run.study.prompts), room)
        folder = run.directory / "studies"
        folder.mkdir(exist_ok=True)
        return cls(run, target, head, reader, room, prompts, folder)

    def begin(self, name: str) -> None:
        """Open what a study has kept."""
        asked = "".join(f"{prompt.place} {prompt.ids}" for prompt in self.prompts)
        keys = ("max_new_tokens", "rounds", "samples")
        identity = {
            "head": checksum(self.run.directory / "head" / "model.safetensors"),
            "target": self.target.spec.fingerprint,
            "stack": stack(self.target),
            "prompts": xxhash.xxh64_hexdigest(asked.encode()),
            "study": {key: value for key, value in asdict(self.run.study).items() if key in keys},
            "seed": self.run.seed,
        }
        self.kept = Kept(self.folder / f"{name}.jsonl", identity)

    def answers(self) -> dict[str, Any]:
        """The five questions, as far as they are alike for all rows."""
        study, domains = self.run.study, sorted({prompt.domain for prompt in self.prompts})
        return {
            "baseline": "plain greedy decoding in the same turns: the faster of our loop and transformers' generate",
            "batch_size": "1, where no row says otherwise",
            "stack": stack(self.target),
            "data": f"{len(self.prompts)} held-out prompts of {', '.join(domains)}, {study.max_new_tokens} new tokens each, "
            "where no row says otherwise",
            "tree_shape": "in each row",
        }

    def side(self, shape: TreeShape, temperature: float = 0.0) -> Side:
        """The head in a shape."""
        return Side(self.run.head.kind, self.head, Settings(shape, self.run.study.max_new_tokens, Policy(temperature)))

    def fits(self, shape: TreeShape) -> bool:
        """Whether the head can draft so deep."""
        return self.head.deepest is None or shape.depth <= self.head.deepest

    def tree(self, depth: int, width: int, nodes: int) -> TreeShape:
        """A dynamic tree of at most so many nodes: no more than the shape can hold, no fewer than its depth."""
        return TreeShape.dynamic(depth, width, max(depth, min(nodes, most_nodes(depth, width))))

    def trees(self, depths: Iterable[int], width: int, nodes: int) -> list[TreeShape]:
        """Trees of one width, as deep as the head can."""
        shapes = [self.tree(depth, width, nodes) for depth in depths]
        return [shape for shape in dict.fromkeys(shapes) if self.fits(shape)]

    def chains(self, depths: Iterable[int]) -> list[TreeShape]:
        """Chains, as deep as the head can."""
        return [shape for shape in map(TreeShape.chain, depths) if self.fits(shape)]

    def contest(self) -> Contest:
        """Turns whose results are kept in this study's file."""
        run = self.run
        return Contest(self.target, self.room, self.kept, run.seed, run.study.rounds, patience=run.eval.patience)

    def race(self, sides: Sequence[Side], prompts: Sequence[Prompt] | None = None, what: str = "prompts") -> list[Part]:
        """All sides and both baselines in turn."""
        asked = list(self.prompts if prompts is None else prompts)
        if not sides:
            return []
        plain_sides = baselines(sides[0].settings)
        said = self.contest().run([*plain_sides, *sides], asked, what)
        ours, theirs = (said[side.key] for side in plain_sides)
        plain = Plain(ours, theirs, [[turn.tokens for turn in spoken.turns] for spoken in ours])
        return [Part(self.run, self.target, self.room, side, asked, said[side.key], plain) for side in sides]

    def documents(self, count: int) -> tuple[list[DocumentFeatures], list[Prompt]]:
        """Held-out answers that the target wrote greedily, and their prompts, to be answered at the same length."""
        documents = answered(replace(self.run, tune=replace(self.run.tune, prompts=count)), self.reader)
        prompts = [
            Prompt(prompt_of(document), "held-out", f"answer {number}", limit=length_of(document))
            for number, document in enumerate(documents)
        ]
        return documents, prompts

    def typical(self) -> DocumentFeatures:
        """An answer of usual length."""
        documents, _ = self.documents(8)
        return sorted(documents, key=lambda document: first_answer(document)[1])[len(documents) // 2]


def numbers(part: Part) -> Row:
    """A side of a race as a row."""
    shape, acceptance, speed = part.side.settings.shape, part.acceptance(), part.speed()
    same, costs = part.losslessness(), Costs.of(part)
    return {
        "drafter": part.side.name,
        "shape": shape.name,
        "kind": "chain" if shape.kind == "chain" else "tree",
        "depth": shape.depth,
        "top_k": shape.top_k,
        "nodes": shape.nodes,
        "temperature": part.side.settings.policy.temperature,
        "tau": acceptance["acceptance_length"],
        "tau_ci95": acceptance["acceptance_length_ci95"],
        "speedup": speed["speedup"],
        "speedup_ci95": speed["speedup_ci95"],
        "decode_speedup": acceptance["acceptance_length"] / costs.cycle,
        "cycle_in_steps": costs.cycle,
        "plain_ms": costs.plain_ms,
        "draft_ms": costs.draft * costs.plain_ms,
        "verify_ms": costs.verify * costs.plain_ms,
        "rest_ms": costs.rest * costs.plain_ms,
        "verify_share": costs.verify / costs.cycle,
        "tokens_per_second": tokens_per_second(part.wholes),
        "same_text": f"{same['identical']}/{same['prompts']}" if same and "identical" in same else None,
    }


@dataclass
class Costs:
    """What a cycle of a side took, prefill left out, in plain steps of the same prompt: interquartile means over the prompts. A
    median would do against a moment in which the machine did something else, but a virtual machine also has fast and slow
    minutes, and the median of a few prompts falls on one side or the other. plain_ms: one plain step.
    """

    draft: float
    verify: float
    rest: float
    plain_ms: float

    @property
    def cycle(self) -> float:
        """All of it; the τ that breaks even."""
        return self.draft + self.verify + self.rest

    @classmethod
    def of(cls, part: Part) -> "Costs":
        """Of a race."""
        pairs = [(plain.whole, said.whole) for plain, said in zip(part.plain.ours, part.said)]
        steps = [(seconds_per_cycle(plain), said) for plain, said in pairs if plain.emitted and said.emitted]
        if not steps:
            return cls(*[float("nan")] * 4)

        def share(phases: Sequence[str]) -> float:
            return middle([seconds_per_cycle(said, phases) / step for step, said in steps])

        plain_ms = 1000 * middle([step for step, _ in steps])
        return cls(share(["draft"]), share(["verify"]), share(["select", "commit", "other"]), plain_ms)


def middle(values: Sequence[float]) -> float:
    """The interquartile mean: of what is left without the lowest and the highest quarter."""
    left_out = len(values) // 4
    return statistics.fmean(sorted(values)[left_out : len(values) - left_out])


CYCLE = ("draft", "verify", "select", "commit", "other")


def seconds_per_cycle(run: Generation, phases: Sequence[str] = CYCLE) -> float:
    """Some phases of a run, per cycle; the capturing of passes, which counts as other, left out."""
    warm = run.warmup if "other" in phases else 0.0
    return (sum(run.phases[name] for name in phases) - warm) / len(run.emitted)

"""What target passes and drafts cost, here and for targets of other sizes: rows of a study, and what they say."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from headwright.configs import UserError
from headwright.data.generate import read_documents
from headwright.data.small_model import random_target
from headwright.data.vocab import DraftVocab
from headwright.eval.scene import Row, Scene
from headwright.eval.shape import Bench, medians_ms
from headwright.heads.base import make_head
from headwright.heads.draft_tree import TreeShape

FLAT = 1.25  # a target pass counts as flat while it costs no more than this many plain steps


def pass_rows(scene: Scene) -> list[Row]:
    """A target pass over growing numbers of tokens, behind a real prompt."""
    study = scene.run.study
    counts = sorted({1, *(count for count in study.passes if count <= 128)})

    def work() -> dict[str, float]:
        bench = Bench(scene.head, scene.target, scene.typical())
        found = medians_ms({count: bench.verify(count, pad=False) for count in counts}, 2 + study.rounds)
        return {str(count): value for count, value in found.items()}

    found = scene.kept.recall(f"passes {counts}", work)
    plain = found["1"]
    return [
        {
            "tokens": count,
            "ms": found[str(count)],
            "steps": found[str(count)] / plain,
            "ms_per_token": found[str(count)] / count,
        }
        for count in counts
    ]


def pass_says(rows: Sequence[Row]) -> str:
    """Where it stops being flat."""
    flat = [row["tokens"] for row in rows if row["steps"] <= FLAT]
    last = rows[-1]
    return (
        f"A pass over {flat[-1] if flat else 1} token{'s' if flat and flat[-1] > 1 else ''} still costs at most {FLAT:g} plain "
        f"steps; one over {last['tokens']} costs {last['steps']:.1f}."
    )


def size_rows(scene: Scene) -> list[Row]:
    """Targets of random weights: what drafting and verifying cost there, and the τ that would break even."""
    chain, tree = size_shapes(scene)
    return [
        scene.kept.recall(f"size {size} {chain.name} {tree.name}", partial(one_size, scene, size, chain, tree))
        for size in scene.run.study.sizes
    ]


def size_shapes(scene: Scene) -> tuple[TreeShape, TreeShape]:
    """A chain and a tree, as deep as the head can."""
    study = scene.run.study
    depth = min(study.depth, scene.head.deepest or study.depth)
    return TreeShape.chain(depth), scene.tree(min(4, depth), study.width, study.nodes)


def one_size(scene: Scene, size: str, chain: TreeShape, tree: TreeShape) -> Row:
    """One target, with a head of the run's kind made for it."""
    sizes = parse_size(size)
    study, device = scene.run.study, scene.target.device
    target = random_target(sizes, scene.target.dtype, str(device), scene.run.head.choose_taps)
    kept = min(target.spec.vocab_size, len(scene.head.vocab.ids_W))
    head = make_head(scene.run.head, target.spec, target.taps, DraftVocab(torch.arange(kept), target.spec.vocab_size))
    head.attach(target)
    head.initialise(target)
    head = head.to(device, target.dtype).eval()
    [document] = read_documents(target, [(list(range(1, 161)), [False] * 96 + [True] * 64)])
    bench = Bench(head, target, document)
    jobs: dict[str, Callable[[], object]] = {"plain": bench.verify(1)}
    for name, shape in (("chain", chain), ("tree", tree)):
        jobs[f"verify {name}"], jobs[f"draft {name}"] = bench.verify(shape.nodes + 1), bench.draft(shape)
    found = medians_ms(jobs, study.rounds)
    row: Row = {
        "size": size,
        "parameters": sum(p.numel() for p in target.model.parameters()),
        "plain_ms": found["plain"],
        "chain": chain.name,
        "tree": tree.name,
    }
    for name in ("chain", "tree"):
        row[f"draft_{name}_steps"] = found[f"draft {name}"] / found["plain"]
        row[f"verify_{name}_steps"] = found[f"verify {name}"] / found["plain"]
        row[f"break_even_{name}"] = row[f"draft_{name}_steps"] + row[f"verify_{name}_steps"]
    return row


def parse_size(size: str) -> tuple[int, ...]:
    """Hidden, layers, heads, key-value heads, MLP, vocabulary. Raises UserError."""
    parts = size.split("x")
    if len(parts) != 6 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"study.sizes: {size!r}: give HIDDENxLAYERSxHEADSxKV-HEADSxMLPxVOCABULARY")
    hidden, _, heads, groups, *_ = sizes = tuple(map(int, parts))
    if hidden % (2 * heads) or heads % groups:
        raise UserError(
            f"study.sizes: {size!r}: heads must share the width evenly, in even sizes, and groups the heads"
        )
    return sizes


def size_says(rows: Sequence[Row]) -> str:
    """The break-even τ of each."""
    return "; ".join(
        f"{row['parameters'] / 1e6:.0f} M parameters ({row['plain_ms']:.0f} ms a step): {row['chain']} pays from τ "
        f"{row['break_even_chain']:.2f}, {row['tree']} from {row['break_even_tree']:.2f}"
        for row in rows
    )

"""Sweeps of shapes, temperatures, batches, contexts and domains: rows of a study, and what they say."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from headwright.configs.console import say
from headwright.data.harvest import store_path
from headwright.eval.baselines import training_texts
from headwright.eval.decode import generate
from headwright.eval.entries import Part
from headwright.eval.prompts import HELD_OUT, Prompt, label, read_sets
from headwright.eval.scene import Row, Scene, numbers
from headwright.eval.settings import PLAIN, Settings
from headwright.heads.draft_tree import TreeShape, most_nodes

CHAINS_OF_BATCHES, TREE_OF_BATCHES = TreeShape.chain(3), TreeShape.dynamic(3, 2, 3)


# Shapes


def race_of(scene: Scene, shapes: Sequence[TreeShape], what: str) -> list[Row]:
    """Rows of the head in some shapes."""
    return [numbers(part) for part in scene.race([scene.side(shape) for shape in shapes], what=what)] if shapes else []


def depth_rows(scene: Scene) -> list[Row]:
    """Trees of one width and growing depth."""
    study = scene.run.study
    return race_of(scene, scene.trees(study.depths, study.width, study.nodes), "depth")


def depth_says(rows: Sequence[Row]) -> str:
    """Where τ and speed part."""
    first, last = rows[0], rows[-1]
    best, shares = max(rows, key=lambda row: row["speedup"]), [row["verify_share"] for row in rows]
    return (
        f"From depth {first['depth']} to {last['depth']} τ goes from {first['tau']:.2f} to {last['tau']:.2f}, the speed-up "
        f"from {first['speedup']:.2f}× to {last['speedup']:.2f}×; the best is {best['speedup']:.2f}× at depth {best['depth']}. "
        f"Verification takes {min(shares):.0%} to {max(shares):.0%} of a cycle."
    )


def width_rows(scene: Scene) -> list[Row]:
    """Trees of one depth, of growing width and number of nodes."""
    study = scene.run.study
    shapes = [
        scene.tree(study.depth, width, nodes)
        for width in study.widths
        for nodes in study.node_counts
        if study.depth <= nodes <= most_nodes(study.depth, width)
    ]
    return race_of(scene, [shape for shape in dict.fromkeys(shapes) if scene.fits(shape)], "width")


def width_says(rows: Sequence[Row]) -> str:
    """The best, and the largest."""
    best, largest = max(rows, key=lambda row: row["speedup"]), max(rows, key=lambda row: row["tau"])
    return (
        f"Fastest: {best['shape']}, {best['speedup']:.2f}× at τ {best['tau']:.2f}; longest: {largest['shape']}, τ "
        f"{largest['tau']:.2f} at {largest['speedup']:.2f}×."
    )


def chain_tree_rows(scene: Scene) -> list[Row]:
    """Chains and trees of equal depth; and what each has said after equally many target passes."""
    study = scene.run.study
    depths = list(dict.fromkeys(depth for depth in study.depths if depth > 1)) or [1]
    pairs = list(zip(scene.chains(depths), scene.trees(depths, study.width, study.nodes)))
    parts = scene.race([scene.side(shape) for pair in pairs for shape in pair], what="chain and tree") if pairs else []
    rows = [numbers(part) for part in parts]
    for place in range(0, len(parts), 2):
        chain, tree = equal_passes(parts[place], parts[place + 1])
        rows[place]["tokens_in_equal_passes"], rows[place + 1]["tokens_in_equal_passes"] = chain, tree
    return rows


def equal_passes(one: Part, other: Part) -> tuple[int, int]:
    """Tokens of both sides after as many target passes of each prompt as the shorter run had."""
    totals = [0, 0]
    for left, right in zip(one.wholes, other.wholes):
        passes = min(len(left.emitted), len(right.emitted))
        totals[0] += sum(left.emitted[:passes])
        totals[1] += sum(right.emitted[:passes])
    return totals[0], totals[1]


def chain_tree_says(rows: Sequence[Row]) -> str:
    """Depth by depth."""
    pairs = list(zip(rows[::2], rows[1::2]))
    return "; ".join(
        f"depth {chain['depth']}: τ {chain['tau']:.2f} as a chain, {tree['tau']:.2f} as a tree, "
        f"{chain['speedup']:.2f}× and {tree['speedup']:.2f}×"
        for chain, tree in pairs
    )


def temperature_rows(scene: Scene) -> list[Row]:
    """A chain and a tree, sampled."""
    study = scene.run.study
    shapes = [*scene.chains([study.depth]), *scene.trees([min(4, study.depth)], study.width, study.nodes)]
    sides = [scene.side(shape, temperature) for temperature in study.temperatures for shape in shapes]
    return [numbers(part) for part in scene.race(sides, what="temperature")]


def temperature_says(rows: Sequence[Row]) -> str:
    """τ against the temperature."""
    return "; ".join(
        f"{shape}: τ " + ", ".join(f"{r['tau']:.2f} at T={r['temperature']:g}" for r in rows if r["shape"] == shape)
        for shape in dict.fromkeys(row["shape"] for row in rows)
    )


# Batches


def batch_rows(scene: Scene) -> list[Row]:
    """Texts at the same time, with refill: new tokens per second of plain and drafted decoding."""
    study, rows = scene.run.study, []
    prompts = [prompt.ids for prompt in scene.prompts]
    while len(prompts) < max(study.batches):
        prompts += prompts
    prompts = prompts[: max(len(scene.prompts), max(study.batches))]
    sides = {"plain": PLAIN} | {
        shape.name: shape for shape in (CHAINS_OF_BATCHES, TREE_OF_BATCHES) if scene.fits(shape)
    }
    texts: list[list[int]] | None = None
    for number, batch in enumerate(study.batches):
        found = {}
        for name in turned(list(sides), number):
            work = partial(one_batch, scene, sides[name], prompts, batch)
            found[name] = scene.kept.recall(f"batch {batch} {name}, {len(prompts)} prompts", work)
        texts = texts or found["plain"]["texts"]
        rows += [batch_row(name, batch, found, texts) for name in sides]
    return rows


def turned(items: list[Any], by: int) -> list[Any]:
    """In an order that turns."""
    return items[by % len(items) :] + items[: by % len(items)]


def one_batch(scene: Scene, shape: TreeShape, prompts: list[list[int]], batch: int) -> Row:
    """All prompts, `batch` at a time."""
    drafter = None if shape == PLAIN else scene.head
    settings = Settings(shape, scene.run.study.max_new_tokens, batch=batch)
    generate(scene.target, drafter, prompts[:1], replace(settings, max_new_tokens=4))
    out = generate(scene.target, drafter, prompts, settings)
    emitted = sum(sum(text.emitted) for text in out.generations)
    cycles = sum(len(text.emitted) for text in out.generations)
    texts = [text.tokens for text in out.generations]
    speed = sum(map(len, texts)) / (out.seconds - out.warmup)
    return {"tokens_per_second": speed, "tau": emitted / max(cycles, 1), "passes": out.passes, "texts": texts}


def batch_row(name: str, batch: int, found: dict[str, Row], texts: list[list[int]]) -> Row:
    """Against plain decoding of the same batch size."""
    mine = found[name]
    same = sum(a == b for a, b in zip(mine["texts"], texts))
    return {
        "batch": batch,
        "shape": name,
        "tau": mine["tau"],
        "tokens_per_second": mine["tokens_per_second"],
        "speedup": mine["tokens_per_second"] / found["plain"]["tokens_per_second"],
        "same_text": f"{same}/{len(texts)}",
    }


def batch_says(rows: Sequence[Row]) -> str:
    """The gain at each size."""
    drafted = [row for row in rows if row["shape"] != "plain"]
    return "; ".join(
        f"batch {batch}: " + ", ".join(f"{r['shape']} {r['speedup']:.2f}×" for r in drafted if r["batch"] == batch)
        for batch in dict.fromkeys(row["batch"] for row in drafted)
    )


# Contexts


def context_rows(scene: Scene) -> list[Row]:
    """Held-out prompts behind as many training texts as make them so long."""
    study, rows = scene.run.study, []
    before = long_text(scene, max(study.contexts))
    for length in study.contexts:
        if length + study.max_new_tokens > scene.target.spec.max_positions or length > len(before):
            say(
                f"context {length}: left out: the target reads {scene.target.spec.max_positions}, the corpus has {len(before)}"
            )
            continue
        prompts = [lengthened(prompt, before, length) for prompt in scene.prompts[: study.context_prompts]]
        shapes = [*scene.chains([study.depth]), *scene.trees([min(4, study.depth)], study.width, study.nodes)]
        for part in scene.race([scene.side(shape) for shape in shapes], prompts, f"{length} tokens"):
            first = statistics.median(turn.moments[0] for spoken in part.plain.ours for turn in spoken.turns)
            rows.append({"context": length, "plain_ttft_ms": 1000 * first} | numbers(part))
    return rows


def long_text(scene: Scene, tokens: int) -> list[int]:
    """Real text of the same corpus, as the target reads it."""
    if (store_path(scene.run, "train") / "manifest.json").is_file():
        texts: Iterator[list[int]] = training_texts(scene.run)
    else:
        texts = (document.ids_T.tolist() for document in scene.reader)
    found: list[int] = []
    for ids in texts:
        found += ids
        if len(found) >= tokens:
            break
    return found


def lengthened(prompt: Prompt, before: Sequence[int], length: int) -> Prompt:
    """A prompt of `length` tokens, which ends as the given one."""
    more = max(0, length - len(prompt.ids))
    ids = [*before[len(before) - more :], *prompt.ids][-length:]
    return replace(prompt, ids=ids, place=f"{prompt.place}, {length} tokens")


def context_says(rows: Sequence[Row]) -> str:
    """τ and speed against the length."""
    return (
        "; ".join(
            f"{shape}: "
            + ", ".join(
                f"{r['context']} tokens τ {r['tau']:.2f}, {r['decode_speedup']:.2f}×"
                for r in rows
                if r["shape"] == shape
            )
            for shape in dict.fromkeys(row["shape"] for row in rows)
        )
        + " (after the prefill)"
    )


# Domains


def domain_rows(scene: Scene) -> list[Row]:
    """All sets of the run file, at a small and a large depth, by domain and language."""
    study = scene.run.study
    depths = sorted({2, max(depth for depth in study.depths if depth <= 7)} if min(study.depths) <= 7 else {2})
    prompts = read_sets(
        replace(scene.run, eval=replace(scene.run.eval, prompts=study.prompts)), scene.target, scene.reader
    )
    shapes = [*scene.chains(depths), *scene.trees(depths, study.width, study.nodes)]
    own = {label(wanted) for wanted in scene.run.eval.sets if wanted.set == HELD_OUT}
    groups = [(f"{prompt.domain} ({prompt.language})", prompt.set in own) for prompt in prompts]
    rows = []
    for part in scene.race([scene.side(shape) for shape in shapes], prompts, "domains"):
        for name, held_out in dict.fromkeys(groups):
            places = [place for place, group in enumerate(groups) if group == (name, held_out)]
            group = {"domain": name, "trained_on": "yes" if held_out else "no", "prompts": len(places)}
            row = group | numbers(part.chosen(places))
            rows.append(row | {"line": f"{name}, {row['kind']}"})
    return sorted(rows, key=lambda row: (row["shape"], row["trained_on"] == "no"))


def domain_says(rows: Sequence[Row]) -> str:
    """What leaving the domain costs."""
    parts = []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        mine = [row for row in rows if row["shape"] == shape]
        inside, outside = ([r for r in mine if r["trained_on"] == answer] for answer in ("yes", "no"))
        words = [f"{r['domain']} τ {r['tau']:.2f}, {r['speedup']:.2f}×" for r in [*inside, *outside]]
        parts.append(f"{shape}: " + "; ".join(words))
    only = all(row["trained_on"] == "yes" for row in rows)
    return ". ".join(parts) + (". Only the run's own domains: name others in eval.sets" if only else "")

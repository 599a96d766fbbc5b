"""The drafters that stand beside a head in a run's evaluation, made from the run's own texts."""

from collections.abc import Iterator, Sequence

from headwright.configs import RunConfig
from headwright.configs.console import say, table
from headwright.configs.schema import TargetConfig
from headwright.data.batch import DocumentFeatures
from headwright.data.harvest import store_path
from headwright.data.store import FeatureReader
from headwright.data.target import EarlyExit, Target
from headwright.eval.drafters import PromptLookup
from headwright.eval.lookahead import Lookahead
from headwright.eval.model_drafter import Exit, ModelDrafter, best_exit, early_exits, small_model
from headwright.eval.retrieval import Datastore, Retrieval
from headwright.eval.suffix import SuffixDrafter, read_corpus
from headwright.heads.base import Drafter
from headwright.heads.draft_tree import TreeShape

SUFFIX_TOKENS = 200_000  # of the training texts in a suffix automaton; it takes some hundred bytes a token
EXIT_DOCUMENTS, EXIT_CANDIDATES = 4, 8
USUAL_VERIFY = 1.5  # plain steps of a target pass over a few nodes, for choosing an exit before anything is timed

DRAFT_MODEL = "draft-model"  # its name in reports

Entry = tuple[str, Drafter, list[TreeShape]]


def others(run: RunConfig, target: Target, shapes: Sequence[TreeShape]) -> Iterator[Entry]:
    """Each of `eval.baselines` and the draft model, with the shape that it is measured in."""
    chain = next((shape for shape in shapes if shape.kind == "chain"), TreeShape.chain(shapes[0].depth))
    for name in run.eval.baselines:
        if name == "prompt-lookup":
            yield name, PromptLookup(), [chain]
        elif name == "suffix":
            yield name, SuffixDrafter(read_corpus(training_texts(run, SUFFIX_TOKENS))), [chain]
        elif name == "retrieval":
            yield name, Retrieval(datastore(run)), [chain]
        elif name == "lookahead":
            drafter = Lookahead()
            yield name, drafter, [drafter.shape]
        elif name == "early-exit":
            yield chosen_exit(run, target, chain.depth)
    if run.eval.draft_model is not None:
        model = Target.load(TargetConfig(model=run.eval.draft_model), [0], target.device)
        yield DRAFT_MODEL, small_model(model, target), [chain]


def training_texts(run: RunConfig, tokens: int | None = None) -> Iterator[list[int]]:
    """Tokens of the training documents, up to a number."""
    reader = FeatureReader(store_path(run, "train"))
    read = 0
    for number in range(len(reader)):
        ids: list[int] = reader[number].ids_T.tolist()
        read += len(ids)
        if tokens is not None and read > tokens:
            return
        yield ids


def datastore(run: RunConfig) -> Datastore:
    """The run's datastore, made once."""
    path = run.directory / "datastore.safetensors"
    source = store_path(run, "train") / "manifest.json"
    if not path.is_file() or (source.is_file() and path.stat().st_mtime < source.stat().st_mtime):
        Datastore.of(training_texts(run)).save(path)
    return Datastore.open(path)


def chosen_exit(run: RunConfig, target: Target, depth: int) -> Entry:
    """Self-speculation, with the exit that is predicted to pay most on held-out texts."""
    reader = FeatureReader(store_path(run, "held-out"))
    documents = [reader[number] for number in range(min(EXIT_DOCUMENTS, len(reader)))]
    layers = target.spec.num_layers
    candidates = sorted({max(1, layers * part // (EXIT_CANDIDATES + 1)) for part in range(1, EXIT_CANDIDATES + 1)})
    exits = early_exits(target, [rows_of(document) for document in documents], candidates)
    best, chain, predicted = best_exit(exits, layers, range(1, depth + 1), USUAL_VERIFY)
    show_exits(exits, layers)
    say(
        f"early exit after {best.layers} of {layers} layers in chains of {chain}: predicted speed-up {predicted:.2f}× "
        f"(a pass over several tokens counted as {USUAL_VERIFY:g} plain steps)"
    )
    return (
        f"early-exit-{best.layers}",
        ModelDrafter(EarlyExit(target, best.layers), target.spec.vocab_size),
        [TreeShape.chain(chain)],
    )


def rows_of(document: DocumentFeatures) -> tuple[list[int], list[int]]:
    """A document's tokens, and the rows whose next token is a learned one."""
    mask: list[bool] = document.mask_T.tolist()
    return document.ids_T.tolist(), [row - 1 for row, learned in enumerate(mask) if learned and row]


def show_exits(exits: Sequence[Exit], layers: int) -> None:
    """The confidence report."""
    rows = [
        (
            f"{found.layers} of {layers}",
            f"{found.agreement:.0%}",
            f"{found.confidence_right:.2f}",
            f"{found.confidence_wrong:.2f}",
        )
        for found in exits
    ]
    table("early exit", ("layers", "same choice as the whole target", "confidence if so", "if not"), rows)

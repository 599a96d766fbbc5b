"""What a run will take, by arithmetic on its config. Runnable: `headwright plan --config …`.

Token counts come from the corpus (hub data sets are downloaded for it), model shapes from the target's config.json. Time is
given for a stated FLOP rate; divide by your own device's.
"""

from dataclasses import dataclass
from typing import Any

import torch
import transformers

from headwright.configs import RunConfig, UserError, reason
from headwright.configs.command import run_stage
from headwright.configs.console import duration, say, size, table
from headwright.data.corpus import Corpus, read_corpus
from headwright.data.harvest import check_offline
from headwright.data.target import choose_dtype, choose_taps, locate

SECTIONS = ("corpus", "answers", "harvest", "vocab", "train")
ABOUT = "Disk, memory and time of a run, by arithmetic, before anything is spent."
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
CHARACTERS_PER_TOKEN = 4.0  # English prose and code; other languages have fewer
FLOPS = 1e11  # per second: two CPU cores, fp32, as measured; a GPU has 1e14 and more


@dataclass
class Estimate:
    """Counts that everything else follows from."""

    documents: int
    prompt_tokens: int
    response_tokens: int
    target_parameters: float
    head_parameters: float
    vocabulary: int
    hidden: int
    taps: int

    @property
    def tokens(self) -> int:
        """All tokens of the training documents."""
        return self.prompt_tokens + self.response_tokens


def estimate(run: RunConfig, corpus: Corpus, text: Any) -> Estimate:
    """Counts from the corpus and the target's config."""
    answers = [d for d in corpus.train for _ in range(d.samples if run.answers.by == "target" else 1)]
    prompts = sum(prompt_characters(d) for d in answers) / CHARACTERS_PER_TOKEN
    if run.answers.by == "target":
        responses = len(answers) * run.answers.max_new_tokens
    else:
        responses = round(sum(answer_characters(d) for d in answers) / CHARACTERS_PER_TOKEN)
    hidden, inner = text.hidden_size, text.intermediate_size
    heads = text.num_attention_heads
    width = (getattr(text, "head_dim", None) or hidden // heads) * heads
    keys = (getattr(text, "num_key_value_heads", None) or heads) / heads
    layer = hidden * width * (2 + 2 * keys) + 3 * hidden * inner
    taps = len(choose_taps(run.harvest.taps, text.num_hidden_layers, run.target.model))
    drafted = run.vocab.size or text.vocab_size
    return Estimate(
        len(answers),
        round(prompts) + 8 * len(answers),
        responses,
        text.num_hidden_layers * layer + text.vocab_size * hidden,
        layer + hidden * width * (1 + 2 * keys) + taps * hidden * hidden + drafted * hidden,
        text.vocab_size,
        hidden,
        taps,
    )


def prompt_characters(document: Any) -> int:
    """Length of what comes before the answer."""
    if document.text:
        return len(document.opening())
    return sum(len(turn["content"]) for turn in document.prompt)


def answer_characters(document: Any) -> int:
    """Length of the corpus's own answers."""
    return len(document.text) or sum(len(t["content"]) for t in document.messages if t["role"] == "assistant")


def stages(run: RunConfig, e: Estimate) -> list[tuple[str, str, float]]:
    """(what, how it is counted, FLOPs) of the long stages."""
    steps = getattr(run.head, "steps", 1)
    harvest = 2 * e.target_parameters * e.tokens
    training = 6 * e.head_parameters * e.response_tokens * steps * run.train.epochs
    return [
        ("harvest", "2 · target parameters · tokens", harvest),
        (
            "train",
            f"6 · head parameters · response tokens · {steps} steps · {run.train.epochs:g} epochs",
            training,
        ),
    ]


def plan(run: RunConfig, dry_run: bool = False) -> None:
    """Print the plan."""
    if dry_run:
        check_offline(run)
        return
    corpus = read_corpus(run.corpus, run.seed)
    e = estimate(run, corpus, target_config(run))
    width = BYTES[run.harvest.dtype]
    store = e.tokens * (e.taps * e.hidden * width + 5) + e.response_tokens * (e.hidden * width + 8)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded = 4 if choose_dtype(run.target.dtype, device) == torch.float32 else 2
    memory = loaded * e.target_parameters + 16 * e.head_parameters
    table(
        f"plan of {run.name}",
        ("what", "estimate"),
        [
            ("training answers", e.documents),
            ("tokens (prompt + response)", f"{e.prompt_tokens} + {e.response_tokens}"),
            (
                "target, head parameters",
                f"{e.target_parameters / 1e6:.0f} M, {e.head_parameters / 1e6:.1f} M",
            ),
            ("disk: features", size(store)),
            ("disk: checkpoints and head", size(16 * e.head_parameters)),
            ("memory: weights, gradients, optimizer; activations come on top", size(memory)),
            *((f"time: {name} at 100 GFLOP/s", duration(flops / FLOPS)) for name, _, flops in stages(run, e)),
        ],
    )
    for name, formula, flops in stages(run, e):
        say(f"{name}: {formula} = {flops:.3g} FLOP; divide by your device's rate")
    say(f"τ to expect: {band(e.response_tokens)}")


def target_config(run: RunConfig) -> Any:
    """The target's text config, without its weights."""
    try:
        config = transformers.AutoConfig.from_pretrained(locate(run.target.model), revision=run.target.revision)
    except (OSError, ValueError) as error:
        raise UserError(f"target.model {run.target.model}: its config cannot be read: {reason(error)}") from None
    return config.get_text_config()


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

"""The decoder as a library: a Hugging Face model, a head's directory and a prompt in; text and statistics out.

from headwright.eval import Speculator

speculator = Speculator("path/to/model", "runs/my-head/head", shape="chain-5")
answer = speculator("Why is the sky blue?", max_new_tokens=200)
for piece in speculator.stream([{"role": "user", "content": "And at night?"}], temperature=0.7):
    print(piece.text, end="")
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headwright.configs import UserError
from headwright.configs.schema import TargetConfig
from headwright.data.sampling import Policy
from headwright.data.target import Target
from headwright.eval.decode import PLAIN, Decoder, Generation, Settings, generate
from headwright.eval.fallback import Fallback
from headwright.eval.text import Holder, Part, Printer, Stops
from headwright.heads.base import Drafter, DraftHead
from headwright.heads.draft_tree import TreeShape
from headwright.heads.foreign import is_foreign
from headwright.heads.lora import Adapters, fingerprint
from headwright.heads.saved import load_head, read_head, taps_of

USUAL_LAYERS = 32  # of a target that is not loaded yet
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


@dataclass
class Answer:
    """A finished text.

    text: without a stop string. finish: eos, stop, length or context. acceptance_length: τ, tokens per target pass,
    bonus included.
    lossless: whether text has the target's own distribution. details: counts of every cycle, seconds of every phase
    (of a batch of one).
    """

    text: str
    tokens: list[int]
    finish: str
    acceptance_length: float
    seconds: float
    lossless: bool
    details: Generation

    @property
    def tokens_per_second(self) -> float:
        """New tokens over wall time, the prompt's pass included."""
        return len(self.tokens) / self.seconds


@dataclass
class Piece:
    """What one target pass added: text that is safe to show, in parts (text, whether it had been drafted); tokens, of
    which the first `accepted` had been drafted; τ so far. The last piece has `finish`.
    """

    parts: list[Part]
    tokens: list[int]
    accepted: int
    acceptance_length: float
    finish: str = ""

    @property
    def text(self) -> str:
        """The parts together."""
        return "".join(text for text, _ in self.parts)


class Speculator:
    """A target and a drafter, ready to decode.

    Args:
        target: a model's name or directory, a loaded (model, tokenizer), or a `Target`.
        head: the directory of a trained head (`runs/<name>/head`), or one that engines load (an export of ours or a head of
            others), a drafter, or None for plain decoding.
        shape: chain-K, tree-DEPTHxTOP_K-NODES, eagle-1, a JSON file of rank paths, or a `TreeShape`.
        device: default: the GPU, if there is one.
        adapters: directories of low-rank adapters of the head (`runs/<name>/adapter`), by names of your own; `use` switches.
    """

    def __init__(
        self,
        target: Any,
        head: str | Path | Drafter | None = None,
        shape: str | TreeShape = "chain-5",
        device: str | None = None,
        adapters: Mapping[str, str | Path] | None = None,
    ):
        folder = Path(head) if isinstance(head, str | Path) else None
        if folder is not None and not (folder / "head.json").is_file() and (folder / "head" / "head.json").is_file():
            folder = folder / "head"  # a run's directory
        self.target = open_target(target, folder, head if isinstance(head, DraftHead) else None, device)
        self.drafter: Drafter | None
        if folder is not None:
            self.drafter = load_head(folder, self.target).eval()
        else:
            self.drafter = head  # type: ignore[assignment]
        self.adapters: Adapters | None = None
        if adapters:
            if folder is None or is_foreign(folder) or not isinstance(self.drafter, DraftHead):
                raise UserError("adapters belong to a trained head: give its directory as head")
            base = fingerprint(read_head(folder).tensors)
            self.adapters = Adapters(self.drafter, base, {name: Path(place) for name, place in adapters.items()})
        chosen = TreeShape.parse(shape) if isinstance(shape, str) else shape
        self.shape = PLAIN if self.drafter is None else chosen

    def use(self, adapter: str = "") -> None:
        """Draft with one of the adapters from now on; "": with the head as it is."""
        if self.adapters is None:
            raise UserError("this Speculator has no adapters: Speculator(…, adapters={name: directory})")
        self.adapters.use(adapter)

    def __call__(self, prompt: Prompt, **sampling: Any) -> Answer:
        """Continue one prompt. Options: see `settings`."""
        return self.generate([prompt], **sampling)[0]

    def generate(self, prompts: Sequence[Prompt], seed: int = 0, batch: int = 1, **sampling: Any) -> list[Answer]:
        """Continue prompts, `batch` at a time; those that end make room for the next."""
        settings = self.settings(batch=batch, **sampling)
        ids = [self.ids(prompt) for prompt in prompts]
        seeds = range(seed, seed + len(ids))
        outcome = generate(self.target, self.drafter, ids, settings, seeds)
        if len(ids) == 1:
            outcome.generations[0].phases = outcome.phases
        return [self.answer(generation, settings) for generation in outcome.generations]

    def stream(self, prompt: Prompt, seed: int = 0, **sampling: Any) -> Iterator[Piece]:
        """Continue a prompt, one target pass at a time."""
        settings = self.settings(**sampling)
        decoder = Decoder(self.target, self.drafter, [self.ids(prompt)], settings, [seed])
        printer, holder = Printer(self.target.tokenizer), Holder(settings.stop)
        for [news] in decoder.cycles():
            finish = decoder.texts[0].finish
            spoken = news.tokens[:-1] if finish == "eos" else news.tokens
            parts = [(printer.push(spoken[: news.accepted]), True), (printer.push(spoken[news.accepted :]), False)]
            if finish:
                parts.append((printer.held(), False))
                parts = holder.end(parts, decoder.stops if finish == "stop" else None)
            else:
                parts = holder.push(parts)
            yield Piece(parts, news.tokens, news.accepted, decoder.texts[0].acceptance_length, finish)

    def settings(
        self,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        verification: str = "auto",
        break_even: float | None = None,
        batch: int = 1,
    ) -> Settings:
        """How to decode. temperature 0 is greedy. break_even: rest from drafting while τ is below it (`headwright tune`)."""
        policy = Policy(temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        fallback = None if break_even is None else Fallback(break_even)
        return Settings(
            self.shape,
            max_new_tokens,
            policy,
            stops,
            ignore_eos,
            verification,
            fallback=fallback,
            batch=batch,
        )

    def ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: a string is text to continue; messages go through the chat template; ids stay."""
        tokenizer = self.target.tokenizer
        if isinstance(prompt, str):
            return list(tokenizer(prompt)["input_ids"])
        parts = list(prompt)
        if parts and isinstance(parts[0], Mapping):
            if not getattr(tokenizer, "chat_template", None):
                raise UserError(f"{self.target.spec.name} has no chat template: give text or token ids")
            rendered = tokenizer.apply_chat_template(parts, add_generation_prompt=True, tokenize=False)
            return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])
        return [int(token) for token in parts]  # type: ignore[call-overload]

    def answer(self, generation: Generation, settings: Settings) -> Answer:
        """A generation as text."""
        tokenizer, tokens = self.target.tokenizer, generation.tokens
        spoken = tokens[:-1] if generation.finish == "eos" else tokens
        text = tokenizer.decode(spoken)
        if generation.finish == "stop":
            text = Stops(tokenizer, settings.stop).cut(text)
        tau, seconds = generation.acceptance_length, generation.seconds
        return Answer(text, tokens, generation.finish, tau, seconds, settings.lossless, generation)


def open_target(target: Any, folder: Path | None, head: DraftHead | None, device: str | None) -> Target:
    """The target with the taps that the head was trained on."""
    if isinstance(target, Target):
        return target
    taps: Any = [0] if head is None else list(head.taps)
    if folder is not None:
        taps_of(folder, USUAL_LAYERS)  # a head that cannot be read is told before a model is loaded
        taps = partial(taps_of, folder)
    if isinstance(target, tuple):
        model, tokenizer = target
        return Target(model, tokenizer, model.name_or_path or type(model).__name__, taps)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return Target.load(TargetConfig(model=str(target)), taps, device)


def speculate(
    target: Any, head: str | Path | Drafter | None, prompt: Prompt, shape: str | TreeShape = "chain-5", **sampling: Any
) -> Answer:
    """Continue one prompt. For several, keep a `Speculator`: this loads model and head each time they are given by name."""
    return Speculator(target, head, shape)(prompt, **sampling)


def stream(
    target: Any, head: str | Path | Drafter | None, prompt: Prompt, shape: str | TreeShape = "chain-5", **sampling: Any
) -> Iterator[Piece]:
    """Continue one prompt, one target pass at a time."""
    return Speculator(target, head, shape).stream(prompt, **sampling)

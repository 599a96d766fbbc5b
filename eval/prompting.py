"""What a head loses where prompts look otherwise than in its training: another system prompt, thinking switched, no template.

The same questions in each way, so that differences of τ are paired over prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headwright.configs import UserError
from headwright.configs.console import say
from headwright.configs.schema import TemplateConfig
from headwright.data.chat import Renderer
from headwright.data.corpus import Document, read_corpus
from headwright.eval.metrics import acceptance_length, bootstrap
from headwright.eval.prompts import Prompt
from headwright.eval.scene import Row, Scene, numbers
from headwright.eval.settings import Generation

TRAINED = "as trained"
THINKING = "enable_thinking"  # the argument of Qwen's and others' templates


@dataclass
class Way:
    """One way of asking. system: in place of the chat's own, "" for an empty one; arguments: of the template; raw: none."""

    name: str
    system: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    file: str | None = None
    raw: bool = False
    bare: bool = False  # without the chat's system prompt
    asked: bool = False  # by the user: where it cannot be, that is an error

    def ids(self, document: Document, renderer: Renderer) -> list[int]:
        """The prompt of a chat, asked so. Raises ValueError where the template refuses it."""
        turns = document.prompt
        if self.raw:
            text = "\n\n".join(turn["content"] for turn in turns if turn["role"] == "user")
            ids: list[int] = renderer.tokenizer(text)["input_ids"]
            return ids
        if self.system is not None or self.bare:
            turns = [turn for turn in turns if turn["role"] not in ("system", "developer")]
        if self.system is not None:
            turns = [{"role": "system", "content": self.system}, *turns]
        return self.renderer(renderer).prompt_ids(turns, document.tools)

    def renderer(self, trained: Renderer) -> Renderer:
        """The template of this way."""
        options = trained.options | self.arguments
        if self.file is None:
            return replace(trained, options=options)
        try:
            text = Path(self.file).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"study.templates: {self.file}: {error}") from None
        return replace(trained, options=options | {"chat_template": text})


def ways(asked: Sequence[TemplateConfig], renderer: Renderer) -> list[Way]:
    """As trained, and what is asked for; without that, what servers usually do otherwise."""
    if asked:
        return [Way(TRAINED), *(Way(way.name, way.system, way.template, way.file, asked=True) for way in asked)]
    found = [
        Way(TRAINED),
        Way("without the chats' system prompt", bare=True),
        Way("another system prompt", system="You are a careful assistant. Answer briefly."),
        Way("an empty system prompt", system=""),
        Way("no template", raw=True),
    ]
    if THINKING in str(getattr(renderer.tokenizer, "chat_template", "")):
        now = renderer.options.get(THINKING, True)
        found.insert(1, Way(f"thinking {'off' if now else 'on'}", arguments={THINKING: not now}))
    return found


def template_rows(scene: Scene) -> list[Row]:
    """The head on the same questions, asked in each way."""
    pairs, renderer = chats_of(scene), scene.room.renderer
    shape = scene.chains([scene.run.study.depth])[0]
    rows: list[Row] = []
    trained: list[Generation] = []
    for way in ways(scene.run.study.templates, renderer):
        prompts = asked_so(way, pairs, renderer)
        if prompts is None:
            continue
        [part] = scene.race([scene.side(shape)], prompts, way.name)
        trained = trained or part.wholes
        both = list(zip(trained, part.wholes))
        longer = {"prompt_tokens": round(sum(len(prompt.ids) for prompt in prompts) / len(prompts))}
        gain = {"tau_gain": gain_of(both), "tau_gain_ci95": bootstrap(both, gain_of, scene.run.seed)}
        rows.append({"way": way.name} | longer | numbers(part) | gain)
    return rows


def chats_of(scene: Scene) -> list[tuple[Prompt, Document]]:
    """The scene's prompts that open a chat, with the chat. Raises UserError where there are none."""
    corpus = read_corpus(scene.run.corpus, scene.run.seed, scene.run.directory)
    found = {document.place: document for document in corpus.held_out if document.messages}
    pairs = [(prompt, found[prompt.place]) for prompt in scene.prompts if prompt.place in found]
    if not pairs:
        raise UserError("study template: no held-out prompt is a chat: plain text has no template")
    return pairs


def asked_so(way: Way, pairs: Sequence[tuple[Prompt, Document]], renderer: Renderer) -> list[Prompt] | None:
    """The prompts in a way; None where it changes nothing (a template that takes no notice of an argument)."""
    try:
        made = [replace(prompt, ids=way.ids(document, renderer)) for prompt, document in pairs]
    except ValueError as error:
        if way.asked or way.name == TRAINED:
            raise UserError(f"study template, {way.name}: {error}") from None
        say(f"left out: {way.name}: {error}")
        return None
    same = all(now.ids == prompt.ids for now, (prompt, _) in zip(made, pairs))
    return None if same and way.name != TRAINED else made


def gain_of(pairs: Sequence[tuple[Generation, Generation]]) -> float:
    """τ in a way less τ as trained."""
    before, now = (acceptance_length([pair[side] for pair in pairs]) for side in (0, 1))
    return now - before


def template_says(rows: Sequence[Row]) -> str:
    """What each other way costs."""
    first, *others = rows
    said = []
    for row in others:
        low, high = row["tau_gain_ci95"]
        said.append(f"{row['way']} {row['tau']:.2f} ({row['tau_gain']:+.2f} [{low:+.2f}, {high:+.2f}])")
    return f"τ {first['tau']:.2f} {TRAINED}; " + ("; ".join(said) if said else "no other way changes the prompts")

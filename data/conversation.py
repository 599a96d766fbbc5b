"""Chats answered turn by turn: after each answer the next user turn of the corpus is asked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from headwright.configs import RunConfig
from headwright.data.batch import DocumentFeatures
from headwright.data.chat import Renderer
from headwright.data.corpus import Document, encode_prompt
from headwright.data.generate import Question, answer
from headwright.data.jobs import policy_of, seed_of
from headwright.data.sampling import Policy
from headwright.data.target import Target


@dataclass
class Talk:
    """One document in the making.

    Where the template keeps earlier turns as they were, the whole chat becomes one document with several answers.
    Where it rewrites them (most cut earlier reasoning), each answer becomes a document of its own, with the context that
    the target really saw.
    """

    document: Document
    renderer: Renderer
    policy: Policy
    seed: int
    longest: int
    max_new_tokens: int
    turns: int | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    documents: list[DocumentFeatures] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.question = Question(encode_prompt(self.document, self.renderer), self.policy, self.seed)
        rounds = self.document.rounds[: self.turns]
        self.messages, self.waiting = list(rounds[0]) if rounds else [], rounds[1:]

    def take(self, said: DocumentFeatures, ends: Sequence[int]) -> bool:
        """Note an answer and its features. True when another turn is to be asked."""
        following = self.answered(said.ids_T[len(self.question.ids) :].tolist(), ends)
        if following is None:
            self.documents.append(said)
            return False
        known = said.ids_T.tolist()
        mask = None
        if following[: len(known)] == known:
            mask = said.mask_T.tolist() + [False] * (len(following) - len(known))
        else:
            self.documents.append(said)
        self.question = Question(following, self.policy, self.question.seed + 1, mask)
        return True

    def answered(self, new: list[int], ends: Sequence[int]) -> list[int] | None:
        """Note an answer's text. The next turn's prompt, where there is one."""
        text = self.renderer.tokenizer.decode(new[:-1] if new and new[-1] in ends else new)
        self.messages.append({"role": "assistant", "content": text})
        return self.next_prompt() if new and new[-1] in ends else None

    def next_prompt(self) -> list[int] | None:
        """The prompt of the next turn, or None when there is none, or none that fits or that the template takes."""
        if not self.waiting:
            return None
        turns = [*self.messages, *self.waiting[0]]
        try:
            ids = self.renderer.prompt_ids(turns, self.document.tools)
        except ValueError:
            return None
        if len(ids) + self.max_new_tokens > self.longest:
            return None
        self.messages, self.waiting = turns, self.waiting[1:]
        return ids


def begin(run: RunConfig, target: Target, renderer: Renderer, document: Document, sample: int) -> Talk:
    """A talk as the run file wants it. Raises ValueError where the document has no prompt."""
    return Talk(
        document,
        renderer,
        policy_of(run, sample),
        seed_of(run, document.key, sample),
        min(run.corpus.max_length, target.spec.max_positions),
        run.answers.max_new_tokens,
        run.answers.turns,
    )


Reply = Callable[[Sequence[Question], int], list[list[int]]]  # (questions, longest answer) → the answers' tokens


def converse(target: Target, talks: Sequence[Talk], max_new_tokens: int, store: torch.dtype = torch.float32) -> None:
    """Let the target give every answer of every talk. An answer that was cut off ends its talk."""
    live = list(talks)
    while live:
        said = answer(target, [talk.question for talk in live], max_new_tokens, store)
        live = [talk for talk, document in zip(live, said) if talk.take(document, target.spec.eos_token_ids)]


def converse_by(reply: Reply, talks: Sequence[Talk], max_new_tokens: int, ends: Sequence[int]) -> None:
    """The same with answers that come from elsewhere, as text only."""
    live = list(talks)
    while live:
        said = reply([talk.question for talk in live], max_new_tokens)
        going = []
        for talk, new in zip(live, said):
            following = talk.answered(new, ends)
            if following is not None:
                talk.question = Question(following, talk.policy, talk.question.seed + 1)
                going.append(talk)
        live = going

"""Chats → token ids and the mask of what the head learns, by the tokenizer's own chat template.

No regular expressions and no knowledge of any template. Where a template marks the assistant's words itself
(`{% generation %}`), its marks are used; elsewhere each part of a turn is replaced by a probe in the whole chat, and
what the template writes before and after the probe says where the part lies. T tokens of one document.
"""

import bisect
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2

from headwright.configs import UserError
from headwright.configs.schema import LearnConfig

PROBE = "\ue000"  # private use: no text holds it
Span = tuple[int, int]  # characters [start, end) of the rendered chat


@dataclass
class Encoded:
    """Token ids of a document, and which of them the head learns to predict."""

    ids: list[int]
    mask: list[bool]


@dataclass(frozen=True)
class Renderer:
    """A tokenizer with its chat template, and how it is to be used."""

    tokenizer: Any
    learn: LearnConfig = field(default_factory=LearnConfig)
    options: dict[str, Any] = field(default_factory=dict)

    def text(self, messages: Sequence[dict[str, Any]], tools: Any = None, prompt: bool = False) -> str:
        """The template's text; with `prompt` up to where the assistant speaks. Raises ValueError when it refuses."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise UserError("the target's tokenizer has no chat template: use plain text sources, or an instruct model")
        turns = [for_template(turn) for turn in messages]
        try:
            return clean(
                self.tokenizer.apply_chat_template(
                    turns, tools=tools, tokenize=False, add_generation_prompt=prompt, **self.options
                )
            )
        except (jinja2.TemplateError, TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"the chat template refuses the chat: {error}") from None

    def prompt_ids(self, messages: Sequence[dict[str, Any]], tools: Any = None) -> list[int]:
        """The ids after which the assistant speaks. The template writes its special tokens itself."""
        return self.tokenizer(self.text(messages, tools, prompt=True), add_special_tokens=False)["input_ids"]

    def encode(self, messages: Sequence[dict[str, Any]], tools: Any = None) -> Encoded:
        """A whole chat. The mask covers what the assistant said and the token that ends it.

        Raises ValueError when there is nothing to learn, or when the template changes the text so that a part's place
        in the whole is not known.
        """
        whole = self.text(messages, tools)
        if not self.tokenizer.is_fast:
            raise UserError("the target's tokenizer gives no token offsets (not a fast one): use answers.by: target")
        encoded = self.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = encoded["input_ids"], tight(encoded["offset_mapping"], whole)
        mask = self.marked(messages, tools, ids, offsets, whole)
        if mask is None:
            mask = self.probed(messages, tools, ids, offsets, whole)
        if self.learn.last_turn:
            mask = last_run(mask)
        if not any(mask):
            raise ValueError("no assistant turn with content to learn")
        return Encoded(ids, mask)

    def probed(
        self, messages: Sequence[dict[str, Any]], tools: Any, ids: list[int], offsets: list[Span], whole: str
    ) -> list[bool]:
        """The mask by probes, checked: the masked tokens decode to exactly the assistant's words."""
        special = set(self.tokenizer.all_special_ids)
        spans = [span for index in turns_of(messages) for span in self.turn_spans(messages, index, tools, whole)]
        mask = cover(offsets, spans)
        said = self.tokenizer.decode([token for token, on in zip(ids, mask) if on and token not in special])
        if squeeze(said) != squeeze("".join(whole[start:end] for start, end in spans)):
            raise ValueError("the masked tokens do not decode to the assistant's text")
        return add_turn_ends(ids, mask, offsets, spans, special, whole)

    def turn_spans(self, messages: Sequence[dict[str, Any]], index: int, tools: Any, whole: str) -> list[Span]:
        """Where the learned parts of turn `index` stand, joined by what the template writes between them."""
        thinking, content, calls = self.parts(messages, index, tools, whole)
        spans = [content] if content else []
        if thinking and self.learn.thinking:
            spans.insert(0, (self.opening(messages, index, tools, whole, thinking[0]), thinking[1]))
        if calls and self.learn.tool_calls:
            spans.append(calls)
        if len(spans) > 1:
            spans = [(spans[0][0], spans[-1][1])]
        return spans

    def parts(
        self, messages: Sequence[dict[str, Any]], index: int, tools: Any, whole: str
    ) -> tuple[Span | None, Span | None, Span | None]:
        """Reasoning, content and tool calls of one turn."""
        turn = messages[index]
        words, thoughts = turn["content"].strip(), (turn.get("reasoning_content") or "").strip()
        content = thinking = calls = None
        if words:
            content = self.place(messages, index, {"content": PROBE}, tools, whole)
            if content is None:
                raise ValueError(f"turn {index}: the chat template leaves the answer out")
            check_same(words, whole[slice(*content)], index)
        if thoughts:
            thinking = self.place(messages, index, {"reasoning_content": PROBE}, tools, whole)
        if turn.get("tool_calls"):
            bare = {"content": turn["content"] + PROBE, "tool_calls": None}
            calls = self.place(messages, index, bare, tools, whole)
            if calls is None:
                raise ValueError(f"turn {index}: the chat template leaves the tool calls out")
        return thinking, content, calls

    def place(
        self, messages: Sequence[dict[str, Any]], index: int, change: dict[str, Any], tools: Any, whole: str
    ) -> Span | None:
        """What stands in the whole chat where the changed turn has its probe, without white space around it."""
        turns = [*messages[:index], {**messages[index], **change}, *messages[index + 1 :]]
        before, found, after = self.text(turns, tools).partition(PROBE)
        if not found:
            return None
        if not (whole.startswith(before) and whole.endswith(after) and len(before) + len(after) <= len(whole)):
            raise ValueError(
                f"turn {index}: the chat template rewrites the rest of the chat, so its place in the whole is not known"
            )
        inside = whole[len(before) : len(whole) - len(after)]
        start = len(before) + len(inside) - len(inside.lstrip())
        return start, start + len(inside.strip())

    def opening(self, messages: Sequence[dict[str, Any]], index: int, tools: Any, whole: str, start: int) -> int:
        """Where the assistant's own text begins before its reasoning: behind the generation prompt."""
        prompt = self.text(messages[:index], tools, prompt=True)
        return len(prompt) if whole.startswith(prompt) and len(prompt) <= start else start

    def marked(
        self, messages: Sequence[dict[str, Any]], tools: Any, ids: list[int], offsets: list[Span], whole: str
    ) -> list[bool] | None:
        """The mask by the template's own `{% generation %}` marks, or None where it has none.

        The generation prompt and the parts that are not to be learned are taken out.
        """
        if not re.search(r"\{%-?\s*generation\s*-?%\}", str(self.tokenizer.chat_template)):
            return None
        found = self.tokenizer.apply_chat_template(
            [for_template(turn) for turn in messages],
            tools=tools,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **self.options,
        )
        if list(found["input_ids"]) != ids:
            raise ValueError("the chat template tokenizes differently with and without its generation marks")
        unwanted = [span for index in turns_of(messages) for span in self.unlearned(messages, index, tools, whole)]
        left_out = cover(offsets, unwanted)
        return [bool(on) and not out for on, out in zip(found["assistant_masks"], left_out)]

    def unlearned(self, messages: Sequence[dict[str, Any]], index: int, tools: Any, whole: str) -> list[Span]:
        """The generation prompt before a turn, and the parts of it that are not wanted."""
        prompt, before = self.text(messages[:index], tools, prompt=True), self.text(messages[:index], tools)
        spans = [(len(before), len(prompt))] if whole.startswith(prompt) and prompt.startswith(before) else []
        if self.learn.thinking and self.learn.tool_calls:
            return spans
        thinking, content, calls = self.parts(messages, index, tools, whole)
        if thinking and not self.learn.thinking:
            following = content or calls
            spans.append((len(prompt), following[0] if following else thinking[1]))
        if calls and not self.learn.tool_calls:
            spans.append(calls)
        return spans


def for_template(turn: dict[str, Any]) -> dict[str, Any]:
    """A turn under all the names that templates know for its reasoning, without empty keys."""
    kept = {key: value for key, value in turn.items() if value is not None}
    thoughts = kept.get("reasoning_content")
    return kept | {"reasoning": thoughts, "thinking": thoughts} if thoughts else kept


def turns_of(messages: Sequence[dict[str, Any]]) -> list[int]:
    """The places of the assistant's turns."""
    return [index for index, turn in enumerate(messages) if turn["role"] == "assistant"]


def check_same(words: str, inside: str, index: int) -> None:
    """A template may move reasoning out of an answer; it may not change the rest."""
    one, two = squeeze(words), squeeze(inside)
    if not two or not (one.endswith(two) or two.endswith(one)):
        raise ValueError(f"turn {index}: the chat template changes the answer's text")


def squeeze(text: str) -> str:
    """Text without white space."""
    return "".join(text.split())


def tight(offsets: Sequence[Span], whole: str) -> list[Span]:
    """Offsets without the white space at a token's start, which belongs to the word (' Hello') whoever wrote it."""
    out = []
    for start, end in offsets:
        piece = whole[start:end]
        out.append((start + len(piece) - len(piece.lstrip()), end) if piece.strip() else (start, end))
    return out


def cover(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Which tokens lie inside one of `spans`."""
    ordered = sorted(spans)
    starts = [start for start, _ in ordered]
    mask = []
    for left, right in offsets:
        place = bisect.bisect_right(starts, left) - 1
        mask.append(place >= 0 and right > left and right <= ordered[place][1])
    return mask


def add_turn_ends(
    ids: Sequence[int],
    mask: Sequence[bool],
    offsets: Sequence[Span],
    spans: Sequence[Span],
    special: set[int],
    whole: str,
) -> list[bool]:
    """Add to each answer the special token that ends it: the target must say that one, too."""
    mask = list(mask)
    lefts = [left for left, _ in offsets]
    for start, end in spans:
        after = bisect.bisect_left(lefts, end)
        if after <= bisect.bisect_left(lefts, start):
            raise ValueError("the masked tokens do not decode to the assistant's text")
        while after < len(ids) and ids[after] not in special and not whole[slice(*offsets[after])].strip():
            after += 1  # white space that the template keeps between the answer and its end
        if after < len(ids) and ids[after] in special:
            mask[after] = True
    return mask


def last_run(mask: Sequence[bool]) -> list[bool]:
    """Only the last unbroken run of a mask."""
    end = max((index for index, on in enumerate(mask) if on), default=-1)
    start = end
    while start > 0 and mask[start - 1]:
        start -= 1
    return [on and start <= index <= end for index, on in enumerate(mask)]


def clean(text: str) -> str:
    """The text itself. Raises ValueError (as UnicodeEncodeError) where it cannot be encoded: lone surrogates."""
    text.encode("utf-8")
    return text

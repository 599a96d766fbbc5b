"""Chats → token ids and the mask of what the head learns, by the tokenizer's own chat template.

No regular expressions and no knowledge of any template. Where a template marks the assistant's words itself
(`{% generation %}`), its marks are used; elsewhere each part of a turn is replaced by a probe in the whole chat, and
what the template writes before and after the probe says where the part lies. T tokens of one document.
"""

import bisect
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jinja2

from headwright.configs import UserError
from headwright.configs.schema import LearnConfig

PROBE = "\ue000"  # private use: no text holds it
Span = tuple[int, int]  # characters [start, end) of the rendered chat
Parts = tuple[Span | None, Span | None, Span | None]  # reasoning, content, tool calls


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
        except (jinja2.TemplateError, TypeError, AttributeError, LookupError, RecursionError) as error:
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
        marks = self.marks(messages, tools, ids)
        try:
            mask = self.probed(messages, tools, ids, offsets, whole)
        except ValueError:
            if marks is None or not (self.learn.thinking and self.learn.tool_calls):
                raise
            mask = self.without_prompts(marks, messages, tools, offsets, whole)
        else:
            mask = mask if marks is None else agreed(mask, marks, blank_or_special(ids, offsets, whole, self.special))
        if self.learn.last_turn:
            mask = last_run(mask)
        if not any(mask):
            raise ValueError("no assistant turn with content to learn")
        return Encoded(ids, mask)

    @cached_property
    def special(self) -> set[int]:
        """Ids of the tokens that no text spells."""
        return special_ids(self.tokenizer)

    def probed(
        self, messages: Sequence[dict[str, Any]], tools: Any, ids: list[int], offsets: list[Span], whole: str
    ) -> list[bool]:
        """The mask by probes, checked: the masked tokens decode to exactly the assistant's words."""
        found = [self.parts(messages, index, tools, whole) for index in turns_of(messages)]
        said = [span for thinking, content, _ in found for span in (thinking, content) if span]
        if any(on and token in self.special for token, on in zip(ids, cover(offsets, said))):
            raise ValueError("the assistant's text spells special tokens: it would end its turn, or begin another's")
        spans = [
            span
            for index, parts in zip(turns_of(messages), found)
            for span in self.turn_spans(messages, index, tools, whole, parts)
        ]
        mask = cover(offsets, spans)
        decoded = self.tokenizer.decode([token for token, on in zip(ids, mask) if on])
        if plain(decoded) != plain("".join(whole[start:end] for start, end in spans)):
            raise ValueError("the masked tokens do not decode to the assistant's text")
        return add_turn_ends(ids, mask, offsets, spans, self.special, whole)

    def turn_spans(
        self, messages: Sequence[dict[str, Any]], index: int, tools: Any, whole: str, parts: Parts
    ) -> list[Span]:
        """Where the learned parts of turn `index` stand, joined by what the template writes between them."""
        thinking, content, calls = parts
        spans = [content] if content else []
        if thinking and self.learn.thinking:
            spans.insert(0, (self.opening(messages, index, tools, whole, thinking[0]), thinking[1]))
        if calls and self.learn.tool_calls:
            spans.append(calls)
        if len(spans) > 1:
            spans = [(spans[0][0], spans[-1][1])]
        return spans

    def parts(self, messages: Sequence[dict[str, Any]], index: int, tools: Any, whole: str) -> Parts:
        """Reasoning, content and tool calls of one turn."""
        turn = messages[index]
        words, thoughts = turn["content"].strip(), (turn.get("reasoning_content") or "").strip()
        content = thinking = calls = None
        if words:
            content = self.content(messages, index, tools, whole)
            check_same(words, whole[slice(*content)], index)
        if thoughts:
            thinking = self.place(messages, index, {"reasoning_content": PROBE}, tools, whole)
        if turn.get("tool_calls"):
            bare = {"content": turn["content"] + PROBE, "tool_calls": None}
            calls = self.place(messages, index, bare, tools, whole)
            if calls is None:
                raise ValueError(f"turn {index}: the chat template leaves the tool calls out")
        return thinking, content, calls

    def content(self, messages: Sequence[dict[str, Any]], index: int, tools: Any, whole: str) -> Span:
        """Where an answer stands. A template may read reasoning out of it: then it begins behind the generation prompt."""
        try:
            found = self.place(messages, index, {"content": PROBE}, tools, whole)
        except ValueError:
            change = {"content": messages[index]["content"] + PROBE}
            end, prompt = self.place(messages, index, change, tools, whole), self.text(messages[:index], tools, True)
            if end is None or not self.learn.thinking or not whole.startswith(prompt) or len(prompt) > end[0]:
                raise
            inside = whole[len(prompt) : end[0]]
            start = len(prompt) + len(inside) - len(inside.lstrip())
            return start, start + len(inside.strip())
        if found is None:
            raise ValueError(f"turn {index}: the chat template leaves the answer out")
        return found

    def place(
        self, messages: Sequence[dict[str, Any]], index: int, change: dict[str, Any], tools: Any, whole: str
    ) -> Span | None:
        """What stands in the whole chat where the changed turn has its probe, without white space around it."""
        turns = [*messages[:index], {**messages[index], **change}, *messages[index + 1 :]]
        before, found, after = self.text(turns, tools).partition(PROBE)
        if not found:
            return None
        before = before if whole.startswith(before) else before.rstrip()
        after = after if whole.endswith(after) else after.lstrip()
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

    def marks(self, messages: Sequence[dict[str, Any]], tools: Any, ids: list[int]) -> list[bool] | None:
        """The mask by the template's own `{% generation %}` marks, or None where it has none."""
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
        return [bool(on) for on in found["assistant_masks"]]

    def without_prompts(
        self,
        marks: Sequence[bool],
        messages: Sequence[dict[str, Any]],
        tools: Any,
        offsets: list[Span],
        whole: str,
    ) -> list[bool]:
        """The marks alone, where probes find nothing; generation prompts are taken out."""
        spans = []
        for index in turns_of(messages):
            before, prompt = self.text(messages[:index], tools), self.text(messages[:index], tools, prompt=True)
            if whole.startswith(prompt) and prompt.startswith(before):
                spans.append((len(before), len(prompt)))
        return [on and not out for on, out in zip(marks, cover(offsets, spans))]


def agreed(mask: Sequence[bool], marks: Sequence[bool], tail: Sequence[bool]) -> list[bool]:
    """What both the probes and the template's marks say; the end of a turn that the marks leave out goes with it."""
    out: list[bool] = []
    for on, marked, ends in zip(mask, marks, tail):
        out.append(on and (marked or (ends and bool(out) and out[-1])))
    return out


def blank_or_special(ids: Sequence[int], offsets: Sequence[Span], whole: str, special: set[int]) -> list[bool]:
    """Tokens that may stand between an answer and the end of its turn."""
    return [token in special or not whole[start:end].strip() for token, (start, end) in zip(ids, offsets)]


def special_ids(tokenizer: Any) -> set[int]:
    """Ids of special tokens, also of those that are only marked so among the added tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(token for token, entry in added.items() if entry.special)}


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


def plain(text: str) -> str:
    """Text for comparison: tokenizers normalize what they read."""
    return squeeze(unicodedata.normalize("NFKC", text))


def squeeze(text: str) -> str:
    """Text without white space."""
    return "".join(text.split())


def tight(offsets: Sequence[Span], whole: str) -> list[Span]:
    """Offsets without white space at a token's ends, which goes with the word (' Hello', '.\\n') whoever wrote it."""
    out = []
    for start, end in offsets:
        piece = whole[start:end]
        left = start + len(piece) - len(piece.lstrip())
        out.append((left, left + len(piece.strip())) if piece.strip() else (start, end))
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
    """Add to each answer the special token that ends it, and white space before that: the target must say those, too."""
    mask = list(mask)
    lefts = [left for left, _ in offsets]
    for start, end in spans:
        after = bisect.bisect_left(lefts, end)
        if after <= bisect.bisect_left(lefts, start):
            raise ValueError("the masked tokens do not decode to the assistant's text")
        stop = after
        while stop < len(ids) and ids[stop] not in special and not whole[slice(*offsets[stop])].strip():
            stop += 1  # white space between the answer and its end
        if stop < len(ids) and ids[stop] in special:
            mask[after : stop + 1] = [True] * (stop + 1 - after)
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

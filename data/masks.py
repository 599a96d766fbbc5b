"""Which tokens of a rendered chat the assistant said. T tokens of one document.

No regular expressions over the text and no knowledge of any template. Each part of a turn is replaced by a probe in the
whole chat; what the template writes before and after the probe says where the part lies. Where a template marks the
assistant's words itself (`{% generation %}`), only what its marks cover is learned, and they stand alone where the probes
find nothing.
"""

import bisect
import re
import unicodedata
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

from headwright.configs import UserError
from headwright.configs.schema import LearnConfig

PRIVATE = range(0xE000, 0xF900)  # characters for private use: some are in no text, and serve as probes
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
Span = tuple[int, int]  # characters [start, end) of the rendered chat
Parts = tuple[Span | None, Span | None, Span | None]  # reasoning, content, tool calls


class Writer(Protocol):
    """What renders chats (chat.Renderer)."""

    tokenizer: Any
    learn: LearnConfig

    def text(self, messages: Sequence[dict[str, Any]], tools: Any = None, prompt: bool = False) -> str:
        """The template's text."""
        ...

    def marked_ids(self, messages: Sequence[dict[str, Any]], tools: Any) -> tuple[list[int], list[bool]]:
        """The template's ids, and its own marks."""
        ...


class Chat:
    """One chat as the template writes it, and where its parts are in that."""

    def __init__(self, writer: Writer, messages: Sequence[dict[str, Any]], tools: Any):
        self.writer, self.tokenizer, self.learn = writer, writer.tokenizer, writer.learn
        self.messages, self.tools = messages, tools
        self.whole = writer.text(messages, tools)
        if not self.tokenizer.is_fast:
            raise UserError("the target's tokenizer gives no token offsets (not a fast one): use answers.by: target")
        encoded = self.tokenizer(self.whole, add_special_tokens=False, return_offsets_mapping=True)
        self.ids: list[int] = encoded["input_ids"]
        self.offsets = tight(encoded["offset_mapping"], self.whole)
        said = "".join(turn["content"] + (turn.get("reasoning_content") or "") for turn in messages)
        self.probe = next(sign for sign in map(chr, PRIVATE) if sign not in self.whole and sign not in said)

    @cached_property
    def special(self) -> set[int]:
        """Ids of the tokens that no text spells."""
        return special_ids(self.tokenizer)

    def mask(self) -> list[bool]:
        """What the head learns: what the assistant said and the token that ends it.

        Raises ValueError when there is nothing to learn, or when the template changes the text so that a part's place
        in the whole is not known.
        """
        marks = self.marks()
        try:
            mask = self.probed()
        except ValueError:
            if marks is None or not (self.learn.thinking and self.learn.tool_calls):
                raise
            mask = self.without_prompts(marks)
        else:
            mask = mask if marks is None else agreed(mask, marks, [self.ends(place) for place in range(len(mask))])
        if self.learn.last_turn:
            mask = last_run(mask)
        if not any(mask):
            raise ValueError("no assistant turn with content to learn")
        return mask

    def probed(self) -> list[bool]:
        """The mask by probes, checked: the masked tokens decode to exactly the assistant's words."""
        turns = [index for index, turn in enumerate(self.messages) if turn["role"] == "assistant"]
        found = {index: self.parts(index) for index in turns}
        said = [span for thinking, content, _ in found.values() for span in (thinking, content) if span]
        if any(on and token in self.special for token, on in zip(self.ids, cover(self.offsets, said))):
            raise ValueError("the assistant's text spells special tokens: it would end its turn, or begin another's")
        spans = [span for index, parts in found.items() for span in self.learned(index, parts)]
        mask = cover(self.offsets, spans)
        decoded = self.tokenizer.decode([token for token, on in zip(self.ids, mask) if on])
        if plain(decoded) != plain("".join(self.whole[start:end] for start, end in spans)):
            raise ValueError("the masked tokens do not decode to the assistant's text")
        return self.with_ends(mask, spans)

    def learned(self, index: int, parts: Parts) -> list[Span]:
        """Where the learned parts of turn `index` stand, joined by what the template writes between them."""
        thinking, content, calls = parts
        spans = [content] if content else []
        if thinking and self.learn.thinking:
            spans.insert(0, (self.opening(index, thinking[0]), thinking[1]))
        if calls and self.learn.tool_calls:
            spans.append(calls)
        return [(spans[0][0], spans[-1][1])] if spans else []

    def parts(self, index: int) -> Parts:
        """Reasoning, content and tool calls of one turn."""
        turn = self.messages[index]
        words, thoughts = turn["content"].strip(), (turn.get("reasoning_content") or "").strip()
        content = thinking = calls = None
        if words:
            content = self.content(index)
            check_same(words, self.whole[slice(*content)], index)
        if thoughts:
            thinking = self.place(index, {"reasoning_content": self.probe})
        if turn.get("tool_calls"):
            calls = self.place(index, {"content": turn["content"] + self.probe, "tool_calls": None})
            if calls is None:
                raise ValueError(f"turn {index}: the chat template leaves the tool calls out")
        return thinking, content, calls

    def content(self, index: int) -> Span:
        """Where an answer stands. A template may read reasoning out of it: then it begins behind the generation prompt."""
        try:
            found = self.place(index, {"content": self.probe})
        except ValueError:
            end = self.place(index, {"content": self.messages[index]["content"] + self.probe})
            prompt = self.prompt(index)
            if end is None or not self.learn.thinking or not self.whole.startswith(prompt) or len(prompt) > end[0]:
                raise
            return trimmed(self.whole, len(prompt), end[0])
        if found is None:
            raise ValueError(f"turn {index}: the chat template leaves the answer out")
        return found

    def place(self, index: int, change: dict[str, Any]) -> Span | None:
        """What stands in the whole chat where the changed turn has its probe, without white space around it."""
        turns = [*self.messages[:index], {**self.messages[index], **change}, *self.messages[index + 1 :]]
        before, found, after = self.writer.text(turns, self.tools).partition(self.probe)
        if not found:
            return None
        whole = self.whole
        before = before if whole.startswith(before) else before.rstrip()
        after = after if whole.endswith(after) else after.lstrip()
        if not (whole.startswith(before) and whole.endswith(after) and len(before) + len(after) <= len(whole)):
            raise ValueError(
                f"turn {index}: the chat template rewrites the rest of the chat, so its place in the whole is not known"
            )
        return trimmed(whole, len(before), len(whole) - len(after))

    def prompt(self, index: int) -> str:
        """The text up to where the assistant takes turn `index`."""
        return self.writer.text(self.messages[:index], self.tools, prompt=True)

    def opening(self, index: int, start: int) -> int:
        """Where the assistant's own text begins before its reasoning: behind the generation prompt."""
        prompt = self.prompt(index)
        return len(prompt) if self.whole.startswith(prompt) and len(prompt) <= start else start

    def marks(self) -> list[bool] | None:
        """The mask by the template's own marks, or None where it has none."""
        if not MARKS.search(str(self.tokenizer.chat_template)):
            return None
        ids, marks = self.writer.marked_ids(self.messages, self.tools)
        if ids != self.ids:
            raise ValueError("the chat template tokenizes differently with and without its generation marks")
        return marks

    def without_prompts(self, marks: Sequence[bool]) -> list[bool]:
        """The marks alone; generation prompts are taken out."""
        spans = []
        for index, turn in enumerate(self.messages):
            if turn["role"] == "assistant":
                before, prompt = self.writer.text(self.messages[:index], self.tools), self.prompt(index)
                if self.whole.startswith(prompt) and prompt.startswith(before):
                    spans.append((len(before), len(prompt)))
        return [on and not out for on, out in zip(marks, cover(self.offsets, spans))]

    def ends(self, place: int) -> bool:
        """Whether a token may stand between an answer and the end of its turn."""
        return self.ids[place] in self.special or not self.whole[slice(*self.offsets[place])].strip()

    def with_ends(self, mask: Sequence[bool], spans: Sequence[Span]) -> list[bool]:
        """Add to each answer the special token that ends it, and white space before that: the target must say those, too."""
        mask = list(mask)
        lefts = [left for left, _ in self.offsets]
        for start, end in spans:
            after = stop = bisect.bisect_left(lefts, end)
            if after <= bisect.bisect_left(lefts, start):
                raise ValueError("the masked tokens do not decode to the assistant's text")
            while stop < len(mask) and self.ends(stop) and self.ids[stop] not in self.special:
                stop += 1
            if stop < len(mask) and self.ends(stop):
                mask[after : stop + 1] = [True] * (stop + 1 - after)
        return mask


def trimmed(text: str, start: int, end: int) -> Span:
    """The span without white space at its ends."""
    inside = text[start:end]
    left = start + len(inside) - len(inside.lstrip())
    return left, left + len(inside.strip())


def agreed(mask: Sequence[bool], marks: Sequence[bool], tail: Sequence[bool]) -> list[bool]:
    """What both the probes and the template's marks say; the end of a turn that the marks leave out goes with it."""
    out: list[bool] = []
    for on, marked, ends in zip(mask, marks, tail):
        out.append(on and (marked or (ends and bool(out) and out[-1])))
    return out


def special_ids(tokenizer: Any) -> set[int]:
    """Ids of special tokens, also of those that are only marked so among the added tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(token for token, entry in added.items() if entry.special)}


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
        out.append(trimmed(whole, start, end) if piece.strip() else (start, end))
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


def last_run(mask: Sequence[bool]) -> list[bool]:
    """Only the last unbroken run of a mask."""
    end = max((index for index, on in enumerate(mask) if on), default=-1)
    start = end
    while start > 0 and mask[start - 1]:
        start -= 1
    return [on and start <= index <= end for index, on in enumerate(mask)]

"""Tokens as text while they come: stop strings, and pieces of text that are safe to print."""

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"  # what a tokenizer shows for bytes that do not make a character yet


class Stops:
    """Stop strings, found in the text that tokens spell. A token that completes one is the text's last."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]):
        self.tokenizer, self.stops = tokenizer, tuple(stops)
        self.longest = max(map(len, stops))
        # nearly every token spells a byte at least; some tokenizers treat the first one of a text in a special way
        self.window = max(len(stop.encode()) for stop in stops) + 4

    def completed(self, tokens: Sequence[int]) -> bool:
        """Whether the last token completes a stop string."""
        count = self.window
        tail, before = self.tail(tokens, count)
        while len(before) < self.longest and count < len(tokens):  # tokens without text have used the window up
            count *= 2
            tail, before = self.tail(tokens, count)
        after = self.tokenizer.decode(tail)
        return any(after.count(stop) > before.count(stop) for stop in self.stops)

    def tail(self, tokens: Sequence[int], count: int) -> tuple[list[int], str]:
        """The last tokens, and the text of all of them but the last."""
        tail = list(tokens[-count:])
        return tail, self.tokenizer.decode(tail[:-1])

    def cut(self, text: str) -> str:
        """The text before the first stop string."""
        ends = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text


class Printer:
    """Turns a stream of tokens into pieces of text that together are the text of all tokens."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.start = self.shown = 0  # tokens before `start` are forgotten, before `shown` printed

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens add; what may still change is held back."""
        self.tokens += tokens
        piece = self.held()
        if piece.endswith(UNFINISHED):
            return ""
        self.start, self.shown = self.shown, len(self.tokens)
        return piece

    def held(self) -> str:
        """The text that has not been printed: at the end of a stream, its rest."""
        before = self.tokenizer.decode(self.tokens[self.start : self.shown])
        return self.tokenizer.decode(self.tokens[self.start :])[len(before) :]


Part = tuple[str, bool]  # text, and whether it had been drafted


class Holder:
    """Holds back the end of a stream while it may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]):
        self.kept: list[Part] = []
        self.hold = max((len(stop) - 1 for stop in stops), default=0)

    def push(self, parts: Sequence[Part]) -> list[Part]:
        """What is safe to show."""
        self.kept += [part for part in parts if part[0]]
        return self.release(max(0, sum(len(text) for text, _ in self.kept) - self.hold))

    def release(self, count: int) -> list[Part]:
        """The first characters."""
        out: list[Part] = []
        while count > 0:
            text, drafted = self.kept.pop(0)
            out.append((text[:count], drafted))
            if text[count:]:
                self.kept.insert(0, (text[count:], drafted))
            count -= len(text)
        return out

    def end(self, parts: Sequence[Part], stops: Stops | None) -> list[Part]:
        """The rest, before the stop string that ended the text, if one did."""
        self.kept += [part for part in parts if part[0]]
        whole = "".join(text for text, _ in self.kept)
        return self.release(len(whole if stops is None else stops.cut(whole)))

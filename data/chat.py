"""Chats → token ids and the mask of what the head learns, by the tokenizer's own chat template."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2

from headwright.configs import UserError
from headwright.configs.schema import LearnConfig
from headwright.data.masks import Chat


@dataclass
class Encoded:
    """Token ids of a document, and which of them the head learns to predict."""

    ids: list[int]
    mask: list[bool]


@dataclass
class Renderer:
    """A tokenizer with its chat template, and how it is to be used."""

    tokenizer: Any
    learn: LearnConfig = field(default_factory=LearnConfig)
    options: dict[str, Any] = field(default_factory=dict)

    def text(self, messages: Sequence[dict[str, Any]], tools: Any = None, prompt: bool = False) -> str:
        """The template's text; with `prompt` up to where the assistant speaks. Raises ValueError when it refuses."""
        return clean(self.apply(messages, tools, tokenize=False, add_generation_prompt=prompt))

    def marked_ids(self, messages: Sequence[dict[str, Any]], tools: Any) -> tuple[list[int], list[bool]]:
        """The template's ids, and what its own `{% generation %}` marks cover."""
        found = self.apply(messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return list(found["input_ids"]), [bool(on) for on in found["assistant_masks"]]

    def apply(self, messages: Sequence[dict[str, Any]], tools: Any, **options: Any) -> Any:
        """The template at work."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise UserError("the target's tokenizer has no chat template: use plain text sources, or an instruct model")
        turns = [for_template(turn) for turn in messages]
        try:
            return self.tokenizer.apply_chat_template(turns, tools=tools, **options, **self.options)
        except (jinja2.TemplateError, TypeError, AttributeError, LookupError, RecursionError) as error:
            raise ValueError(f"the chat template refuses the chat: {error}") from None

    def prompt_ids(self, messages: Sequence[dict[str, Any]], tools: Any = None) -> list[int]:
        """The ids after which the assistant speaks. The template writes its special tokens itself."""
        return self.tokenizer(self.text(messages, tools, prompt=True), add_special_tokens=False)["input_ids"]

    def encode(self, messages: Sequence[dict[str, Any]], tools: Any = None) -> Encoded:
        """A whole chat. Raises ValueError where there is nothing to learn, or its mask cannot be trusted."""
        chat = Chat(self, messages, tools)
        return Encoded(chat.ids, chat.mask())


def for_template(turn: dict[str, Any]) -> dict[str, Any]:
    """A turn under all the names that templates know for its reasoning, without empty keys."""
    kept = {key: value for key, value in turn.items() if value is not None}
    thoughts = kept.get("reasoning_content")
    return kept | {"reasoning": thoughts, "thinking": thoughts} if thoughts else kept


def clean(text: str) -> str:
    """The text itself. Raises ValueError (as UnicodeEncodeError) where it cannot be encoded: lone surrogates."""
    text.encode("utf-8")
    return text

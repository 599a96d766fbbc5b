"""What is known of the field's prompt sets: where they are, what a row looks like, how it is asked.

Every set is read in its own project's format. Forms of rows are recognised by their keys; what a set is asked in other words
than its rows hold (HumanEval, MBPP, CNN/DM) is said here, once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headwright.data.corpus import read_messages

Row = Mapping[str, Any]
Turns = list[dict[str, Any]]  # the user's turns, with a system turn before them where there is one
Wording = Callable[[Row], str]


@dataclass(frozen=True)
class Known:
    """A prompt set. hub: none where its authors publish files only. domain: none where rows name their category."""

    hub: str | None
    domain: str | None
    language: str | None
    config: str | None = None
    split: str = "test"
    wording: Wording | None = None


def complete_code(row: Row) -> str:
    """HumanEval's function to be completed, as an instruction."""
    return f"Complete the following Python function.\n\n```python\n{row['prompt'].rstrip()}\n```"


def pass_tests(row: Row) -> str:
    """MBPP: what to write, and the tests that it must pass. The sanitised version calls the text `prompt`."""
    return f"{row.get('text') or row['prompt']}\nYour code should pass these tests:\n\n" + "\n".join(row["test_list"])


def summarise(row: Row) -> str:
    """CNN/DailyMail's article."""
    return f"Summarize the following article.\n\n{row['article']}"


KNOWN = {
    "mt-bench": Known("HuggingFaceH4/mt_bench_prompts", "chat", "en", split="train"),
    "vicuna": Known(None, "chat", "en"),
    "humaneval": Known("openai/openai_humaneval", "code", "en", wording=complete_code),
    "mbpp": Known("google-research-datasets/mbpp", "code", "en", "full", wording=pass_tests),
    "gsm8k": Known("openai/gsm8k", "math", "en", "main"),
    "math-500": Known("HuggingFaceH4/MATH-500", "math", "en"),
    "alpaca": Known("tatsu-lab/alpaca", "instructions", "en", split="train"),
    "cnn-dm": Known("abisee/cnn_dailymail", "summarization", "en", "3.0.0", wording=summarise),
    "nq": Known("google-research-datasets/nq_open", "qa", "en", split="validation"),
    "spec-bench": Known(None, None, "en"),
    "speed-bench": Known("nvidia/SPEED-Bench", None, None, "qualitative"),
    "arena-hard": Known(None, "chat", "en"),
    "ru-arena-hard": Known("t-tech/ru-arena-hard", "chat", "ru", split="train"),
    "ru-mt-bench": Known("t-tech/ru-mt-bench", "chat", "ru", split="train"),
    "ru-alpaca": Known("t-tech/ru-alpaca-eval", "instructions", "ru", split="train"),
    "t-math": Known("t-tech/T-math", "math", "ru", split="train"),
    "ru-code-eval": Known("MERA-evaluation/ruCodeEval", "code", "ru"),
}


def user_turns(row: Any, known: Known | None = None, template: str | None = None) -> Turns:
    """The turns that a row asks, one after another. Raises ValueError with what is wrong."""
    if not isinstance(row, Mapping):
        raise ValueError("not a JSON object")
    if template is not None:
        return [asked(fill(template, row))]
    if known is not None and known.wording is not None and not isinstance(row.get("turns"), list):
        return [asked(worded(known.wording, row))]
    for form in FORMS:
        found = form(row)
        if found:
            return found
    raise ValueError(
        f"no turns, messages, prompt, question, instruction, problem, query or text among the keys {sorted(map(str, row))[:8]}"
    )


def asked(text: Any) -> dict[str, Any]:
    """A user's turn."""
    if not isinstance(text, str) or not text.strip():
        raise ValueError("a turn is empty or no text")
    text.encode("utf-8")  # a lone surrogate is a ValueError here, and not in the middle of a run
    return {"role": "user", "content": text}


def worded(wording: Wording, row: Row) -> str:
    """A set's own words around a row."""
    try:
        return wording(row)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a row of this set ({error!s}); its keys are {sorted(map(str, row))[:8]}") from None


def fill(template: str, row: Row) -> str:
    """The user's own words around a row."""
    try:
        return template.format_map(row)
    except KeyError as error:
        raise ValueError(f"template: no key {error} among {sorted(map(str, row))[:8]}") from None
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise ValueError(f"template: {error}") from None


def of_turns(row: Row) -> Turns:
    """FastChat's and Spec-Bench's question.jsonl (texts), Arena-Hard's (objects), the hub's MT-bench (a list called prompt)."""
    turns = row.get("turns") if isinstance(row.get("turns"), list) else row.get("prompt")
    if not isinstance(turns, list):
        return []
    return [asked(turn.get("content") if isinstance(turn, Mapping) else turn) for turn in turns]


def of_messages(row: Row) -> Turns:
    """Chats: what the assistant said in them is said anew."""
    if not row.get("messages") and not row.get("conversations"):
        return []
    said = [turn for turn in read_messages(dict(row)) if turn["role"] in ("system", "developer", "user")]
    said = [turn for turn in said if turn["role"] == "user" or turn["content"].strip()]
    return [asked(turn["content"]) | {"role": turn["role"]} for turn in said]


def of_instruction(row: Row) -> Turns:
    """Alpaca's (instruction, input), self-instruct's (instances) and MERA's, whose instruction has places for the inputs."""
    words = row.get("instruction")
    if not isinstance(words, str):
        return []
    if isinstance(row.get("inputs"), Mapping):
        return [asked(fill(words, row["inputs"]))]
    instances = row.get("instances")
    first = instances[0] if isinstance(instances, list) and instances and isinstance(instances[0], Mapping) else row
    more = first.get("input") or first.get("context")
    return [asked(f"{words}\n\n{more}" if isinstance(more, str) and more.strip() else words)]


def of_one(key: str) -> Callable[[Row], Turns]:
    """A single text under a key; Natural Questions has it in an object."""

    def form(row: Row) -> Turns:
        text = row.get(key)
        text = text.get("text") if isinstance(text, Mapping) else text
        return [] if text is None else [asked(text)]

    return form


FORMS = (of_turns, of_messages, of_instruction, *map(of_one, ("prompt", "question", "problem", "query", "text")))

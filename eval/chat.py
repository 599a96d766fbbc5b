"""Talk to a target through its head. Runnable: `headwright chat --head DIR`.

Accepted draft tokens are green, the target's own are plain; τ is shown while the answer comes.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from headwright.configs import UserError
from headwright.configs.command import clean_exit

if TYPE_CHECKING:
    from headwright.eval.api import Piece, Speculator

ABOUT = "Talk to a target through a head: accepted draft tokens in green, τ live."
DRAFTED, OWN, FAINT = "green", "", "dim"
HELP = "/new starts a new conversation, /plain switches drafting off and on, /quit (or Ctrl-D) ends."


@dataclass
class Shown:
    """An answer while it comes."""

    text: Text = field(default_factory=Text)
    said: str = ""  # what the target said to the letter: `Text` drops control characters
    tokens: int = 0
    drafted: int = 0
    tau: float = float("nan")
    begun: float = field(default_factory=time.perf_counter)

    def add(self, piece: "Piece") -> None:
        """One more piece."""
        for text, drafted in piece.parts:
            self.text.append(text, style=DRAFTED if drafted else OWN)
            self.said += text
        self.tokens += len(piece.tokens)
        self.drafted += piece.accepted
        self.tau = piece.acceptance_length

    def footer(self) -> str:
        """τ and speed so far."""
        seconds = time.perf_counter() - self.begun
        share = f"{self.drafted} of {self.tokens} tokens drafted" if self.tokens else ""
        tau = "–" if self.tau != self.tau else f"{self.tau:.2f}"
        return f"τ {tau} · {share} · {self.tokens / seconds:.1f} tok/s"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(prog="headwright chat", description=ABOUT, epilog=HELP)
    shapes = "chain-K, tree-DEPTHxTOP_K-NODES, eagle-1 or a JSON file"
    options: list[tuple[str, Any, str]] = [
        ("--target", None, "the model; default: the one that the head was trained for"),
        ("--shape", "chain-5", f"{shapes}; default: chain-5"),
        ("--max-new-tokens", 256, "longest answer; default: 256"),
        ("--temperature", 0.0, "0, the default, is greedy"),
        ("--top-p", 1.0, "nucleus; default: 1, all"),
        ("--seed", 0, "of sampled answers; default: 0"),
        ("--system", None, "a system prompt"),
        ("--prompt", None, "answer this and end"),
    ]
    out.add_argument("--head", required=True, metavar="DIR", help="a trained head, such as runs/smollm2-eagle3/head")
    for name, default, about in options:
        kind = str if default is None else type(default)
        out.add_argument(name, type=kind, default=default, help=about, metavar=name.rpartition("-")[2].upper())
    return out


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    args = parser().parse_args(argv)
    with clean_exit():
        chat(args, Console(highlight=False))


def chat(args: argparse.Namespace, console: Console) -> None:
    """The conversation."""
    from headwright.eval.api import Speculator  # torch comes after --help
    from headwright.heads.saved import is_foreign, target_of

    folder = Path(args.head)
    folder = folder if (folder / "head.json").is_file() or is_foreign(folder) else folder / "head"
    target = args.target or target_of(folder)
    speculator = Speculator(target, folder, args.shape)
    drafting, plain = speculator, Speculator(speculator.target, None)
    start = [{"role": "system", "content": args.system}] if args.system else []
    messages, seed = list(start), args.seed
    console.print(f"{target}, drafted for by {folder} in {drafting.shape.name}. {HELP}", style=FAINT, markup=False)
    for line in asked(args, console):
        if line == "/new":
            messages = list(start)
        elif line == "/plain":
            speculator = drafting if speculator is plain else plain
            console.print("drafting is " + ("off" if speculator is plain else "on"), style=FAINT)
        elif line.startswith("/"):
            console.print(f"no command {line}; {HELP}", style=FAINT, markup=False)
        else:
            messages.append({"role": "user", "content": line})
            try:
                said = answer(args, console, speculator, messages, seed)
            except UserError as error:  # such as a conversation that has outgrown the context
                if args.prompt is not None:
                    raise
                console.print(f"{error}. /new starts a new conversation.", markup=False)
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": said})
            seed += 1


def asked(args: argparse.Namespace, console: Console) -> Iterator[str]:
    """What the user types, line by line."""
    if args.prompt is not None:
        yield args.prompt
        return
    while True:
        try:
            line = console.input("[bold]> [/bold]" if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line == "/quit":
            return
        if line:
            yield line


def answer(
    args: argparse.Namespace,
    console: Console,
    speculator: "Speculator",
    messages: list[dict[str, str]],
    seed: int,
) -> str:
    """Stream one answer; Ctrl-C ends it, not the conversation."""
    shown = Shown()
    pieces = speculator.stream(
        messages, seed, max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_p=args.top_p
    )
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
        try:
            for piece in pieces:
                shown.add(piece)
                live.update(Group(shown.text, Text(shown.footer(), style=FAINT)), refresh=console.is_terminal)
        except KeyboardInterrupt:
            shown.text.append(" …", style=FAINT)
        live.refresh()
    if not console.is_terminal:
        console.print()
    return shown.said


if __name__ == "__main__":
    main()

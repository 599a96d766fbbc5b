"""Chats rewritten by the target, as text. Runnable: `headwright regenerate --config …`.

    runs/<name>/regenerated/chats.jsonl     one finished chat a line: key, source, place, sample, messages
                            failed.jsonl    chats that could not be answered, and why
                            manifest.json   the model, its sampling, template and thinking mode, and counts

Every assistant turn is answered anew, turn by turn. Interrupt it at any moment: finished chats are kept, and a half-written
line is cut off when the same command continues.
"""

import importlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
import xxhash

from headwright.configs import RunConfig, UserError
from headwright.configs.command import run_stage
from headwright.configs.console import progress, say, table
from headwright.data.conversation import Reply, Talk, begin, converse, converse_by
from headwright.data.corpus import Corpus, Document, read_corpus
from headwright.data.generate import Question
from headwright.data.harvest import alone, check_offline, renderer_of, save_skipped, taps_to_harvest
from headwright.data.jobs import policy_of, seed_of
from headwright.data.server import answer_over_servers
from headwright.data.store import write_json
from headwright.data.target import Target

SECTIONS = ("corpus", "answers", "regenerate")
ABOUT = (
    "Let the target rewrite every assistant turn of the corpus, in process or through OpenAI-compatible servers. Then name "
    "runs/<name>/regenerated/chats.jsonl as a corpus source, with answers.by: corpus."
)


@dataclass
class Task:
    """One chat to answer once more."""

    document: Document
    sample: int

    @property
    def name(self) -> str:
        """What identifies it in the output."""
        return f"{self.document.key}:{self.sample}"


def folder_of(run: RunConfig) -> Path:
    """Where the chats go."""
    return run.directory / "regenerated"


def regenerate(run: RunConfig, dry_run: bool = False) -> None:
    """All chats of the corpus that are not in the output yet."""
    if dry_run:
        check_offline(run)
        return
    with alone(run):
        corpus = read_corpus(run.corpus, run.seed, run.directory)
        output = Output(folder_of(run), identity_of(run))
        tasks = tasks_of(corpus, output.done)
        save_skipped(run, corpus.skipped)
        say(f"{len(output.done)} chats are there, {len(tasks)} to go: {output.path}")
        work = over_servers if run.regenerate.urls else in_process
        with progress() as bar, output:
            shown = bar.add_task("regenerate", total=len(output.done) + len(tasks), completed=len(output.done), note="")
            for task, messages, error in work(run, (Task(corpus.everything[n], sample) for n, sample in tasks)):
                output.add(task, messages, error)
                bar.update(shown, completed=len(output.done) + output.failed, note=f"{output.failed} failed")
        output.finish()
        show(output)
        if tasks and output.failed == len(tasks):
            raise UserError(f"none of {len(tasks)} chats could be answered: the reasons stand in {output.failures}")


def tasks_of(corpus: Corpus, done: set[str]) -> list[tuple[int, int]]:
    """(document, sample) of all that is to be answered and is not there yet."""
    tasks = []
    for number, document in enumerate(corpus.everything):
        if not document.rounds:
            corpus.skipped.add("documents without a turn to answer", document.place, "no turn to answer")
        tasks += [(number, s) for s in range(document.samples) if document.rounds and f"{document.key}:{s}" not in done]
    return tasks


def identity_of(run: RunConfig) -> dict[str, Any]:
    """What must be the same for a regeneration to continue."""
    return {
        "model": run.regenerate.model or run.target.model if run.regenerate.urls else run.target.model,
        "revision": run.target.revision,
        "by": "server" if run.regenerate.urls else "process",
        "answers": {key: value for key, value in asdict(run.answers).items() if key != "rows"},
        "template arguments": run.corpus.template,
        "system": run.corpus.system,
        "longest": None if run.regenerate.urls else run.corpus.max_length,
        "seed": run.seed,
    }


Result = tuple[Task, list[dict[str, Any]] | None, str]  # the chat, or why there is none


def in_process(run: RunConfig, tasks: Iterator[Task]) -> Iterator[Result]:
    """By the target itself, many chats at a time; drafted by a head, if there is one."""
    target = Target.load(run.target, taps_to_harvest(run), "cuda" if torch.cuda.is_available() else "cpu")
    renderer = renderer_of(run, target.tokenizer)
    reply = drafted(target, Path(run.regenerate.head), run.answers.rows) if run.regenerate.head else None
    group: list[tuple[Task, Talk]] = []
    for task in tasks:
        try:
            talk = begin(run, target, renderer, task.document, task.sample)
            if len(talk.question.ids) + run.answers.max_new_tokens > talk.longest:
                raise ValueError(f"prompt and answer are longer than {talk.longest} tokens (corpus.max_length)")
        except ValueError as error:
            yield task, None, str(error)
            continue
        group.append((task, talk))
        if len(group) >= run.answers.rows:
            yield from talked(target, group, run.answers.max_new_tokens, reply)
            group = []
    yield from talked(target, group, run.answers.max_new_tokens, reply)


def talked(
    target: Target, group: Sequence[tuple[Task, Talk]], max_new_tokens: int, reply: Reply | None
) -> Iterator[Result]:
    """The finished chats of one batch."""
    if reply is None:
        converse(target, [talk for _, talk in group], max_new_tokens)
    else:
        converse_by(reply, [talk for _, talk in group], max_new_tokens, target.spec.eos_token_ids)
    for task, talk in group:
        yield task, talk.messages, ""


def drafted(target: Target, folder: Path, rows: int) -> Reply:
    """Answers by our decoder with a trained head: the target's own text, in fewer passes.

    Heads and decoder live to the right of this folder and are found when they are asked for.
    """
    head = importlib.import_module("headwright.heads.saved").load_head(folder, target).eval()
    shape = importlib.import_module("headwright.heads.draft_tree").TreeShape.chain(5)
    decode = importlib.import_module("headwright.eval.decode")

    def reply(questions: Sequence[Question], longest: int) -> list[list[int]]:
        said: list[list[int]] = [[] for _ in questions]
        for policy in dict.fromkeys(question.policy for question in questions):
            places = [place for place, question in enumerate(questions) if question.policy == policy]
            prompts, seeds = [questions[place].ids for place in places], [questions[place].seed for place in places]
            settings = decode.Settings(shape, longest, policy, batch=rows)
            for place, text in zip(places, decode.generate(target, head, prompts, settings, seeds).generations):
                said[place] = text.tokens
        return said

    return reply


def over_servers(run: RunConfig, tasks: Iterator[Task]) -> Iterator[Result]:
    """By servers, many requests in flight."""
    settings, answers = run.regenerate, run.answers
    key = os.environ.get(settings.api_key_env, "no-key")  # servers without one take any
    chats = (
        (task, task.document.rounds[: answers.turns], task.document.tools, sampling_of(run, task)) for task in tasks
    )
    yield from answer_over_servers(settings, run.regenerate.model or run.target.model, key, chats)


def sampling_of(run: RunConfig, task: Task) -> dict[str, Any]:
    """What a server is asked for."""
    policy = policy_of(run, task.sample)
    extra: dict[str, Any] = {"top_k": policy.top_k} if policy.top_k else {}
    if run.corpus.template:
        extra["chat_template_kwargs"] = run.corpus.template
    return {
        "temperature": policy.temperature,
        "top_p": policy.top_p,
        "max_tokens": run.answers.max_new_tokens,
        "seed": seed_of(run, task.document.key, task.sample) >> 32,
        "extra_body": extra or None,
    }


class Output:
    """chats.jsonl, appended to; what is in it already is not done again."""

    def __init__(self, folder: Path, identity: dict[str, Any]):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.identity, self.failed = folder, identity, 0
        self.path, self.failures = folder / "chats.jsonl", folder / "failed.jsonl"
        self.check()
        write_json(folder / "manifest.json", {"identity": identity, "complete": False})
        self.done = mend(self.path)
        self.failures.write_bytes(b"")  # what failed is tried again
        self.file: IO[bytes] | None = None

    def check(self) -> None:
        """Chats of another model or sampling are never mixed with."""
        path = self.folder / "manifest.json"
        found = json.loads(path.read_text(encoding="utf-8"))["identity"] if path.exists() else self.identity
        for key, value in self.identity.items():
            if found.get(key) != value:
                raise UserError(
                    f"{self.folder} holds chats of another run: {key} was {found.get(key)!r}, now it is {value!r}\n"
                    "Give the run another name, or remove that directory."
                )

    def __enter__(self) -> "Output":
        self.file = self.path.open("ab", buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        assert self.file is not None
        os.fsync(self.file.fileno())
        self.file.close()

    def add(self, task: Task, messages: list[dict[str, Any]] | None, error: str) -> None:
        """One line, written at once."""
        place = {"key": task.document.key, "source": task.document.source, "place": task.document.place}
        row: dict[str, Any] = place | {"sample": task.sample}
        if messages is None:
            self.failed += 1
            with self.failures.open("ab") as file:
                file.write(json.dumps(row | {"error": error}).encode() + b"\n")
            return
        tools = {"tools": task.document.tools} if task.document.tools else {}
        self.append(json.dumps(row | {"messages": messages} | tools, ensure_ascii=False).encode() + b"\n")
        self.done.add(task.name)

    def append(self, line: bytes) -> None:
        """A whole line, or nothing: a full disk may take a part of it."""
        assert self.file is not None
        before, written = os.fstat(self.file.fileno()).st_size, 0
        try:
            while written < len(line):
                written += self.file.write(line[written:]) or 0
        except OSError:
            self.file.truncate(before)
            raise

    def finish(self) -> None:
        """The manifest, with counts."""
        counts = {"chats": len(self.done), "failed": self.failed, "complete": self.failed == 0}
        text = xxhash.xxh64(self.path.read_bytes()).hexdigest()
        write_json(self.folder / "manifest.json", {"identity": self.identity} | counts | {"xxh64": text})


def mend(path: Path) -> set[str]:
    """The chats that are in the file. A line that a killed process left unfinished is cut off."""
    done: set[str] = set()
    if not path.exists():
        return done
    whole = 0
    with path.open("rb+") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                row = json.loads(line)
                done.add(f"{row['key']}:{row['sample']}")
            except (ValueError, TypeError, KeyError):
                raise UserError(f"{path}:{number}: not a finished chat; remove that line and go on") from None
            whole += len(line)
        file.truncate(whole)
    return done


def show(output: Output) -> None:
    """What came of it."""
    rows = [("answered", len(output.done), output.path), ("failed", output.failed, output.failures)]
    table("regenerated", ("chats", "count", "file"), rows)
    if output.failed:
        say("run the same command again to try the failed ones once more")
    say(f"next: a corpus source {{path: {output.path}}} with answers.by: corpus")


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    run_stage("headwright regenerate", ABOUT, SECTIONS, regenerate, argv)


if __name__ == "__main__":
    main()

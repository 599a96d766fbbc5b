"""`headwright chat`: as a process with piped input, and in process to see colours."""

import io
import os
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from test_api import make_world

from headwright.configs import UserError
from headwright.eval.api import Piece, Speculator, speculate
from headwright.eval.chat import Shown, chat, parser
from headwright.eval.chat import main as chat_main

LONG = "why " * 150


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model that says letters, and a head."""
    return make_world(tmp_path_factory.mktemp("speaker"))


@pytest.fixture(scope="module")
def drafting(world) -> Speculator:
    return Speculator(world.target, world.head, "chain-5")


def answer_to(world, messages, new: int = 24) -> str:
    """What the target says to a conversation."""
    return speculate(world.target, None, messages, max_new_tokens=new).text


def conversation(world, *questions: str, new: int = 24) -> list[str]:
    """Its answers, each to all that was said before."""
    messages, answers = [], []
    for question in questions:
        messages.append({"role": "user", "content": question})
        answers.append(answer_to(world, messages, new))
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def chat_process(*arguments: str, typed: str = "") -> subprocess.CompletedProcess:
    """`headwright chat` with its input piped."""
    return subprocess.run(
        [sys.executable, "-m", "headwright.train.cli", "chat", *arguments],
        input=typed,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "2000"},
    )


def chat_here(monkeypatch, world, *arguments: str, typed: str = "", **console) -> str:
    """The same in this process: what was printed."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    monkeypatch.setattr("headwright.eval.api.open_target", lambda target, *_: world.target)
    out = io.StringIO()
    plain = {"width": 2000, "highlight": False, "file": out}
    chat(parser().parse_args(["--head", str(world.head), *arguments]), Console(**plain | console))
    return out.getvalue()


def lines_of(text: str) -> list[str]:
    """Without the line that says what this is, and without trailing spaces."""
    return [line.rstrip() for line in text.splitlines()[1:]]


FOOTER = re.compile(r"^τ (\d+\.\d\d|–) · (\d+) of (\d+) tokens drafted · \d+\.\d tok/s$")


def answers_of(text: str) -> list[tuple[str, float, int]]:
    """The answers with their τ and drafted tokens."""
    lines = lines_of(text)
    places = [number for number, line in enumerate(lines) if FOOTER.match(line)]
    found = [FOOTER.match(lines[number]).groups() for number in places]
    return [(lines[n - 1], float(tau), int(drafted)) for n, (tau, drafted, _) in zip(places, found)]


def test_a_conversation_over_a_pipe(world):
    """Two turns, commands, a question that is too long, a new conversation, and the end of the input."""
    questions = ["why is the sky blue?", "and at night?"]
    typed = [*questions, "/plain", "and now?", "/plain", "/nonsense", LONG, "", "/new", questions[0]]
    done = chat_process("--head", str(world.run), "--max-new-tokens", "24", typed="\n".join(typed))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    first, *_ = done.stdout.splitlines()
    assert first.startswith(f"{world.target.spec.name}, drafted for by {world.head} in chain-5. /new starts a new")
    told = conversation(world, *questions, "and now?")
    found = answers_of(done.stdout)
    assert [text for text, _, _ in found] == [text.rstrip() for text in (*told, told[0])]
    assert found[0][1] > 1.5
    assert found[0][2] > 5
    assert found[2][1:] == (1.0, 0), "drafting was off"
    assert found[3] == (told[0].rstrip(), *found[0][1:]), "on again, and all forgotten"
    lines = lines_of(done.stdout)
    assert lines.index("drafting is off") < lines.index("drafting is on")
    assert any(line.startswith("no command /nonsense; /new starts") for line in lines)
    [refused] = [line for line in lines if "leaves no room in the target's context of 512" in line]
    assert refused.endswith("/new starts a new conversation.")
    assert "Traceback" not in done.stdout


def test_one_answer_and_the_end(world):
    """--prompt, with a system prompt and a shape; what is piped in is not read."""
    options = ("--prompt", "why is the sky blue?", "--system", "be kind", "--shape", "tree-3x3-8")
    done = chat_process("--head", str(world.head), *options, "--max-new-tokens", "20", typed="not this\n")
    assert done.returncode == 0, done.stderr
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "why is the sky blue?"}]
    [(text, tau, _)] = answers_of(done.stdout)
    assert text == answer_to(world, messages, 20).rstrip()
    assert tau > 1
    assert "in tree-3x3-8." in done.stdout


def test_a_missing_head_is_one_line(tmp_path):
    done = chat_process("--head", str(tmp_path / "none"), typed="hello\n")
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith(f"error: {tmp_path / 'none'}")
    assert "no head there" in line


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--shape", "chain-x"], "shape 'chain-x'"), (["--target", "/no/model"], "no such model directory")],
    ids=["shape", "target"],
)
def test_mistakes_before_the_first_question(world, capsys, monkeypatch, options, message):
    """One line and exit code 2."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    with pytest.raises(SystemExit) as stopped:
        chat_main(["--head", str(world.head), *options])
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_the_help_explains_every_option(capsys):
    with pytest.raises(SystemExit) as stopped:
        chat_main(["--help"])
    assert stopped.value.code == 0
    flat = " ".join(capsys.readouterr().out.split())
    for action in parser()._actions:
        assert action.option_strings[-1] in flat
        assert " ".join(action.help.split()) in flat
    for word in ("/new", "/plain", "/quit"):
        assert word in flat


@settings(max_examples=10, deadline=None)
@given(questions=st.lists(st.text("abc []:?я", min_size=1, max_size=12).filter(str.strip), min_size=1, max_size=3))
def test_any_conversation(world, questions):
    """Whatever is asked, markup and names of emoji too, the answers are those of plain decoding to what stands there."""
    with pytest.MonkeyPatch.context() as patch:
        out = chat_here(patch, world, "--max-new-tokens", "12", typed="\n".join(questions) + "\n/quit\nnot this\n")
    wanted = conversation(world, *(question.strip() for question in questions), new=12)
    assert [text for text, _, _ in answers_of(out)] == [text.rstrip() for text in wanted]


@pytest.mark.parametrize("end", ["", "/quit\nwhy?\n", "/quit"])
def test_quit_and_the_end_of_the_input(monkeypatch, world, end):
    assert len(answers_of(chat_here(monkeypatch, world, "--max-new-tokens", "4", typed="hello\n" + end))) == 1


def test_options_reach_the_decoder(monkeypatch, world, drafting):
    """Sampled answers: each has the next seed."""
    seen = []
    original = Speculator.stream

    def watched(self, prompt, seed=0, **options):
        seen.append((seed, options))
        return original(self, prompt, seed, **options)

    monkeypatch.setattr(Speculator, "stream", watched)
    options = ("--temperature", "0.9", "--top-p", "0.8", "--seed", "7", "--max-new-tokens", "9")
    chat_here(monkeypatch, world, *options, typed="one\ntwo\n/new\nthree\n")
    rules = {"max_new_tokens": 9, "temperature": 0.9, "top_p": 0.8}
    assert seen == [(7, rules), (8, rules), (9, rules)]


def test_a_refused_question_is_forgotten(monkeypatch, world):
    """The conversation goes on as if it had not been asked."""
    out = chat_here(monkeypatch, world, "--max-new-tokens", "8", typed=f"one\n{LONG}\ntwo\n")
    assert [text for text, _, _ in answers_of(out)] == [
        text.rstrip() for text in conversation(world, "one", "two", new=8)
    ]
    assert out.count("leaves no room") == 1


# Colours


def painted(frame: str) -> list[tuple[str, bool]]:
    """Every character of a terminal's text, and whether it is green."""
    green, out = False, []
    for code, character in re.findall(r"\x1b\[([0-9;?]*)[a-zA-Z]|([^\x1b])", frame):
        if character:
            out.append((character, green))
        elif code:
            green = "32" in code.split(";")
    return out


def test_accepted_tokens_are_green(monkeypatch, world, drafting):
    """On a terminal the last frame of an answer shows whose each character is."""
    asked = [{"role": "user", "content": "why is the sky blue?"}]
    terminal = {"force_terminal": True, "color_system": "standard", "width": 500, "legacy_windows": False}
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = chat_here(monkeypatch, world, "--prompt", asked[0]["content"], "--max-new-tokens", "24", **terminal)
    frames = out.split("\x1b[2K")
    last, _, rest = frames[-1].lstrip("\r").partition("\n")
    pieces = list(drafting.stream(asked, max_new_tokens=24))
    wanted = [(character, drafted) for piece in pieces for text, drafted in piece.parts for character in text]
    assert painted(last) == wanted
    assert {green for _, green in wanted} == {True, False}
    assert not any(green for _, green in painted(rest)), "the footer is not"
    assert len(frames) > len(pieces), "a frame for each piece"
    assert f"τ {pieces[-1].acceptance_length:.2f}" in rest


def test_nothing_is_coloured_in_a_pipe(monkeypatch, world):
    assert "\x1b" not in chat_here(monkeypatch, world, "--prompt", "why?", "--max-new-tokens", "8")


def test_a_footer_by_hand(monkeypatch):
    shown = Shown(begun=0.0)
    monkeypatch.setattr("headwright.eval.chat.time.perf_counter", lambda: 2.0)
    assert shown.footer().startswith("τ –")
    shown.add(Piece([("a", False)], [1], 0, float("nan")))
    shown.add(Piece([("[b]bc", True), ("d", False)], [1, 2, 3], 2, 3.0))
    assert shown.footer() == "τ 3.00 · 2 of 4 tokens drafted · 2.0 tok/s"
    assert shown.text.plain == "a[b]bcd"
    assert [(span.start, span.end) for span in shown.text.spans if span.style == "green"] == [(1, 6)]


# What the next turn is told


def spoken(monkeypatch, *pieces):
    """A target that always says this; `raise` an exception among the pieces. Returns what each turn was asked."""
    asked = []

    def said(self, messages, seed=0, **options):
        asked.append([dict(message) for message in messages])
        for piece in pieces:
            if isinstance(piece, BaseException):
                raise piece
            yield Piece([(piece, False)], [1], 0, 1.0)

    monkeypatch.setattr(Speculator, "stream", said)
    return asked


def test_the_next_turn_is_told_what_was_said(monkeypatch, world):
    asked = spoken(monkeypatch, "one [b]", " two:smile:\n", "\n  three ")
    chat_here(monkeypatch, world, typed="hello\nagain\n")
    assert asked[1][1] == {"role": "assistant", "content": "one [b] two:smile:\n\n  three "}


@pytest.mark.parametrize("character", ["\r", "\x0c", "\x08"], ids=["return", "form feed", "backspace"])
def test_the_next_turn_is_told_control_characters(monkeypatch, world, character):
    """Such as the line ends of a file."""
    asked = spoken(monkeypatch, f"one{character}\n", "two")
    chat_here(monkeypatch, world, typed="hello\nagain\n")
    assert asked[1][1]["content"] == f"one{character}\ntwo"


def test_an_interrupted_answer_ends_and_the_conversation_goes_on(monkeypatch, world):
    asked = spoken(monkeypatch, "one", KeyboardInterrupt())
    out = chat_here(monkeypatch, world, typed="hello\nagain\n")
    assert out.count("one …") == 2
    assert [message["role"] for message in asked[1]] == ["user", "assistant", "user"]


def test_the_next_turn_of_an_interrupted_answer_is_told_what_was_said(monkeypatch, world):
    asked = spoken(monkeypatch, "one", KeyboardInterrupt())
    chat_here(monkeypatch, world, typed="hello\nagain\n")
    assert asked[1][1]["content"] == "one"


def test_one_question_that_cannot_be_answered_is_an_error(monkeypatch, world):
    with pytest.raises(UserError, match="leaves no room"):
        chat_here(monkeypatch, world, "--prompt", LONG)

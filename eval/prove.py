"""Does the real engine serve what was trained? Runnable: `headwright prove --config FILE --engine-python PATH`.

Engines run in virtual environments of their own (scripts/verify_vllm.sh and verify_sglang.sh make them), on held-out prompts
with the run's exports. vLLM decodes greedily: in fp32 its number of draft cycles, and of accepted drafts at each position, must
equal those of our chain, and its texts plain decoding's; in half precision rounding may part them, and both are shown. Of
SGLang the loader, the model's classes and the draft loop of its worker run on a CPU: every tensor must have been filled, and
its drafts must be the trained head's.
"""

import argparse
import copy
import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headwright.configs import RunConfig, UserError
from headwright.configs.command import clean_exit, stop
from headwright.configs.console import say, table
from headwright.configs.load import load_run
from headwright.data.harvest import open_store
from headwright.data.store import write_json
from headwright.data.target import Target, locate
from headwright.eval.decode import generate
from headwright.eval.prompts import held_out_prompts
from headwright.eval.settings import Generation, Settings
from headwright.heads.base import Case, DraftHead
from headwright.heads.directory import Directory
from headwright.heads.draft_tree import TreeShape
from headwright.heads.engine_tables import SGLANG, VLLM
from headwright.heads.export import DRAFTS, draft_cases, head_drafts, shared_tables
from headwright.heads.foreign import identify, is_foreign
from headwright.heads.saved import load_head, taps_of


@dataclass
class Counters:
    """As vLLM counts: draft cycles, and accepted drafts by position."""

    drafts: int
    accepted_per_pos: list[int]

    @property
    def acceptance_length(self) -> float:
        """τ, the bonus token included."""
        return 1 + sum(self.accepted_per_pos) / self.drafts if self.drafts else float("nan")


def chain_counters(target: Target, head: DraftHead, prompts: Sequence[list[int]], tokens: int, count: int) -> Counters:
    """What our decoder counts for chains of `count` drafts over `tokens` new tokens of each prompt.

    vLLM counts a cycle in full even where it runs over the end, so texts here go on beyond it; end tokens are ignored on both
    sides.
    """
    settings = Settings(TreeShape.chain(count), tokens + count + 1, ignore_eos=True)
    return counted(generate(target, head, prompts, settings).generations, tokens, count)


def counted(generations: Sequence[Generation], tokens: int, count: int) -> Counters:
    """The cycles that begin before a text has its tokens. The first token comes from the prefill, without a draft."""
    total = Counters(0, [0] * count)
    for generation in generations:
        done = 1
        for accepted, emitted in zip(generation.accepted, generation.emitted):
            if done >= tokens:
                break
            total.drafts += 1
            for place in range(accepted):
                total.accepted_per_pos[place] += 1
            done += emitted
    return total


def plain_texts(target: Target, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """What the target says by itself."""
    settings = Settings(TreeShape("plain", 0), tokens, ignore_eos=True)
    return [generation.tokens for generation in generate(target, None, prompts, settings).generations]


def engine_job(
    folder: Path, target: str, prompts: Sequence[list[int]], tokens: int, count: int, **more: Any
) -> dict[str, Any]:
    """What vLLM is asked to do with a directory, from the table of its kind."""
    arguments = arguments_of(folder, VLLM, target, count)
    return {"name": folder.name, "arguments": arguments, "prompts": list(prompts), "max_tokens": tokens} | more


def arguments_of(folder: Path, engine: str, target: str, count: int) -> dict[str, Any]:
    """What an engine is given for a directory. Raises UserError where it does not serve such heads."""
    directory = Directory.open(folder)
    method = identify(directory)
    contract = method.contract(engine)
    if contract is None or contract.arguments is None:
        raise UserError(f"{folder}: {engine} does not serve {method.name} heads")
    return contract.arguments(directory.config, target, folder.resolve(), count)


def ask_engine(python: str, jobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """vLLM's answers."""
    return ask(python, "vllm_side.py", {"jobs": list(jobs)})


def ask(python: str, side: str, job: dict[str, Any]) -> dict[str, Any]:
    """A job for a side's script, by the engine's own python. What it prints is not captured: it tells how far it is."""
    line = [python, str(Path(__file__).with_name(side))]
    try:
        done = subprocess.run(line, input=json.dumps(job), stdout=subprocess.PIPE, text=True, check=False)
    except OSError as error:
        raise UserError(f"--engine-python {python}: cannot be run: {error.strerror}") from None
    if done.returncode or not done.stdout.strip():
        raise UserError(f"{python} {side}: ended with code {done.returncode}; its messages are above")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def exports_of(run: RunConfig, engine: str) -> list[Path]:
    """The run's directories that an engine serves. Raises UserError where there is none."""
    found = []
    for name in run.export.engines:
        folder = run.directory / "export" / name
        if not folder.is_dir():
            raise UserError(f"{folder}: no export there: run `headwright export` first")
        if (
            is_foreign(folder)
            and identify(Directory.open(folder)).contract(engine) is not None
            and name != other(engine)
        ):
            found.append(folder)
    if not found:
        raise UserError(f"export.engines {run.export.engines}: none that {engine} serves: set it, and export")
    return found


def other(engine: str) -> str:
    """A format that is named after the other engine is not for this one."""
    return SGLANG if engine == VLLM else VLLM


def prove(run: RunConfig, args: argparse.Namespace) -> int:
    """Compare the run's exports; the exit code."""
    folders = exports_of(run, args.engine)
    taps = taps_of(run.directory / "head", 0)
    target = Target.load(run.target, taps, "cuda" if torch.cuda.is_available() and args.engine == VLLM else "cpu")
    return (prove_vllm if args.engine == VLLM else prove_sglang)(run, args, target, folders)


def prove_vllm(run: RunConfig, args: argparse.Namespace, target: Target, folders: Sequence[Path]) -> int:
    """vLLM's counters and texts."""
    prompts = [prompt.ids for prompt in held_out_prompts(open_store(run, "held-out"), args.prompts)]
    plain, dtype = plain_texts(target, prompts, args.tokens), str(target.dtype).removeprefix("torch.")
    size = {"dtype": dtype, "context": max(map(len, prompts)) + args.tokens + args.draft + 8}
    where = run.export.name_or_path or locate(run.target.model)
    said = ask_engine(
        args.engine_python, [engine_job(folder, where, prompts, args.tokens, args.draft, **size) for folder in folders]
    )
    rows, equal = [], True
    for folder, answer in zip(folders, said["answers"]):
        if "error" in answer:
            raise UserError(f"{folder}: vLLM {said['version']} failed: {answer['error']}")
        theirs = Counters(int(answer["drafts"]), [int(n) for n in answer["accepted_per_pos"]])
        ours = chain_counters(target, load_head(folder, target).eval(), prompts, args.tokens, args.draft)
        texts = sum(a == b for a, b in zip(answer["texts"], plain))
        same = ours == theirs and texts == len(plain)
        equal &= same
        rows.append((folder.name, shown(theirs), shown(ours), f"{texts}/{len(plain)}", "equal" if same else "differ"))
        result = {"vllm": said["version"], "dtype": dtype, "prompts": len(prompts), "tokens": args.tokens}
        sides = {"theirs": asdict(theirs), "ours": asdict(ours), "same_texts": texts}
        write_json(folder / "vllm.json", result | {"draft": args.draft} | sides)
    columns = ("export", f"vLLM {said['version']}", "our decoder", "texts of plain decoding", "counters")
    table(f"chains of {args.draft}, {len(prompts)} prompts, {dtype}", columns, rows)
    if not equal and dtype != "float32":
        say(
            "In half precision rounding parts texts at near-ties, and counters with them: target.dtype=float32 is exact."
        )
    return 0 if equal or dtype != "float32" else 1


SHARED = {"model.embed_tokens.weight", "lm_head.weight"}  # what SGLang puts the target's in place of


def prove_sglang(run: RunConfig, args: argparse.Namespace, target: Target, folders: Sequence[Path]) -> int:
    """What SGLang's loader leaves unfilled, and its drafts."""
    cases = draft_cases(open_store(run, "held-out"), target, args.prompts)
    head = load_head(run.directory / "head", target, torch.float32).eval()
    with tempfile.TemporaryDirectory() as scratch:
        jobs = [
            sglang_job(folder, case, target, args.draft, Path(scratch) / f"{folder.name}-{number}")
            for folder in folders
            for number, case in enumerate(cases)
        ]
        said = ask(
            args.engine_python,
            "sglang_side.py",
            {"heads": jobs, "context_length": target.spec.max_positions, "dtype": "float32"},
        )
    answers, rows, right = iter(said["heads"]), [], True
    for folder in folders:
        found = [next(answers) for _ in cases]
        broken = next((answer["error"] for answer in found if answer["error"]), None)
        if broken:
            raise UserError(f"{folder}: SGLang {said['version']} failed: {broken}")
        left = sorted({name for answer in found for name in answer["left"]} - SHARED)
        rounded = copy.deepcopy(head).to(getattr(torch, Directory.open(folder).config["dtype"])).float()
        equal = sum(
            sum(a == b for a, b in zip(answer["tokens"], head_drafts(rounded, target, case).tokens))
            for answer, case in zip(found, cases)
        )
        wanted = len(cases) * min(args.draft, DRAFTS)
        right &= equal == wanted and not left
        rows.append((folder.name, found[0]["class"], ", ".join(left) or "nothing", f"{equal}/{wanted}"))
        write_json(
            folder / "sglang.json", {"sglang": said["version"], "unfilled": left, "drafted": wanted, "equal": equal}
        )
    table(f"SGLang {said['version']}", ("export", "class", "left unfilled", "drafts as the head's"), rows)
    return 0 if right else 1


def sglang_job(folder: Path, case: Case, target: Target, count: int, inputs: Path) -> dict[str, Any]:
    """A prompt for SGLang's classes: the states that they read, and what they share of the target."""
    arguments = arguments_of(folder, SGLANG, target.spec.name, count)
    hidden = case.taps_TKD.flatten(1) if arguments["algorithm"] == "EAGLE3" else case.last_TD
    tables = shared_tables(target)
    tensors = {"tokens": torch.tensor(case.following), "hidden": hidden.float()}
    tensors |= {"embedding": tables.embedding_VD, "lm_head": tables.lm_head_VD}
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, inputs)
    return arguments | {"folder": str(folder.resolve()), "inputs": str(inputs), "count": min(count, DRAFTS)}


def shown(found: Counters) -> str:
    """One side in a table."""
    return f"τ {found.acceptance_length:.3f}: {found.drafts} drafts, accepted {found.accepted_per_pos}"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(
        prog="headwright prove",
        description="Run the real engine on a run's exports. vLLM: its acceptance counters and texts against our decoder's, "
        "number by number. SGLang: its loader, classes and draft loop, on a CPU. Exit code 1: something differs (with vLLM, in "
        "fp32). `bash scripts/verify_vllm.sh --config FILE` and verify_sglang.sh install the engine first.",
    )
    out.add_argument("--config", required=True, metavar="FILE", help="the run file (YAML)")
    out.add_argument("--engine", choices=(VLLM, SGLANG), default=VLLM, help="default: vllm")
    out.add_argument("--engine-python", required=True, metavar="PATH", help="the python of the engine's environment")
    out.add_argument("--prompts", type=int, default=8, metavar="N", help="held-out prompts; default: 8")
    out.add_argument("--tokens", type=int, default=64, metavar="N", help="new tokens of each; default: 64")
    out.add_argument("--draft", type=int, default=3, metavar="K", help="drafted tokens a cycle; default: 3")
    out.add_argument("overrides", nargs="*", metavar="section.key=value", help="change keys of the run file")
    return out


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    args = parser().parse_args(argv)
    with clean_exit():
        code = prove(load_run(args.config, args.overrides), args)
    if code:
        stop("the engine does otherwise than our decoder", code)


if __name__ == "__main__":
    main()

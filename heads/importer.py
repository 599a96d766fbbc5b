"""A head of others into a run, where it is evaluated and exported as one of ours. Runnable: `headwright import DIR`."""

import argparse
from pathlib import Path

import torch

from headwright.configs import RunConfig, UserError
from headwright.configs.command import clean_exit
from headwright.configs.console import say, table
from headwright.configs.load import load_run
from headwright.data.target import Target
from headwright.heads.base import DraftHead
from headwright.heads.foreign import OURS, is_foreign
from headwright.heads.saved import load_head, save_head, taps_of


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(
        prog="headwright import",
        description="Take a head that EAGLE, SpecForge, AngelSlim, speculators or Medusa wrote, or an export, into the run of "
        "a config: `headwright eval` then measures it, `headwright export` writes it for other engines, `headwright doctor` "
        "checks the original. To train from it, give its directory as train.warm_start instead.",
    )
    out.add_argument("directory", metavar="DIR", help="config.json and *.safetensors")
    out.add_argument("--config", required=True, metavar="FILE", help="the run file (YAML); its target is the head's")
    out.add_argument("--dry-run", action="store_true", help="check that it can be taken, write nothing")
    out.add_argument("overrides", nargs="*", metavar="section.key=value", help="change keys of the run file")
    return out


def import_head(run: RunConfig, folder: Path, dry_run: bool = False) -> DraftHead:
    """The head in `folder`, saved as the run's own. Raises UserError where ours would compute something else."""
    if not is_foreign(folder):
        raise UserError(
            f"{folder}: " + ("already a head of ours" if (folder / OURS).is_file() else "holds no config.json: no head")
        )
    out = run.directory / "head"
    if (out / OURS).is_file():
        raise UserError(f"{out}: there is a head already: give the run another name (name=…)")
    target = Target.load(run.target, lambda layers: taps_of(folder, layers))
    head = load_head(folder, target, torch.float32)
    show(head, folder)
    if not dry_run:
        save_head(head, out)
        say(f"{out}: written. Next: headwright eval, headwright export, with the same config")
    return head


def show(head: DraftHead, folder: Path) -> None:
    """What was found."""
    weights = sum(weight.numel() for weight in head.parameters())
    rows = [
        ("from", str(folder)),
        ("kind", head.config.kind),
        ("weights", f"{weights / 1e6:.1f} M"),
        ("taps", ", ".join(map(str, head.taps))),
        ("draft vocabulary", f"{len(head.vocab)} of {head.spec.vocab_size} tokens"),
        ("target", head.spec.name),
    ]
    table("imported head", ("what", "value"), rows)


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    args = parser().parse_args(argv)
    with clean_exit():
        import_head(load_run(args.config, args.overrides), Path(args.directory), args.dry_run)


if __name__ == "__main__":
    main()

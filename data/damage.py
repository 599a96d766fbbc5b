"""Are the stored features what was written? Runnable: `headwright verify --config …`."""

from pathlib import Path

from headwright.configs import RunConfig, UserError
from headwright.configs.command import run_stage
from headwright.configs.console import progress, say
from headwright.data.harvest import store_path
from headwright.data.store import read_manifest, store_damage, write_manifest

ABOUT = (
    "Compare every stored feature with its checksum. Damaged shards are named and removed, so that the next harvest "
    "makes them, and only them, anew. With --dry-run they are only named."
)


def verify(run: RunConfig, dry_run: bool = False) -> None:
    """Both stores of a run."""
    wrong = [found for side in ("train", "held-out") for found in check_store(store_path(run, side), dry_run)]
    if wrong:
        done = "They were left where they are (--dry-run)." if dry_run else "They were removed: run the harvest again."
        raise UserError("\n".join([f"{len(wrong)} damaged shards", *wrong, done]))


def check_store(root: Path, dry_run: bool) -> list[str]:
    """What is wrong with one store."""
    if not (root / "manifest.json").exists():
        say(f"{root}: no features there")
        return []
    manifest = read_manifest(root)
    seen, wrong = 0, []
    with progress() as bar:
        task = bar.add_task(f"verify {root.name}", total=manifest.units, note="")
        for file, what in store_damage(root):
            seen += 1
            if what:
                wrong.append(f"{root / file}: {what}")
                if not dry_run:
                    remove(root, file)
            bar.advance(task)
    unfinished = "" if manifest.complete else f"; {manifest.units - seen} are still to be made"
    say(f"{root}: {seen - len(wrong)} of {seen} shards are as written{unfinished}")
    return wrong


def remove(root: Path, file: str) -> None:
    """Take a shard out of the store, which is then unfinished."""
    manifest = read_manifest(root)
    manifest.complete = False
    write_manifest(root, manifest)
    (root / file).unlink(missing_ok=True)


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    run_stage("headwright verify", ABOUT, (), verify, argv)


if __name__ == "__main__":
    main()

"""Are the stored features what was written? Runnable: `headwright verify --config …`."""

from pathlib import Path

from headwright.configs import RunConfig, UserError
from headwright.configs.command import run_stage
from headwright.configs.console import progress, say, size
from headwright.data.harvest import store_path
from headwright.data.store import FeatureReader, read_manifest, write_manifest

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
    reader = FeatureReader(root)
    wrong = []
    with progress() as bar:
        task = bar.add_task(f"verify {root.name}", total=reader.manifest.units, note="")
        for unit, what in reader.damage():
            entry = (reader.manifest.shards or [])[unit]
            wrong.append(f"{root / entry['file']}: {what}")
            bar.update(task, completed=unit)
            if not dry_run:
                remove(root, entry["file"])
    whole = reader.manifest.units - len(wrong)
    say(f"{root}: {whole} of {reader.manifest.units} shards ({size(reader.manifest.bytes)}) are as written")
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

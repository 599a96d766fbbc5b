"""What storing features in fewer bits costs: bytes, loss and τ of heads that differ in nothing else.

    python scripts/bench_precision.py --config configs/smollm2-eagle3-quick.yaml

The corpus is harvested once in float32 (or --harvested: the run's own features are taken); each store is that one rounded.
Every head is measured on the same unrounded held-out features, because serving knows no rounding. Trained and compared by
scripts/ablate.py.
"""

import argparse
import shutil
from dataclasses import replace
from pathlib import Path

from ablate import ablate

from headwright.configs import RunConfig
from headwright.configs.console import say, size
from headwright.configs.load import load_run
from headwright.data.harvest import harvest, store_path
from headwright.data.store import DTYPES, FeatureReader, FeatureWriter, Manifest, read_manifest


def rounded(source: Path, target: Path, dtype: str) -> Manifest:
    """The store in another precision."""
    reader = FeatureReader(source)
    found = reader.manifest
    manifest = replace(
        found, dtype=dtype, complete=False, shards=None, index="", identity=found.identity | {"dtype": dtype}
    )
    with FeatureWriter(target, manifest) as writer:
        for unit in writer.missing():
            numbers = [number for number, owner in enumerate(reader.places[:, 0].tolist()) if owner == unit]
            writer.write(unit, reader.read(numbers), [reader.notes[number] for number in numbers], 0.0)
        writer.finish()
    return read_manifest(target)


def store(base: RunConfig, dtype: str) -> str:
    """A run directory with the base's features in a precision, and its held-out features as they are; its name."""
    run = replace(base, name=f"{base.name}-{dtype}")
    if not store_path(run, "held-out").exists():
        shutil.copytree(store_path(base, "held-out"), store_path(run, "held-out"))
    manifest = rounded(store_path(base, "train"), store_path(run, "train"), dtype)
    say(f"{dtype}: {size(manifest.bytes)}, {manifest.bytes / manifest.tokens:.0f} bytes a token")
    return run.name


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--stores", nargs="+", choices=DTYPES, default=["float32", "bfloat16", "fp8-taps", "fp8"])
    parser.add_argument(
        "--harvested", action="store_true", help="round the run's own features instead of a new harvest"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_args()
    base = load_run(arguments.config, arguments.overrides)
    if not arguments.harvested:
        base = replace(base, name=f"{base.name}-precision", harvest=replace(base.harvest, dtype="float32"))
        harvest(base)
    names = [store(base, dtype) for dtype in arguments.stores]
    overrides = [*arguments.overrides, f"name={base.name}"]
    sweep = [f"features={','.join(names)}"]
    ablate(
        argparse.Namespace(
            config=arguments.config,
            overrides=overrides,
            sweep=sweep,
            each=False,
            seeds=arguments.seeds,
            keep=False,
            table=False,
            out=None,
        )
    )


if __name__ == "__main__":
    main()

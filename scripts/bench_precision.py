"""What storing features in fewer bits costs: bytes, loss and τ of heads that differ in nothing else.

    python scripts/bench_precision.py --config configs/smollm2-eagle3-quick.yaml

The corpus is harvested once in float32 (or harvest.dtype=…); each store is that one rounded. Every head is measured on the same
unrounded held-out features, because serving knows no rounding.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench_choices import fresh, outcome

from headwright.configs import RunConfig
from headwright.configs.console import say, size, table
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


def measure(base: RunConfig, dtype: str, seed: int) -> tuple[int, dict[str, Any]]:
    """One training: bytes of the store, and how the head came out."""
    run = fresh(base, dtype, seed)
    manifest = rounded(store_path(base, "train"), store_path(run, "train"), dtype)
    return manifest.bytes, outcome(run)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--stores", nargs="+", choices=DTYPES, default=["float32", "bfloat16", "fp8-taps", "fp8"])
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_args()
    base = load_run(arguments.config, ["harvest.dtype=float32", *arguments.overrides])
    base.name += "-precision"
    harvest(base)
    rows = []
    for dtype in arguments.stores:
        found = [measure(base, dtype, seed) for seed in range(arguments.seeds)]
        taus = ", ".join(f"{result['tau']:.3f}" for _, result in found)
        losses = ", ".join(f"{result['loss_0']:.3f}" for _, result in found)
        rows.append(
            (
                dtype,
                size(found[0][0]),
                f"{found[0][0] / read_manifest(store_path(base, 'train')).tokens:.0f}",
                losses,
                taus,
            )
        )
        say(f"{dtype}: τ {taus}")
    table(
        "precision of the stored features",
        ("store", "size", "bytes/token", "final loss of step 0", "best held-out τ"),
        rows,
    )


if __name__ == "__main__":
    main()

"""The tables of docs/scale.md, and of docs/adaptation.md on Russian heads: memory and time of heads for large targets on
machines that are not here, by the formulas of train/paper.py.

python scripts/paper_plan.py
"""

from headwright.train.paper import (
    Job,
    Machine,
    Model,
    Outlook,
    generation_seconds,
    head_parameters,
    offline,
    online,
    placements,
    state_bytes,
    store_bytes,
    target_seconds,
)

MODELS = (
    Model("Llama-3.1-8B", 32, 4096, 4096, 1024, 14336, 128256, 8.03e9, 8.03e9),
    Model("Qwen3-32B", 64, 5120, 8192, 1024, 25600, 151936, 32.8e9, 32.8e9),
    Model("Llama-3.3-70B", 80, 8192, 8192, 1024, 28672, 128256, 70.6e9, 70.6e9),
    Model("Qwen3-235B-A22B", 94, 4096, 8192, 512, 12288, 151936, 235e9, 22e9),
)
QWEN = (Model("Qwen3-8B", 36, 4096, 4096, 1024, 12288, 151936, 8.19e9, 8.19e9), MODELS[1])
RUSSIAN = Job(
    documents=55_000, length=768, draft_vocabulary=48_000
)  # configs/qwen3-8b-russian.yaml and qwen3-32b-russian.yaml
MACHINES = (Machine("1 × 80 GB", 1), Machine("8 × 80 GB", 8), Machine("8 machines of 8", 64, 8))
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp2")


def table(columns: list[str], rows: list[list[str]]) -> None:
    """Markdown."""
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def gb(count: float) -> str:
    """Bytes as GB or TB."""
    return f"{count / 1e12:.1f} TB" if count >= 1e12 else f"{count / 1e9:.0f} GB"


def hours(value: float) -> str:
    """A time, or a dash where it cannot be."""
    return "–" if value != value else f"{value:.1f} h" if value >= 0.95 else f"{60 * value:.0f} min"


def training_row(model: Model, machine: Machine, how: str, found: Outlook | None) -> list[str]:
    """One way to train."""
    if found is None:
        return [model.name, machine.name, how, "the target has no place beside the head", "", "", ""]
    fits = "" if found.memory <= machine.memory else ", **does not fit**"
    parts = [f"{name} {hours(value)}" for name, value in found.hours.items() if name != "training"]
    bottleneck = found.bottleneck
    return [
        model.name,
        machine.name,
        how,
        found.placement.name,
        gb(found.memory) + fits,
        f"{hours(found.hours['training'])} ({', '.join(parts)})",
        bottleneck,
    ]


def harvest_row(model: Model, machine: Machine, job: Job) -> list[str]:
    """Answers and features, before an offline training."""
    answers = hours(generation_seconds(model, job, machine) / 3600)
    fitting = [place for place in placements(model, machine) if place.bytes < 0.9 * machine.memory]
    if not fitting:
        return [model.name, machine.name, answers, "the target does not fit"]
    parts = target_seconds(model, job, machine, fitting[0])
    slowest = max(parts, key=lambda name: parts[name])
    return [model.name, machine.name, answers, f"{hours(max(parts.values()) / 3600)} ({fitting[0].name}; {slowest})"]


def adaptation_row(model: Model, machine: Machine) -> list[str]:
    """Stages of the Russian recipe, and what they take together."""
    answers = generation_seconds(model, RUSSIAN, machine) / 3600
    fitting = [place for place in placements(model, machine) if place.bytes < 0.9 * machine.memory]
    features = max(target_seconds(model, RUSSIAN, machine, fitting[0]).values()) / 3600 if fitting else float("nan")
    training = offline(model, RUSSIAN, machine).hours["training"]
    whole = machine.gpus * (answers + features + training)
    cells = [hours(part) for part in (answers, features, training)]
    return [
        model.name,
        machine.name,
        *cells,
        gb(store_bytes(model, RUSSIAN)),
        "–" if whole != whole else f"{whole:.0f}",
    ]


def show_adaptation() -> None:
    """What a Russian head would take."""
    print(f"Russian: {RUSSIAN}\n")
    rows = [adaptation_row(model, machine) for model in QWEN for machine in MACHINES[:2]]
    table(["target", "machine", "answers", "features", "training", "store, bf16", "GPU-hours"], rows)


def main() -> None:
    """All tables."""
    show_adaptation()
    job = Job()
    print(f"Job: {job}\n")
    rows = []
    for model in MODELS:
        trained = head_parameters(model, job)
        states = [gb(state_bytes(trained, name, 8)[1]) for name in STRATEGIES]
        rows.append(
            [
                model.name,
                f"{trained / 1e6:.0f} M",
                *states,
                gb(store_bytes(model, job)),
                gb(store_bytes(model, job, "fp8")),
            ]
        )
    table(["target", "trained", *STRATEGIES, "store, bf16", "store, fp8"], rows)
    table(
        ["target", "machine", "answers by the target", "features"],
        [harvest_row(model, machine, job) for model in MODELS for machine in MACHINES],
    )
    columns = ["target", "machine", "features", "target's weights", "memory per GPU", "training", "bottleneck"]
    rows = []
    for model in MODELS:
        for machine in MACHINES:
            rows.append(training_row(model, machine, "stored", offline(model, job, machine)))
            rows.append(training_row(model, machine, "live", online(model, job, machine)))
    table(columns, rows)
    largest = max(MODELS, key=lambda model: store_bytes(model, job))
    print(f"The largest store is that of {largest.name}: {gb(store_bytes(largest, job))}.")


if __name__ == "__main__":
    main()

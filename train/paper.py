"""Memory and time of a training by formulas: what `headwright plan` says of machines that are not here.

Shapes: T packed tokens of a batch, R rows that bear loss, I steps of the rollout, K taps, D width of the target, H of the
head, Q and G widths of its queries and keys, F of its MLP, W draft vocabulary, N processes. Bytes, FLOP, seconds.

Every formula is tested against what it describes (tests/test_paper.py); the speeds of a machine are assumptions, and stand
here.
"""

from dataclasses import dataclass

from headwright.configs.schema import StrategyName
from headwright.data.store import bytes_per_token

WEIGHT, GRADIENT, MOMENTS = 4, 4, 8  # bytes per trained parameter: fp32, AdamW
HALF = 2  # bytes of a bf16 value
LEAST_CHUNK = 32 * 2**20  # of logits
SPARE = 4e9  # bytes that drivers, workspaces and fragmentation take


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind. Peaks are the makers' figures; `use` is the share of them that is assumed to be reached."""

    name: str
    gpus: int
    machines: int = 1
    memory: float = 80e9
    flops: float = 989e12  # bf16, dense
    bandwidth: float = 3.35e12  # of a GPU's memory
    link: float = 450e9  # between the GPUs of a machine, each way
    network: float = 50e9  # of a GPU to other machines
    disk: float = 6e9  # of a machine, reading
    target_use: float = 0.5
    head_use: float = 0.35
    memory_use: float = 0.6
    link_use: float = 0.7

    @property
    def local(self) -> int:
        """GPUs of one machine."""
        return self.gpus // self.machines


@dataclass(frozen=True)
class Model:
    """A target."""

    name: str
    layers: int
    width: int
    queries: int
    keys: int
    inner: int
    vocabulary: int
    parameters: float
    active: float  # that a token passes

    @property
    def ends(self) -> float:
        """Parameters of embeddings and lm_head."""
        return 2.0 * self.vocabulary * self.width


@dataclass(frozen=True)
class Job:
    """What is trained: an EAGLE-3 head of one layer, on answers of the target."""

    documents: int = 200_000
    length: int = 1024
    answer: int = 512
    epochs: float = 2.0
    steps: int = 5
    draft_vocabulary: int = 32_000
    taps: int = 3
    tokens_per_batch: int = 8192
    generated_together: int = 256  # answers on each GPU

    @property
    def tokens(self) -> float:
        """Of the corpus."""
        return float(self.documents * self.length)

    @property
    def answers(self) -> float:
        """Response tokens."""
        return float(self.documents * self.answer)


# Memory


def head_parameters(model: Model, job: Job) -> float:
    """Trained parameters: fusion, attention over [embedding ; feature], MLP, lm_head, norms."""
    H = model.width
    attention = 2 * H * (model.queries + 2 * model.keys) + model.queries * H
    norms = (4 + job.taps) * H  # input, hidden, after attention, final; one for each tap
    return float(job.taps * H * H + attention + 3 * H * model.inner + job.draft_vocabulary * H + norms)


def state_bytes(trained: float, strategy: StrategyName, processes: int) -> tuple[float, float]:
    """Weights, gradients and optimizer of a head on one process: between steps, and at most."""
    whole, share = WEIGHT + GRADIENT + MOMENTS, 1 / processes
    per_parameter = {
        "single": (whole, whole),
        "ddp": (whole, whole),
        "zero1": (WEIGHT + MOMENTS * share, WEIGHT + GRADIENT + MOMENTS * share),
        "zero2": (WEIGHT + MOMENTS * share, WEIGHT + (GRADIENT + MOMENTS) * share),
        "zero3": ((WEIGHT + MOMENTS) * share, WEIGHT + (WEIGHT + GRADIENT + MOMENTS) * share),
        "fsdp2": ((WEIGHT + MOMENTS) * share, WEIGHT + GRADIENT + (WEIGHT + MOMENTS) * share),
    }
    resting, most = per_parameter[strategy]
    return trained * resting, trained * most


def activation_bytes(model: Model, rows: float, steps: int, element: int, recompute: bool = False) -> float:
    """What the forward pass of a rollout keeps for the backward pass. Its first step is never recomputed."""
    H = model.width
    step = 8 * H + 3 * model.queries + 2 * model.keys + 2 * model.inner
    later = 6 * H + 2 * model.keys if recompute else step
    return rows * (step + (steps - 1) * later) * element


def chunk_bytes(model: Model, job: Job) -> float:
    """Of logits, in the loss."""
    return max(LEAST_CHUNK, 4.0 * job.draft_vocabulary * model.width)


def batch_bytes(model: Model, job: Job) -> float:
    """The features of a batch."""
    rows = job.tokens_per_batch * job.answer / job.length
    return HALF * model.width * (job.tokens_per_batch * job.taps + rows)


def store_bytes(model: Model, job: Job, dtype: str = "bfloat16") -> float:
    """The features of the corpus on disk."""
    per_token, per_row = bytes_per_token(job.taps, model.width, dtype)
    return job.tokens * per_token + job.answers * per_row


# Work


def head_flops(model: Model, job: Job) -> float:
    """Of one pass over the corpus: 2 for each weight that a row passes forward, 4 backward."""
    H, rows = model.width, job.answers * job.steps
    inside = 2 * H * model.queries + 2 * H * model.keys + 3 * H * model.inner
    context = job.taps * H * H + 2 * H * model.keys  # fusion, and keys and values of step 0
    seen = job.length / 2
    attention = 14 * model.queries * seen  # two products forward, five backward
    return (
        rows * (6 * (inside + H * job.draft_vocabulary) + attention)
        + 6 * job.tokens * context
        + 2 * job.answers * H * job.draft_vocabulary
    )


def forward_flops(model: Model, tokens: float) -> float:
    """Of the target over texts, attention left aside."""
    return 2 * model.active * tokens


# Plans


@dataclass(frozen=True)
class Placement:
    """Where a target's weights lie, and what a GPU holds of them; `gathered`: bytes that each GPU receives for one pass."""

    name: str
    bytes: float
    gathered: float = 0.0
    speed: float = 0.0


@dataclass(frozen=True)
class Outlook:
    """One row of a plan."""

    placement: Placement
    memory: float
    hours: dict[str, float]
    bottleneck: str


def placements(model: Model, machine: Machine) -> list[Placement]:
    """Ways to hold the whole target, the fastest first."""
    weights, layer = HALF * model.parameters, HALF * (model.parameters - model.ends) / model.layers
    found = [Placement("whole on each GPU", weights)]
    if machine.local > 1:
        layers = weights - HALF * model.ends
        share = HALF * model.ends + layers / machine.local + 2 * layer
        found.append(
            Placement("spread over a machine", share, layers * (1 - 1 / machine.local), machine.link * machine.link_use)
        )
    return found


def head_memory(model: Model, job: Job, machine: Machine, strategy: StrategyName) -> float:
    """Of training a head, the target left aside; the computation in bf16 over fp32 weights."""
    rows = job.tokens_per_batch * job.answer / job.length
    state = state_bytes(head_parameters(model, job), strategy, machine.gpus)[1]
    # bf16 keeps every activation in 2 bytes, and the ends of the loss in 4
    held = activation_bytes(model, rows, job.steps, HALF) + 2 * rows * job.steps * model.width * WEIGHT
    return state + held + chunk_bytes(model, job) + batch_bytes(model, job) + SPARE


def generation_seconds(model: Model, job: Job, machine: Machine) -> float:
    """Answers by the target: weights are read once per token of all answers, keys and values for each; by as many GPUs as hold
    the weights, or not at all (nan).
    """
    together = 1
    while HALF * model.parameters / together > 0.8 * machine.memory:
        together *= 2
    if together > machine.local:
        return float("nan")
    rows = job.generated_together * together
    cache = rows * (job.length - job.answer / 2) * 2 * model.keys * model.layers * HALF
    reading = (HALF * model.parameters + cache) / (together * machine.bandwidth * machine.memory_use)
    computing = forward_flops(model, rows) / (together * machine.flops * machine.target_use)
    return job.answers / rows * max(reading, computing) / (machine.gpus // together)


def target_seconds(model: Model, job: Job, machine: Machine, placement: Placement) -> dict[str, float]:
    """The target over the corpus once: its own work, and the gathering of its layers."""
    work = forward_flops(model, job.tokens) / (machine.gpus * machine.flops * machine.target_use)
    passes = job.tokens / (job.tokens_per_batch * machine.gpus)
    gathering = passes * placement.gathered / placement.speed if placement.speed else 0.0
    return {"target": work, "gathering the target": gathering}


def head_seconds(model: Model, job: Job, machine: Machine) -> float:
    """The head over the corpus, all epochs."""
    return job.epochs * head_flops(model, job) / (machine.gpus * machine.flops * machine.head_use)


def exchange_seconds(model: Model, job: Job, machine: Machine) -> float:
    """The gradients of all steps, summed over the GPUs: each sends and receives them about twice."""
    if machine.gpus == 1:
        return 0.0
    steps = job.epochs * job.tokens / (job.tokens_per_batch * machine.gpus)
    speed = machine.network if machine.machines > 1 else machine.link
    once = GRADIENT * head_parameters(model, job) * (1 - 1 / machine.gpus)
    return steps * 2 * once / (speed * machine.link_use)


def offline(model: Model, job: Job, machine: Machine) -> Outlook:
    """Features from disk; of the target only what heads read is on the GPU."""
    reading = job.epochs * store_bytes(model, job) / (machine.machines * machine.disk)
    exchange = exchange_seconds(model, job, machine)
    parts = {"head": head_seconds(model, job, machine), "reading features": reading, "exchanging gradients": exchange}
    placement = Placement("embeddings and lm_head", HALF * model.ends)
    return outlook(model, job, machine, placement, parts)


def online(model: Model, job: Job, machine: Machine) -> Outlook | None:
    """Features by the target while the head trains; None where the target has no place beside the head."""
    beside = head_memory(model, job, machine, strategy_of(machine))
    for placement in placements(model, machine):
        if placement.bytes + beside <= machine.memory:
            seconds = {k: job.epochs * v for k, v in target_seconds(model, job, machine, placement).items()}
            seconds["exchanging gradients"] = exchange_seconds(model, job, machine)
            return outlook(model, job, machine, placement, seconds | {"head": head_seconds(model, job, machine)})
    return None


def outlook(model: Model, job: Job, machine: Machine, placement: Placement, parts: dict[str, float]) -> Outlook:
    """Target and head take turns on a GPU; reading, gathering and exchanging go on beside them, so the slowest rules."""
    work = parts.get("target", 0.0) + parts["head"]
    beside = {name: seconds for name, seconds in parts.items() if name not in ("target", "head")}
    slowest = max(beside, key=lambda name: beside[name], default="")
    waits = slowest and beside[slowest] > work
    bottleneck = slowest if waits else max(("target", "head"), key=lambda name: parts.get(name, 0.0))
    total = max([work, *beside.values()])
    memory = placement.bytes + head_memory(model, job, machine, strategy_of(machine))
    hours = {name: seconds / 3600 for name, seconds in parts.items() if seconds}
    return Outlook(placement, memory, hours | {"training": total / 3600}, bottleneck)


def strategy_of(machine: Machine) -> StrategyName:
    """What is planned with: copies of the head, which is small."""
    return "ddp" if machine.gpus > 1 else "single"

"""Formulas against what they describe: real heads, real gradients, real stores."""

import pytest
import torch
from conftest import make_target
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from headwright.configs.load import build
from headwright.data.batch import DocumentFeatures, last_rows, pack
from headwright.data.store import bytes_per_token
from headwright.data.vocab import DraftVocab
from headwright.heads import get_head
from headwright.heads.base import make_head
from headwright.train.paper import (
    GRADIENT,
    MOMENTS,
    WEIGHT,
    Job,
    Machine,
    Model,
    activation_bytes,
    generation_seconds,
    head_flops,
    head_memory,
    head_parameters,
    offline,
    online,
    state_bytes,
    store_bytes,
)

JOB = Job(documents=3, length=120, answer=80, epochs=1, steps=4, draft_vocabulary=400, tokens_per_batch=360)


@pytest.fixture(scope="module")
def problem():
    """A head and a batch that the formulas describe: every document JOB.length long, its last JOB.answer tokens learned."""
    target = make_target(hidden_size=128, intermediate_size=352, vocab=512)
    spec = target.spec
    keys, queries = spec.num_kv_heads * spec.head_dim, spec.num_heads * spec.head_dim
    model = Model("tiny", spec.num_layers, spec.hidden_size, queries, keys, spec.intermediate_size, 512, 1e6, 1e6)
    config = build(get_head("eagle3").Config, {"kind": "eagle3", "steps": JOB.steps}, "test")
    head = make_head(config, spec, target.taps, DraftVocab(torch.arange(JOB.draft_vocabulary), spec.vocab_size))
    head.initialise(target)
    generator = torch.Generator().manual_seed(0)
    documents = []
    for _ in range(JOB.documents):
        mask = torch.arange(JOB.length) >= JOB.length - JOB.answer
        rows, width = len(last_rows(mask)), spec.hidden_size
        documents.append(
            DocumentFeatures(
                torch.randint(JOB.draft_vocabulary, (JOB.length,), generator=generator),
                mask,
                torch.randn(JOB.length, len(target.taps), width, generator=generator),
                torch.randn(rows, width, generator=generator),
                torch.randint(JOB.draft_vocabulary, (rows,), generator=generator),
                torch.full((rows,), 8.0),
            )
        )
    return model, head.train(), pack(documents), target


def test_parameters_are_those_of_the_head(problem):
    model, head, _, _ = problem
    assert head_parameters(model, JOB) == sum(weight.numel() for weight in head.parameters())


@pytest.mark.parametrize("recompute", [False, True])
def test_activations_are_what_the_graph_keeps(problem, recompute):
    """Bytes of the tensors that the forward pass saves, weights and features left aside: within a fifth."""
    model, head, batch, target = problem
    head.engine.recompute = recompute
    own = {weight.untyped_storage().data_ptr() for weight in [*head.parameters(), *target.model.parameters()]}
    own |= {batch.taps_TKD.untyped_storage().data_ptr(), batch.last_RD.untyped_storage().data_ptr()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        total = head.loss(batch, target).total
    head.engine.recompute = False
    rows = JOB.documents * JOB.answer
    assert total.requires_grad
    assert sum(kept.values()) == pytest.approx(activation_bytes(model, rows, JOB.steps, 4, recompute), rel=0.2)


def test_work_is_what_is_counted(problem):
    """Matrix products and attention of a step, forward and backward: within a fifth, with attention left aside on a CPU."""
    model, head, batch, target = problem
    with FlopCounterMode(display=False) as counter:
        head.loss(batch, target).total.backward()
    seen = JOB.length / 2
    attention = 14 * model.queries * seen * JOB.documents * JOB.answer * JOB.steps
    counted = sum(count for name, count in counter.get_flop_counts()["Global"].items() if "attention" not in str(name))
    assert counted == pytest.approx(head_flops(model, JOB) - attention, rel=0.2)


@given(st.integers(1, 10**9), st.integers(1, 512))
def test_sharding_keeps_every_byte_somewhere(trained, processes):
    """Between steps, over all processes: a whole copy each without sharding, one copy in all with ZeRO 3 and FSDP2."""
    whole = trained * (WEIGHT + GRADIENT + MOMENTS)
    assert state_bytes(trained, "ddp", processes) == (whole, whole) == state_bytes(trained, "single", 1)
    for strategy in ("zero3", "fsdp2"):
        assert state_bytes(trained, strategy, processes)[0] * processes == pytest.approx(trained * (WEIGHT + MOMENTS))
    order = [state_bytes(trained, name, processes)[1] for name in ("zero2", "zero1", "ddp")]
    assert order == sorted(order)
    for strategy in ("zero1", "zero2", "zero3", "fsdp2"):
        resting, most = state_bytes(trained, strategy, processes)
        assert resting <= most


def test_the_store_is_that_of_the_writer(problem):
    model, *_ = problem
    for dtype in ("bfloat16", "fp8", "float32"):
        per_token, per_row = bytes_per_token(JOB.taps, model.width, dtype)
        assert store_bytes(model, JOB, dtype) == JOB.tokens * per_token + JOB.answers * per_row


def test_a_plan_names_what_is_slowest(problem):
    """A slow disk rules an offline training, a slow link a live one; a target too large has no place."""
    large = Model("large", 32, 4096, 4096, 1024, 14336, 128256, 60e9, 60e9)
    job, eight = Job(), Machine("8", 8)
    assert offline(large, job, Machine("slow disk", 8, disk=1e8)).bottleneck == "reading features"
    assert offline(large, job, Machine("fast disk", 8, disk=1e12)).bottleneck == "head"
    live = online(large, job, eight)
    assert live is not None
    assert live.placement.name == "spread over a machine"
    assert live.bottleneck == "target"
    slow = online(large, job, Machine("slow link", 8, link=1e9))
    assert slow is not None
    assert slow.bottleneck == "gathering the target"
    assert slow.hours["training"] > live.hours["training"]
    assert online(large, job, Machine("1", 1)) is None
    assert live.memory <= eight.memory
    assert live.memory == pytest.approx(live.placement.bytes + head_memory(large, job, eight, "ddp"))
    assert generation_seconds(large, job, Machine("1", 1)) != generation_seconds(large, job, Machine("1", 1))  # nan

"""Sampling policies against a naive implementation, and draws against the distribution they are drawn from."""

import math

import pytest
import scipy.stats
import torch
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headwright.configs import UserError
from headwright.data.sampling import Policy, Said, draw


def naive(logits: list[float], policy: Policy) -> tuple[list[float], float]:
    """The probabilities in double precision, token by token, and how close the nearest decision was.

    Ranks by probability, lower id first; keeps the first top_k; of those the shortest beginning that holds the share
    top_p of their mass; of those the ones with min_p times the largest probability.
    """
    if policy.greedy:
        best = max(range(len(logits)), key=lambda i: (logits[i], -i))
        return [float(i == best) for i in range(len(logits))], 1.0
    peak = max(logits)
    weights = [math.exp((x - peak) / policy.temperature) for x in logits]
    total = math.fsum(weights)
    probs = [w / total for w in weights]
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    kept, mass, margin = [], 0.0, 1.0
    if policy.top_k and policy.top_k < len(order):
        first_out, last_in = probs[order[policy.top_k]], probs[order[policy.top_k - 1]]
        margin = (last_in - first_out) / last_in
        order = order[: policy.top_k]
    enough = policy.top_p * math.fsum(probs[token] for token in order)
    for token in order:
        if policy.top_p < 1:
            margin = min(margin, abs(mass - enough) / enough)
            if mass >= enough:
                break
        kept.append(token)
        mass += probs[token]
    if policy.min_p:
        floor = policy.min_p * probs[order[0]]
        margin = min([margin, *(abs(probs[token] - floor) / floor for token in kept)])
        kept = [token for token in kept if probs[token] >= floor]
    mass = math.fsum(probs[token] for token in kept)
    inside = set(kept)
    return [probs[i] / mass if i in inside else 0.0 for i in range(len(probs))], margin


POLICY = st.builds(
    Policy,
    temperature=st.floats(0.1, 3),
    top_k=st.sampled_from([0, 1, 2, 5, 50]),
    top_p=st.sampled_from([1.0, 0.01, 0.3, 0.8, 0.95]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 0.7]),
)


@settings(max_examples=150, deadline=None)
@given(policy=POLICY | st.just(Policy()), rows=st.integers(1, 3), size=st.integers(1, 40), seed=st.integers(0, 10**6))
def test_probs_are_the_naive_ones(policy, rows, size, seed):
    logits = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 3
    probs = policy.probs(logits)
    assert probs.dtype == torch.float32
    for row in range(rows):
        wanted, margin = naive(logits[row].tolist(), policy)
        assume(margin > 1e-4)
        torch.testing.assert_close(probs[row], torch.tensor(wanted), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "policy",
    [Policy(1.0, top_p=0.9), Policy(5.0, top_p=0.95), Policy(1.0, top_k=3000, top_p=0.999), Policy(9.0, top_k=300)],
)
@pytest.mark.parametrize("flat", [0.05, 1.0, 3.0])
def test_large_vocabulary(policy, flat):
    """More than 256·8 tokens hold the nucleus of flat logits: the search for it must widen twice."""
    logits = torch.randn(2, 5000, generator=torch.Generator().manual_seed(3)) * flat
    logits[1] *= 4  # one row with a short nucleus beside one with a long
    probs = policy.probs(logits)
    for row in range(2):
        wanted = torch.tensor(naive(logits[row].tolist(), policy)[0])
        differ = (probs[row] > 0) != (wanted > 0)
        assert int(differ.sum()) <= 2  # rounding may move the last token of thousands
        torch.testing.assert_close(probs[row][~differ], wanted[~differ], rtol=1e-3, atol=1e-6)


def test_large_vocabulary_really_widens():
    """The case above is what it says: the nucleus is longer than the first two attempts."""
    kept = int(
        (Policy(1.0, top_p=0.9).probs(torch.randn(5000, generator=torch.Generator().manual_seed(3)) * 0.05) > 0).sum()
    )
    assert kept > 256 * 8


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_any_leading_shape(batch):
    logits = torch.randn(*batch, 30, generator=torch.Generator().manual_seed(0))
    policy = Policy(0.8, top_k=7, top_p=0.8, min_p=0.02)
    flat = torch.stack([policy.probs(row) for row in logits.reshape(-1, 30)])
    torch.testing.assert_close(policy.probs(logits), flat.reshape(logits.shape))


def test_greedy_takes_the_first_maximum():
    logits = torch.tensor([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0]])
    assert Policy().probs(logits).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert Policy().choose(logits).tolist() == [1, 0]


def test_small_temperature_is_nearly_greedy():
    logits = torch.tensor([0.0, 1.0, 0.9])
    torch.testing.assert_close(Policy(1e-3).probs(logits), torch.tensor([0.0, 1.0, 0.0]))


@pytest.mark.parametrize("policy", [Policy(1.0, top_p=1e-6), Policy(1.0, top_k=1), Policy(1.0, min_p=0.999)])
def test_most_likely_always_stays(policy):
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(1))
    assert torch.equal(policy.probs(logits), Policy().probs(logits))


def test_masked_tokens_are_never_drawn():
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 1.0])
    for policy in (Policy(1.0), Policy(1.0, top_k=3), Policy(0.5, top_p=0.9), Policy(2.0, min_p=0.1)):
        probs = policy.probs(logits)
        assert probs.isfinite().all()
        assert probs[[0, 2]].tolist() == [0, 0]


def test_half_precision_logits_become_fp32():
    logits = torch.randn(100, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(Policy(0.7, top_p=0.9).probs(logits), Policy(0.7, top_p=0.9).probs(logits.float()))


@settings(max_examples=60, deadline=None)
@given(policy=POLICY, seed=st.integers(0, 10**6))
def test_filters_are_those_of_the_transformers_library(policy, seed):
    """Temperature, top-k, top-p, min-p in the order in which transformers and vLLM chain them."""
    logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(seed)) * 3
    warpers = transformers.LogitsProcessorList([transformers.TemperatureLogitsWarper(policy.temperature)])
    if policy.top_k:
        warpers.append(transformers.TopKLogitsWarper(policy.top_k))
    if policy.top_p < 1:
        warpers.append(transformers.TopPLogitsWarper(policy.top_p))
    if policy.min_p:
        warpers.append(transformers.MinPLogitsWarper(policy.min_p))
    wanted = warpers(None, logits).softmax(-1)
    assume(naive(logits[0].tolist(), policy)[1] > 1e-4)
    torch.testing.assert_close(policy.probs(logits), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": 1.0, "top_p": 0.0},
        {"temperature": 1.0, "top_p": 1.1},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 1.0, "min_p": -0.1},
        {"temperature": 1.0, "top_k": -1},
    ],
)
def test_out_of_range(values):
    with pytest.raises(UserError, match="out of range"):
        Policy(**values)


@pytest.mark.parametrize("values", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_greedy_with_a_filter_is_refused(values):
    with pytest.raises(UserError, match="mean nothing at temperature 0"):
        Policy(0.0, **values)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_temperature_is_a_finite_number(value):
    with pytest.raises(UserError, match="out of range"):
        Policy(value)


# Penalties


def said_in(prompts: list[list[int]], answers: list[list[int]], vocabulary: int) -> Said:
    """Masks of what stands in prompts and answers."""
    masks = torch.zeros(2, len(prompts), vocabulary, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(zip(prompts, answers)):
        masks[0, row, [*prompt, *answer]] = True
        masks[1, row, answer] = True
    return Said(*masks)


TOKENS = st.lists(st.integers(0, 19), max_size=8)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=3), rate=st.floats(0.2, 5), seed=st.integers(0, 10**6)
)
def test_repetition_penalty_is_that_of_the_transformers_library(rows, rate, seed):
    """Prompt and answer alike, however often a token was said, positive and negative logits."""
    logits = torch.randn(len(rows), 20, generator=torch.Generator().manual_seed(seed)) * 3
    logits[:, 3], logits[:, 4] = 0.0, -torch.inf
    said = said_in([prompt for prompt, _ in rows], [answer for _, answer in rows], 20)
    found = Policy(repetition_penalty=rate).penalise(logits, said)
    for row, (prompt, answer) in enumerate(rows):
        ids = torch.tensor([[*prompt, *answer]], dtype=torch.long)
        wanted = transformers.RepetitionPenaltyLogitsProcessor(rate)(ids, logits[row : row + 1].clone())
        torch.testing.assert_close(found[row : row + 1], wanted)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=3),
    rate=st.sampled_from([0.5, 1.0, 1.5]),
    presence=st.floats(-2, 2),
    seed=st.integers(0, 10**6),
)
def test_penalties_are_the_naive_ones(rows, rate, presence, seed):
    """Presence counts the answer alone, once for each token, after repetition."""
    logits = torch.randn(len(rows), 20, generator=torch.Generator().manual_seed(seed)) * 3
    said = said_in([prompt for prompt, _ in rows], [answer for _, answer in rows], 20)
    found = Policy(repetition_penalty=rate, presence_penalty=presence).penalise(logits, said)
    for row, (prompt, answer) in enumerate(rows):
        for token, wanted in enumerate(logits[row].tolist()):
            if token in prompt or token in answer:
                wanted = wanted / rate if wanted > 0 else wanted * rate
            if token in answer:
                wanted -= presence
            assert float(found[row, token]) == pytest.approx(wanted, abs=1e-5)


def test_penalties_of_any_leading_shape_leave_their_input_alone():
    logits = torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(0)).bfloat16()
    before, masks = logits.clone(), torch.rand(2, 2, 3, 20, generator=torch.Generator().manual_seed(1)) < 0.5
    policy = Policy(1.0, repetition_penalty=1.3, presence_penalty=0.4)
    found = policy.penalise(logits, Said(*masks))
    assert found.dtype == torch.float32
    assert torch.equal(logits, before)
    for row in range(2):
        for node in range(3):
            alone = policy.penalise(logits[row, node], Said(masks[0, row, node], masks[1, row, node]))
            assert torch.equal(found[row, node], alone)


def test_which_policies_penalise():
    assert not Policy().penalises
    assert not Policy(1.0, top_k=3).penalises
    assert Policy(repetition_penalty=1.1).penalises
    assert Policy(repetition_penalty=0.9).penalises
    assert Policy(presence_penalty=-0.1).penalises
    logits, masks = torch.randn(4, 9), torch.ones(2, 4, 9, dtype=torch.bool)
    assert torch.equal(Policy().penalise(logits, Said(*masks)), logits)


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalties_are_finite_numbers(name, value, temperature):
    with pytest.raises(UserError, match="out of range"):
        Policy(temperature, **{name: value})


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_repetition_penalty_is_positive(value):
    with pytest.raises(UserError, match="out of range"):
        Policy(repetition_penalty=value)


# Draws


@settings(max_examples=100, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 0.0, 1e-30, 0.1, 1.0, 3.0]), min_size=1, max_size=12).filter(any),
    uniform=st.floats(0, 1, exclude_max=True) | st.sampled_from([0.0, 1 - 2**-53]),
)
def test_draw_is_the_inverse_of_the_cdf(weights, uniform):
    probs = torch.tensor(weights)
    token = int(draw(probs, torch.tensor(uniform, dtype=torch.float64)))
    assert probs[token] > 0
    total = math.fsum(probs.tolist())
    below, through = math.fsum(probs[:token].tolist()) / total, math.fsum(probs[: token + 1].tolist()) / total
    assert below - 1e-12 <= uniform <= through + 1e-12


def test_draw_at_the_edges():
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]] * 4)
    uniform = torch.tensor([0.0, 0.49999, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw(probs, uniform).tolist() == [1, 1, 3, 3]
    assert draw(probs[:1], torch.tensor([1.0])).tolist() == [3]  # fp32 uniforms can round up to one


def test_draw_does_not_need_a_normalised_row():
    probs = torch.rand(7, generator=torch.Generator().manual_seed(0))
    uniform = torch.rand(50, generator=torch.Generator().manual_seed(1))
    assert torch.equal(draw(probs.expand(50, 7), uniform), draw((probs * 17).expand(50, 7), uniform))


@pytest.mark.parametrize("policy", [Policy(1.0), Policy(0.7, top_p=0.9), Policy(1.3, top_k=5), Policy(1.0, min_p=0.1)])
def test_frequencies_are_the_probabilities(policy):
    logits = torch.randn(12, generator=torch.Generator().manual_seed(5)) * 1.5
    count = 20000
    uniform = torch.rand(count, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    drawn = torch.bincount(policy.choose(logits.expand(count, 12), uniform), minlength=12)
    wanted = policy.probs(logits).double()
    inside = wanted > 0
    assert drawn[~inside].sum() == 0
    expected = wanted[inside] / wanted[inside].sum() * count
    assert scipy.stats.chisquare(drawn[inside].numpy(), expected.numpy()).pvalue > 1e-3

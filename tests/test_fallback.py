"""Drafting rests where it does not pay, and nobody reads it in the text."""

import pytest
import torch
from conftest import make_tiny_head
from hypothesis import given
from hypothesis import strategies as st
from test_decode import (
    CHAIN,
    TREE,
    Oracle,
    check_counters,
    check_draft_cache,
    check_target_cache,
    make_small,
    real_prompts,
    texts_of,
)

from headwright.configs import UserError
from headwright.data.sampling import Policy
from headwright.eval.decode import PLAIN, Decoder, Settings, generate, generate_one
from headwright.eval.drafters import PromptLookup
from headwright.eval.fallback import Fallback, Pace

NEW = 40
RULE = Fallback(break_even=2.0, window=3, rest=5, longest_rest=12)


@pytest.fixture(scope="module")
def small():
    return make_small()


@pytest.fixture(scope="module")
def prompts(small):
    return real_prompts(small, 12)


@pytest.fixture(scope="module")
def plain(small, prompts):
    """Greedy texts that no end token cuts."""
    return texts_of(generate(small, None, prompts, Settings(PLAIN, NEW, ignore_eos=True, batch=6)).generations)


@pytest.fixture(scope="module")
def known(prompts, plain):
    return [prompt + text for prompt, text in zip(prompts, plain)]


def rules(shape, **options) -> Settings:
    """With the rule of this file, unless told otherwise."""
    return Settings(shape, NEW, ignore_eos=True, **({"fallback": RULE} | options))


# Pace


def run(pace: Pace, emitted) -> list[bool]:
    """Whether each cycle drafted, where cycle n emits emitted(n) tokens if it drafts, and 1 if it rests."""
    drafted = []
    for n in range(60):
        drafted.append(pace.drafts)
        pace.update(emitted(n) if pace.drafts else 1)
    return drafted


def stretches(drafted: list[bool]) -> list[tuple[bool, int]]:
    """Lengths of runs."""
    out: list[tuple[bool, int]] = []
    for one in drafted:
        if out and out[-1][0] == one:
            out[-1] = (one, out[-1][1] + 1)
        else:
            out.append((one, 1))
    return out


def test_without_a_rule_it_always_drafts():
    assert all(run(Pace(None), lambda n: 1))


# What RULE makes of guesses that are never right: windows of three cycles between ever longer rests
RHYTHM = [(True, 3), (False, 5), (True, 3), (False, 10), (True, 3), (False, 12), (True, 3)]


def test_it_rests_after_a_bad_window_and_longer_each_time():
    """Rests double up to the longest; between them one window is tried."""
    assert stretches(run(Pace(RULE), lambda n: 1))[:7] == RHYTHM


def test_break_even_still_drafts():
    assert all(run(Pace(RULE), lambda n: 2))
    assert all(run(Pace(RULE), lambda n: (1, 1, 4)[n % 3])), "the mean of a window counts"
    assert not all(run(Pace(RULE), lambda n: (1, 1, 3)[n % 3]))


def test_a_good_window_forgives():
    """After it, the next rest is the first again."""
    pace = Pace(RULE)
    for emitted in (1, 1, 1, *[1] * 5, 1, 1, 1):
        pace.update(emitted)
    assert pace.resting == 2 * RULE.rest
    pace = Pace(RULE)
    for emitted in (1, 1, 1, *[1] * 5, 4, 4, 4, 1, 1, 1):
        pace.update(emitted)
    assert pace.resting == RULE.rest


def test_the_first_rest_may_be_the_longest():
    pace = Pace(Fallback(2.0, window=1, rest=4, longest_rest=4))
    assert stretches(run(pace, lambda n: 1))[:5] == [(True, 1), (False, 4)] * 2 + [(True, 1)]


def test_plain_passes_of_a_rest_say_nothing_about_drafting():
    """The estimate starts anew after a rest."""
    pace = Pace(RULE)
    for _ in range(RULE.window + RULE.rest):
        pace.update(1)
    assert pace.drafts
    assert pace.recent == []
    for _ in range(RULE.window):
        pace.update(3)
    assert pace.drafts


@given(
    st.floats(1.01, 6),
    st.integers(1, 6),
    st.integers(1, 9),
    st.integers(0, 30),
    st.lists(st.integers(1, 8), max_size=80),
)
def test_any_run_rests_exactly_after_windows_below_break_even(even, window, rest, more, emitted):
    """Against a replay of the rule in other words."""
    rule = Fallback(even, window, rest, rest + more)
    pace, seen, left, following = Pace(rule), [], 0, rest
    for tokens in emitted:
        assert pace.drafts == (left == 0)
        pace.update(tokens)
        if left:
            left -= 1
            continue
        seen.append(tokens)
        if len(seen) == window:
            bad, seen = sum(seen) < even * window, []
            left = following if bad else 0
            following = min(2 * following, rest + more) if bad else rest


@pytest.mark.parametrize(
    "wrong",
    [
        {"break_even": 0.0},
        {"break_even": -1.0},
        {"break_even": float("inf")},
        {"break_even": float("nan")},
        {"break_even": 2.0, "window": 0},
        {"break_even": 2.0, "rest": 0},
        {"break_even": 2.0, "rest": 9, "longest_rest": 8},
    ],
    ids=str,
)
def test_rules_out_of_range_are_refused(wrong):
    with pytest.raises(UserError, match="out of range"):
        Fallback(**wrong)


# In the decoder


def cycles_that_drafted(out) -> list[tuple[bool, int]]:
    return stretches([drafted > 0 for drafted in out.drafted])


def test_a_bad_drafter_rests_and_the_text_stays(small, known, prompts, plain):
    """One text: windows of drafting between rests that grow."""
    bad = Oracle(known, wrong=lambda history: True)
    for prompt, text in zip(prompts, plain):
        out = generate_one(small, bad, prompt, rules(bad.shape))
        assert out.tokens == text
        check_counters(out)
        assert cycles_that_drafted(out) == RHYTHM
    free = generate_one(small, bad, prompts[0], rules(bad.shape, fallback=None))
    assert all(free.drafted)


def test_a_good_drafter_never_rests(small, known, prompts, plain):
    good = Oracle(known)
    outs = generate(small, good, prompts, rules(good.shape, batch=4)).generations
    assert texts_of(outs) == plain
    assert all(drafted for out in outs for drafted in out.drafted[:-1])
    assert all(out.accepted[0] == 4 for out in outs)


def test_a_drafter_that_becomes_good_is_used_again(small, known, prompts, plain):
    """It is wrong in the first six new tokens of every text. It is told of all tokens that came while it rested."""
    for prompt, text, whole in zip(prompts, plain, known):
        begun = len(prompt) + 6
        late = Oracle([whole], wrong=lambda history, begun=begun: len(history) < begun)
        out = generate_one(small, late, prompt, rules(late.shape))
        assert out.tokens == text
        assert cycles_that_drafted(out)[:2] == [(True, 3), (False, 5)]
        assert all(drafted for drafted in out.drafted[8:-1])
        assert out.accepted[:9] == [0] * 8 + [4]
        assert [history for [history] in late.seen] == [whole[: len(history)] for [history] in late.seen]


def test_a_text_rests_while_its_neighbour_drafts(small, known, prompts, plain):
    """Guesses pay for one text of four. The others rest as they would alone, and are plain while they do."""
    one = tuple(known[2])
    half = Oracle(known, wrong=lambda history: tuple(history) != one[: len(history)])
    outs = generate(small, half, prompts[:4], rules(half.shape, batch=4)).generations
    assert texts_of(outs) == plain[:4]
    assert all(outs[2].drafted[:-1])
    for number in (0, 1, 3):
        alone = generate_one(small, half, prompts[number], rules(half.shape))
        assert (outs[number].drafted, outs[number].emitted) == (alone.drafted, alone.emitted)
        assert cycles_that_drafted(outs[number])[:2] == [(True, 3), (False, 5)]
        assert sum(outs[number].accepted) == 0


@pytest.mark.parametrize(("shape", "batch"), [(CHAIN, 1), (CHAIN, 5), (TREE, 2)], ids=lambda v: getattr(v, "name", v))
def test_texts_of_a_resting_head_stay(small, prompts, plain, shape, batch):
    """With refill: texts come and go in the middle of others' rests, and a new one starts with drafting."""
    outs = generate(small, make_tiny_head(small, None), prompts, rules(shape, batch=batch)).generations
    assert texts_of(outs) == plain
    for out in outs:
        check_counters(out)
        assert out.drafted[0] > 0
    drafted, free = (sum(count(out.drafted) for out in outs) for count in (sum, len))
    assert drafted < 0.8 * free * shape.nodes


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=lambda shape: shape.name)
def test_after_a_rest_the_heads_state_is_that_of_a_fresh_absorb(small, prompts, shape, batch):
    """What came while it rested waits, and is taken in before the next draft, also when neighbours have changed since."""
    limits = Settings(shape, 30, fallback=Fallback(4.5, 2, 4, 4), batch=batch, ignore_eos=True)
    decoder = Decoder(small, make_tiny_head(small, None), prompts[:5], limits)
    longest, taken_in = 0, 0
    for news in decoder.cycles():
        if decoder.pending is None or not all(row.out.emitted or row.out.finish for row in decoder.rows):
            continue
        for place, row in enumerate(decoder.rows):
            if not row.out.finish and any(item.number == row.number for item in news):
                check_target_cache(decoder, place)
                check_draft_cache(decoder, place)
                waiting = decoder.pending.counts[place]
                taken_in += waiting < longest
                longest = max(longest, waiting)
    assert longest > 4
    assert taken_in > 0


def test_lookup_rests_and_remembers(small, prompts, plain):
    """Tokens of a rest are in its history afterwards."""
    starts = [prompt + prompt[:10] for prompt in prompts]
    wanted = texts_of(generate(small, None, starts, rules(PLAIN, fallback=None, batch=6)).generations)
    decoder = Decoder(small, PromptLookup(), starts, rules(CHAIN, batch=3, fallback=Fallback(4.9, 2, 3, 3)))
    compared = 0
    for _ in decoder.cycles():
        for place, row in enumerate(decoder.rows):
            if not row.out.finish and decoder.pending is not None:
                waiting = decoder.pending.texts[place]
                assert decoder.state[place] + waiting == row.prompt + row.out.tokens
                compared += len(waiting) > 5 or bool(row.out.drafted and row.out.drafted[-1] == 0)
    assert texts_of(decoder.outcome().generations) == wanted
    assert compared > 20


def test_sampled_text_of_one_is_seeded_with_fallback(small, prompts):
    head, options = make_tiny_head(small, None), rules(TREE, policy=Policy(1.0, top_p=0.9))
    outs = [generate_one(small, head, prompts[4], options, seed=seed) for seed in (3, 3, 4)]
    assert outs[0].tokens == outs[1].tokens != outs[2].tokens
    assert 0 in outs[0].drafted
    assert torch.tensor(outs[0].drafted).max() == TREE.nodes


def test_sampled_text_with_fallback_does_not_depend_on_its_company(small, prompts):
    """As without fallback: the same prompts and seeds in batches of one and of three."""
    head, policy = make_tiny_head(small, None), Policy(1.0, top_p=0.9)
    alone, three = (
        generate(small, head, prompts[:6], rules(TREE, policy=policy, batch=batch)).generations for batch in (1, 3)
    )
    assert texts_of(three) == texts_of(alone)

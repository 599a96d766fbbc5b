"""Heads beside their papers: every loss, every gradient and every greedy draft equals that of a second implementation.

The second one is written from the papers' equations and shares no code with the heads: fp64, plain tensors, loops, one document
and one row at a time. A rollout is what serving would see: the rows so far, run from scratch for every token, without a cache.

Shapes: N rows, D target width, H head width, E head width of attention, V target vocabulary, W draft vocabulary.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from conftest import make_model, make_tokenizer
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from headwright.configs.load import build
from headwright.data.batch import DocumentFeatures, pack
from headwright.data.sampling import Policy
from headwright.data.target import Target
from headwright.data.vocab import DraftVocab
from headwright.heads import get_head
from headwright.heads.base import Context, make_head
from headwright.heads.draft_tree import TreeShape

LAYERS, WIDTH, WORDS = 8, 32, 100
EXACT = 1e-9


# What all papers share


def rms(x, weight, eps):
    """x / √(mean x² + ε) · weight."""
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def silu(x):
    """x · σ(x)."""
    return x / (1 + (-x).exp())


def softmax(z):
    """exp z / Σ exp z."""
    powers = (z - z.max(-1, keepdim=True).values).exp()
    return powers / powers.sum(-1, keepdim=True)


def log_softmax(z):
    """z − log Σ exp z."""
    z = z - z.max(-1, keepdim=True).values.detach()
    return z - z.exp().sum(-1, keepdim=True).log()


def turn(x_NhE, theta, first):
    """Rotary positions first, first + 1, …; the table of angles is in fp32, as every Llama has it."""
    half = x_NhE.shape[-1] // 2
    frequencies = 1.0 / theta ** (torch.arange(0, 2 * half, 2, dtype=torch.float32) / (2 * half))
    rows = []
    for place, x_hE in enumerate(x_NhE):
        angle = torch.tensor(float(first + place), dtype=torch.float32) * frequencies
        cos, sin = angle.cos().double(), angle.sin().double()
        a, b = x_hE[:, :half], x_hE[:, half:]
        rows.append(torch.cat([a * cos - b * sin, b * cos + a * sin], -1))
    return torch.stack(rows)


class Paper:
    """The tensors of a head and what it reads of its target, by name."""

    def __init__(self, head, target, tables=None):
        text, tables = target.model.config, tables or target.model
        self.w, self.config, self.kept_W = dict(head.named_parameters()), head.config, head.vocab.ids_W
        self.embedding_VD = tables.get_input_embeddings().weight
        self.unembedding_VD = tables.get_output_embeddings().weight
        self.eps, self.dim = text.rms_norm_eps, text.head_dim
        self.theta = text.rope_parameters["rope_theta"]

    def norm(self, x, name):
        """RMSNorm by the name of its weight."""
        return rms(x, self.w[f"{name}.weight"], self.eps)

    def linear(self, x, name):
        """W x + b, b where there is one."""
        out = x @ self.w[f"{name}.weight"].T
        return out + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else out

    def attention(self, x_NI, name, first=0, window=None):
        """Causal, with grouped keys; a row sees the last `window` rows, itself included."""
        q, k, v = (self.linear(x_NI, f"{name}.{part}_proj").unflatten(-1, (-1, self.dim)) for part in "qkv")
        if f"{name}.q_norm.weight" in self.w:
            q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        q, k = turn(q, self.theta, first), turn(k, self.theta, first)
        group, mixed = q.shape[1] // k.shape[1], []
        for row in range(len(x_NI)):
            seen = slice(0 if window is None else max(0, row + 1 - window), row + 1)
            parts = [
                softmax(k[seen, h // group] @ q[row, h] / math.sqrt(self.dim)) @ v[seen, h // group]
                for h in range(q.shape[1])
            ]
            mixed.append(torch.cat(parts))
        return self.linear(torch.stack(mixed), f"{name}.o_proj")

    def layer(self, attention_input, residual, name, first=0, window=None):
        """A Llama layer: attention and SwiGLU, each added to what it read."""
        x = residual + self.attention(attention_input, f"{name}.self_attn", first, window)
        y = self.norm(x, f"{name}.post_attention_layernorm")
        gate, up = self.linear(y, f"{name}.mlp.gate_proj"), self.linear(y, f"{name}.mlp.up_proj")
        return x + self.linear(silu(gate) * up, f"{name}.mlp.down_proj")

    def plain_layer(self, x, name, first=0, window=None):
        """With a norm before its attention."""
        return self.layer(self.norm(x, f"{name}.input_layernorm"), x, name, first, window)

    def shared_logits(self, x):
        """The target's lm_head, its rows of the draft vocabulary."""
        return x @ self.unembedding_VD[self.kept_W].T


# The papers. `rollout(tokens, states)`: `states` are those of positions 0 … t, `tokens` are x_1 … x_{t+1} and those that
# follow, which may be added to on the way. Yields (feature, logits) for x_{t+2}, x_{t+3}, …


class Eagle1(Paper):
    """EAGLE-1: f̂_{t+1} = Layer(fc [e_{t+1} ; f_t]), whose layer has no norm before its attention; p = softmax(W f̂)."""

    def rollout(self, tokens, states):
        features = list(states)
        while len(tokens) >= len(features):
            embedded = self.embedding_VD[torch.tensor(tokens[: len(features)])]
            stream = self.linear(torch.cat([embedded, torch.stack(features)], -1), "fc")
            predicted = self.layer(stream, stream, "layers.0")[-1]
            yield predicted, self.shared_logits(predicted)
            features.append(predicted.detach() if self.config.detach else predicted)  # HASS: detached


class Eagle3(Paper):
    """EAGLE-3: g = fc [l ; m ; h]; Layer on [norm e_{t+1} ; norm g_t], residual g_t; its output a_t stands for g_{t+1}."""

    def fuse(self, taps_KD):
        config = self.config
        if config.fc_norm:
            taps_KD = [self.norm(tap, f"fc_norm.{k}") for k, tap in enumerate(taps_KD)]
        together = torch.cat(list(taps_KD))
        return self.linear(self.norm(together, "input_norm") if config.norm_before_fc else together, "fc")

    def rollout(self, tokens, states):
        config, features = self.config, [self.fuse(taps_KD) for taps_KD in states]
        table_VH = self.w.get("embed_tokens.weight", self.embedding_VD)
        while len(tokens) >= len(features):
            g = torch.stack(features)
            e = self.norm(table_VH[torch.tensor(tokens[: len(features)])], "midlayer.input_layernorm")
            normed = self.norm(g, "midlayer.hidden_norm")
            residual = normed if config.norm_before_residual else g
            a = self.layer(torch.cat([e, normed], -1), residual, "midlayer", window=config.window)
            for above in range(config.layers - 1):
                a = self.plain_layer(a, f"layers.{above}", window=config.window)
            out = self.norm(a[-1], "norm")
            own = self.w.get("lm_head.weight")
            yield a[-1], self.shared_logits(out) if own is None else out @ own.T
            features.append(out if config.norm_output else a[-1])


class Medusa(Paper):
    """Medusa: p^(k) = softmax(W_2^(k) · (silu(W_1^(k) h_t) + h_t)), all from h_t alone."""

    def rollout(self, tokens, states):
        for head in range(self.config.steps):
            x = states[-1]
            for block in range(self.config.blocks):
                x = x + silu(self.linear(x, f"heads.{head}.{block}.linear"))
            own = self.w.get(f"lm_heads.{head}.weight")
            yield x, self.shared_logits(x) if own is None else x @ own.T


class Hydra(Paper):
    """Hydra: head i reads [h_t ; e_{t+1} ; … ; e_{t+1+i}]; Hydra++: h_t from a layer over h_0 … h_t."""

    def rollout(self, tokens, states):
        row = len(states) - 1
        h = self.plain_layer(torch.stack(list(states)), "prefix")[-1] if self.config.prefix else states[-1]
        for head in range(self.config.steps):
            if row + head >= len(tokens):
                return
            path = [self.embedding_VD[token] for token in tokens[row : row + head + 1]]
            c = torch.cat([h, *path])
            x = self.linear(c, f"heads.{head}.residual") + silu(self.linear(c, f"heads.{head}.enter"))
            for block in range(self.config.layers - 1):
                x = x + silu(self.linear(x, f"heads.{head}.blocks.{block}.linear"))
            own = self.w.get(f"lm_heads.{head}.weight")
            yield x, self.shared_logits(x) if own is None else x @ own.T


class Mtp(Paper):
    """What FastMTP and DeepSeek-V3 share: h' = M [norm e ; norm h], a layer, a norm, the target's lm_head."""

    def module(self, number, tokens, hidden, first):
        """Outputs of module `number` for rows at positions first, first + 1, …"""
        e = self.norm(self.embedding_VD[torch.tensor(tokens)], f"mtp.{number}.enorm")
        if first == 0 and self.config.mask_first:
            e = torch.cat([torch.zeros_like(e[:1]), e[1:]])
        joined = torch.cat([e, self.norm(torch.stack(hidden), f"mtp.{number}.hnorm")], -1)
        return self.plain_layer(self.linear(joined, f"mtp.{number}.eh_proj"), f"mtp.{number}.block.layer", first)

    def finish(self, number, h):
        """After the module's norm, where it has one."""
        return self.norm(h, f"mtp.{number}.norm") if self.config.norm else h

    def handed(self, number, h):
        """What is read next."""
        return self.finish(number, h) if self.config.feed == "normed" else h


class FastMtp(Mtp):
    """FastMTP: one module on its own output, as 1.12 F of the methods reference."""

    def rollout(self, tokens, states):
        hidden = list(states)
        while len(tokens) >= len(hidden):
            h = self.module(0, tokens[: len(hidden)], hidden, 0)[-1]
            yield h, self.shared_logits(self.finish(0, h))
            hidden.append(self.handed(0, h))


class DeepSeek(Mtp):
    """DeepSeek-V3: h^i_t = Layer_i(M_i [norm e_{t+1+i} ; norm h^{i−1}_t]) over all rows s ≤ t; h^{−1} is the target's."""

    def rollout(self, tokens, states):
        hidden, rows = list(states), len(states)
        for number in range(self.config.steps):
            if number + rows > len(tokens):
                return
            out = self.module(number, tokens[number : number + rows], hidden, number)
            yield out[-1], self.shared_logits(self.finish(number, out[-1]))
            hidden = [self.handed(number, h) for h in out]


# Losses of one row: p and z are over the draft vocabulary


def soft_ce(p, z):
    """−Σ p log q."""
    return -(p * log_softmax(z)).sum()


def measure(name, p, z, top_k):
    """A loss by its name."""
    if name == "kl":  # the soft cross-entropy, less what no head can change
        return soft_ce(p, z) + (p * p.log()).sum()
    best = sorted(range(len(p)), key=lambda word: -float(p[word]))
    if name == "ce":
        return -log_softmax(z)[best[0]]
    assert name == "topk"
    return -sum(p[word] * log_softmax(z)[word] for word in best[:top_k])


def mixed(config, p, z):
    """The loss that a config asks for."""
    shares = config.loss if isinstance(config.loss, dict) else {config.loss: 1.0}
    return sum(share * measure(name, p, z, config.loss_top_k) for name, share in shares.items())


def smooth_l1(a, b):
    """½ d² where |d| < 1, else |d| − ½; the mean over the width."""
    parts = [0.5 * d * d if abs(float(d.detach())) < 1 else d.abs() - 0.5 for d in a - b]
    return sum(parts) / len(parts)


@dataclass
class Text:
    """A document with all of the target's states: x, which are response tokens, taps, and h after the final norm."""

    ids: list[int]
    mask: list[bool]
    learn: list[bool]
    taps_TKD: torch.Tensor
    h_TD: torch.Tensor

    def bears(self, row, step, first_draft=True):
        """x_{t+1} … x_{t+2+i} are response tokens of one turn, and the row is to be learned."""
        last = row + 2 + step
        wanted = self.learn[row] and (first_draft or self.mask[row])
        return wanted and last < len(self.ids) and all(self.mask[row + 1 : last + 1])


def paper_loss(paper, texts, states_of, scale_of=lambda text: 1.0):
    """Σ_i w^i Σ_rows of the head's loss. states_of(text): what the head reads at each position."""
    config, total = paper.config, 0.0
    for text in texts:
        states = states_of(text)
        for row in range(len(text.ids)):
            if not text.bears(row, 0, config.first_draft):
                continue
            steps = [i for i in range(config.steps) if text.bears(row, i, config.first_draft)]
            tokens = text.ids[1 : row + 2 + steps[-1]]
            for i, (feature, z) in zip(steps, paper.rollout(tokens, states[: row + 1])):
                h = text.h_TD[row + 1 + i]
                said = h @ paper.unembedding_VD.T
                if config.out_of_vocab == "drop" and int(said.argmax()) not in paper.kept_W.tolist():
                    continue
                loss = mixed(config, softmax(said[paper.kept_W]), z)
                if isinstance(paper, Eagle1):
                    loss = loss + config.feature_weight * smooth_l1(feature, h)
                total = total + config.step_weight**i * loss
    return total


# Targets, texts and heads


@pytest.fixture(scope="module", autouse=True)
def wide_norms():
    """transformers' norms compute in fp32 whatever they are given; here in fp64, so that 1e-9 may be asked for."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in (LlamaRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm):
            patch.setattr(kind, "forward", lambda self, x: rms(x, self.weight, self.variance_epsilon))
        yield


def make_target64(family="llama", taps=(LAYERS,)):
    """A tiny target in fp64."""
    return Target(make_model(family).double(), make_tokenizer(), f"tiny-{family}", taps)


@pytest.fixture(scope="module")
def targets(wide_norms):
    """Targets by family and taps, each made once."""
    made = {}

    def get(family, taps):
        if (family, taps) not in made:
            made[family, taps] = make_target64(family, taps)
        return made[family, taps]

    return get


MASKS = (
    "..####.###.",  # two turns
    "...######",
    "#####",  # nothing but an answer
    "..#",  # one response token: nothing to learn
    ".#.##.#",  # short turns
    ".....",  # no answer
    ".############",  # of which only some rows are learned
)
PARTLY = (3, 4, 9)


def write(target, mask, seed, learn=None):
    """Random tokens and states."""
    generator = torch.Generator().manual_seed(seed)
    taps_TKD = torch.randn(len(mask), len(target.taps), WIDTH, generator=generator, dtype=torch.float64) * 2
    norm = target.model.model.norm
    return Text(
        torch.randint(target.spec.vocab_size, (len(mask),), generator=generator).tolist(),
        [letter == "#" for letter in mask],
        [learn is None or row in learn for row in range(len(mask))],
        taps_TKD,
        rms(taps_TKD[:, -1], norm.weight, norm.variance_epsilon).detach(),
    )


def write_all(target, masks=MASKS):
    """One text per mask."""
    return [write(target, mask, 100 + n, PARTLY if n == 6 else None) for n, mask in enumerate(masks)]


def as_batch(target, texts):
    """What training is given: `last` only where two response tokens stand together."""
    documents = []
    for text in texts:
        rows = [t for t in range(len(text.ids) - 1) if text.mask[t] and text.mask[t + 1]]
        last_RD = text.h_TD[rows]
        z = last_RD @ target.model.get_output_embeddings().weight.T
        documents.append(
            DocumentFeatures(
                torch.tensor(text.ids),
                torch.tensor(text.mask),
                text.taps_TKD,
                last_RD,
                z.argmax(-1),
                z.logsumexp(-1),
                None if all(text.learn) else torch.tensor(text.learn),
            )
        )
    return pack(documents)


def make_head64(target, kind, words=WORDS, **options):
    """A head with all its weights random."""
    config = build(get_head(kind).Config, {"kind": kind, **options}, "test")
    generator = torch.Generator().manual_seed(3)
    size = target.spec.vocab_size
    ids_W = torch.randperm(size, generator=generator)[:words].sort().values if words else torch.arange(size)
    torch.manual_seed(1)
    head = make_head(config, target.spec, target.taps, DraftVocab(ids_W, size))
    head.attach(target)
    head.initialise(target)
    head.double()
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.15)
    return head.eval()


def assert_same_gradients(head, ours, theirs, bound=EXACT, idle=()):
    """Both values, and the gradient of every parameter; none but `idle` ones is zero."""
    assert float(theirs.detach()) > 1.0
    assert abs(float(ours.detach()) - float(theirs.detach())) <= bound * abs(float(theirs.detach()))
    names, weights = zip(*head.named_parameters())
    for name, a, b in zip(
        names,
        torch.autograd.grad(ours, weights, allow_unused=True),
        torch.autograd.grad(theirs, weights, allow_unused=True),
    ):
        if idle and name.endswith(idle):
            assert b is None or not b.any(), name
            assert a is None or not a.any(), name
            continue
        assert a is not None, name
        assert b is not None, name
        assert float(b.abs().max()) > 1e-6, f"{name} has no part in the loss: nothing is compared"
        assert float((a - b).abs().max()) <= bound * float(b.abs().max()), name


# The cases: name → (paper, kind, family, draft vocabulary (0: all), options)

CASES = {
    "eagle1": (Eagle1, "eagle1", "llama", 0, {}),
    "eagle1, reduced": (Eagle1, "eagle1", "llama", WORDS, {"steps": 2, "fc_bias": True, "feature_weight": 0.3}),
    "eagle1, drop": (
        Eagle1,
        "eagle1",
        "llama",
        180,  # so that what is dropped lies between rows that are not
        {"steps": 2, "loss": "ce", "out_of_vocab": "drop", "intermediate_size": 24},
    ),
    "hass": (
        Eagle1,
        "eagle1",
        "llama",
        0,
        {"steps": 3, "detach": True, "step_weight": 1.0, "loss": {"kl": 0.1, "topk": 1.0}},
    ),
    "hass, undetached": (Eagle1, "eagle1", "llama", 0, {"steps": 3, "loss": "topk", "loss_top_k": 4}),
    "eagle3": (Eagle3, "eagle3", "llama", WORDS, {"fc_norm": False}),
    "eagle3, renormalise": (Eagle3, "eagle3", "llama", WORDS, {"out_of_vocab": "renormalise", "step_weight": 0.7}),
    "eagle3.1": (Eagle3, "eagle3", "llama", WORDS, {"fc_norm": True, "norm_output": True, "first_draft": False}),
    "eagle3, norm_before_fc": (Eagle3, "eagle3", "llama", WORDS, {"fc_norm": False, "norm_before_fc": True}),
    "eagle3, norm_before_residual": (Eagle3, "eagle3", "llama", WORDS, {"norm_before_residual": True, "qk_norm": True}),
    "eagle3, two layers": (Eagle3, "eagle3", "llama", WORDS, {"layers": 2, "norm_output": True}),
    "eagle3, window": (Eagle3, "eagle3", "llama", WORDS, {"window": 6, "qk_norm": True, "steps": 4}),
    "eagle3, everything": (
        Eagle3,
        "eagle3",
        "llama",
        0,
        {
            "layers": 2,
            "norm_output": True,
            "norm_before_residual": True,
            "qk_norm": True,
            "window": 6,
            "lm_head": "shared",
            "loss": {"kl": 0.1, "topk": 1.0},
        },
    ),
    "eagle3, own width": (Eagle3, "eagle3", "llama", WORDS, {"hidden_size": 16, "loss": "topk"}),
    "eagle3, shared": (Eagle3, "eagle3", "llama", WORDS, {"lm_head": "shared", "intermediate_size": 24}),
    "medusa": (Medusa, "medusa", "llama", 0, {}),
    "medusa, reduced": (Medusa, "medusa", "llama", WORDS, {"blocks": 2, "bias": False, "loss": "ce"}),
    "medusa, shared": (Medusa, "medusa", "llama", WORDS, {"lm_head": "shared", "steps": 3}),
    "hydra": (Hydra, "hydra", "llama", WORDS, {}),
    "hydra++": (Hydra, "hydra", "llama", WORDS, {"prefix": True, "layers": 4, "steps": 3}),
    "hydra++, shared": (Hydra, "hydra", "llama", 0, {"prefix": True, "layers": 2, "steps": 3, "lm_head": "shared"}),
    "mtp": (FastMtp, "mtp", "llama", WORDS, {}),
    "mtp, raw": (FastMtp, "mtp", "llama", 0, {"feed": "raw", "mask_first": False, "steps": 4}),
    "mtp, ernie": (FastMtp, "mtp", "qwen3", WORDS, {"block": "llama", "start": "random", "norm": False, "feed": "raw"}),
    "mtp, qwen3": (FastMtp, "mtp", "qwen3", WORDS, {"loss": {"kl": 0.1, "topk": 1.0}}),
    "mtp, qwen2": (FastMtp, "mtp", "qwen2", WORDS, {"out_of_vocab": "renormalise"}),
    "mtp modules": (DeepSeek, "mtp", "llama", WORDS, {"modules": 3, "step_weight": 1.0}),
    "mtp modules, raw": (DeepSeek, "mtp", "llama", 0, {"modules": 3, "feed": "raw", "first_draft": False}),
    "mtp modules, unmasked": (DeepSeek, "mtp", "qwen3", WORDS, {"modules": 2, "steps": 2, "mask_first": False}),
}


def make_case(name, targets):
    """(paper, head, target) and what the head reads of a text."""
    paper, kind, family, words, options = CASES[name]
    target = targets(family, (1, 3, 6) if kind == "eagle3" else (LAYERS,))
    head = make_head64(target, kind, words, **options)
    return (
        paper(head, target),
        head,
        target,
        (lambda text: text.taps_TKD) if kind == "eagle3" else lambda text: text.h_TD,
    )


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_the_papers(name, targets):
    paper, head, target, states_of = make_case(name, targets)
    texts = write_all(target)
    ours = head.loss(as_batch(target, texts), target).total
    assert_same_gradients(head, ours, paper_loss(paper, texts, states_of))


# Drafts


def context_of(target, texts, starts, stops):
    """Rows `starts` to `stops` of some texts, which the target has confirmed, padded to the longest."""
    most = max(stop - start for start, stop in zip(starts, stops))

    def rows(of):
        parts = [of(text)[start:stop] for text, start, stop in zip(texts, starts, stops)]
        return torch.stack([torch.cat([part, part[:1].expand(most - len(part), *part.shape[1:])]) for part in parts])

    return Context(
        target,
        rows(lambda text: torch.tensor(text.ids[1:])),
        rows(lambda text: text.taps_TKD),
        rows(lambda text: text.h_TD),
        Policy(),
        lambda: torch.zeros(len(texts), dtype=torch.float64),
        counts=[stop - start for start, stop in zip(starts, stops)],
        texts=[text.ids[start + 1 if start else 0 : stop + 1] for text, start, stop in zip(texts, starts, stops)],
    )


@torch.no_grad()
def paper_draft(paper, text, states, stop, depth):
    """Greedy tokens after x_0 … x_stop, each from all that came before it."""
    tokens = text.ids[1 : stop + 1]
    for _, z in paper.rollout(tokens, states[:stop]):
        tokens.append(int(paper.kept_W[z.argmax()]))
        if len(tokens) == stop + depth:
            break
    return tokens[stop:]


@torch.no_grad()
def paper_logprob(paper, text, states, stop, path):
    """log q of a path after x_0 … x_stop."""
    tokens, total = text.ids[1 : stop + 1] + path[:-1], 0.0
    for token, (_, z) in zip(path, paper.rollout(tokens, states[:stop])):
        total += float(log_softmax(z)[paper.kept_W.tolist().index(token)])
    return total


@pytest.mark.parametrize("name", CASES)
def test_drafts_are_the_papers(name, targets):
    """Two texts of different lengths, over three cycles: chains token by token, then a tree by the value of every node."""
    paper, head, target, states_of = make_case(name, targets)
    texts = [write(target, "." * 15, 7), write(target, "." * 12, 8)]
    depth = 5 if head.deepest is None else head.config.steps
    state, before = head.start(2, 24), [0, 0]
    for stops in ([7, 1], [8, 4]):
        tree = head.propose(state, context_of(target, texts, before, stops), TreeShape.chain(depth))
        for row, (text, stop) in enumerate(zip(texts, stops)):
            wanted = paper_draft(paper, text, states_of(text), stop, depth)
            assert tree.tokens_BN[row].tolist() == [text.ids[stop], *wanted]
        before = stops
    depth, stops = min(3, depth), [11, 9]
    shape = TreeShape.dynamic(depth, 2, 6) if depth > 1 else TreeShape.chain(1)
    tree = head.propose(state, context_of(target, texts, before, stops), shape)
    for row, (text, stop) in enumerate(zip(texts, stops)):
        tokens, parents = tree.tokens_BN[row].tolist(), tree.parents_BN[row].tolist()
        for node in range(1, len(tokens)):
            path, place = [], node
            while place:
                path, place = [tokens[place], *path], parents[place]
            value = paper_logprob(paper, text, states_of(text), stop, path)
            assert abs(float(tree.logprobs_BN[row, node]) - value) < 1e-4


# EAGLE-1's noise


@pytest.mark.parametrize("noise", ["paper", "code"])
@pytest.mark.parametrize("steps", [1, 2])
def test_noise_is_that_of_the_paper_or_of_its_code(targets, monkeypatch, noise, steps):
    """U(−0.1, 0.1), or (rand − 0.5) · 0.2 · 512 / length: with the same draws, the same loss. Only what the target said is
    disturbed, never what the head reads of itself, nor what it is compared with.
    """
    target = targets("llama", (LAYERS,))
    head = make_head64(target, "eagle1", 0, noise=noise, steps=steps).train()
    texts, paper = write_all(target), Eagle1(head, target)
    column_D = torch.linspace(0.03, 0.97, WIDTH, dtype=torch.float64)[
        torch.randperm(WIDTH, generator=torch.Generator().manual_seed(0))
    ]
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: column_D.expand(shape[0]))

    def noisy(text):
        if noise == "paper":
            return text.h_TD + (-0.1 + 0.2 * column_D)
        return text.h_TD + (column_D - 0.5) * 0.2 * 512 / len(text.ids)

    ours = head.loss(as_batch(target, texts), target).total
    monkeypatch.undo()
    bound = EXACT if noise == "paper" else 1e-6  # the lengths' share is made in fp32
    assert_same_gradients(head, ours, paper_loss(paper, texts, noisy), bound)


def test_noise_is_uniform_and_independent_for_every_number(targets):
    """Within ±0.1, flat, without correlation between neighbours; another batch has other noise, the same one the same."""
    target = targets("llama", (LAYERS,))
    head = make_head64(target, "eagle1", 0).train()

    def draw(seed):
        text = write(target, "." + "#" * 200, seed)
        heard = []
        own = head.disturb

        def disturb(feature_CH, batch, plan):
            out = own(feature_CH, batch, plan)
            heard.append(out - feature_CH)
            return out

        head.disturb = disturb
        head.loss(as_batch(target, [text]), target)
        del head.disturb
        return heard[0].flatten()

    first, again, other = draw(1), draw(1), draw(2)
    assert torch.allclose(first, again, atol=1e-9)
    assert float((first - other).abs().mean()) > 0.05
    assert float(first.abs().max()) <= 0.1 + 1e-6
    assert float(first.abs().max()) > 0.0995
    counts = torch.histc(first, 10, -0.1, 0.1)
    assert float((counts / len(first) - 0.1).abs().max()) < 0.015
    table = first.view(-1, WIDTH)
    for a, b in ((table[1:], table[:-1]), (table[:, 1:], table[:, :-1])):
        assert abs(float((a * b).mean() / first.var())) < 0.05


# Medusa-2


def adapted_states(clean, head, ids):
    """h of a text under W + α/r · B A, by transformers itself on merged weights."""
    config, merged = head.config.adapter, {}
    for name, part in head.adapter.parts.named_children():
        name = name.replace("/", ".") + ".weight"
        update = part["B"].weight @ part["A"].weight
        merged[name] = clean.get_parameter(name) + config.alpha / config.rank * update
    assert len(merged) == LAYERS * len(config.modules)
    out = torch.func.functional_call(
        clean, merged, (torch.tensor([ids]),), {"output_hidden_states": True, "use_cache": False}
    )
    return out.hidden_states[-1][0]


def joint_loss(head, target, clean, texts):
    """What holds the adapted target to the old one, and the heads' loss on the adapted target's states."""
    live = {id(text): adapted_states(clean, head, text.ids) for text in texts}
    paper, config, kept = Medusa(head, target, clean), head.config.adapter, 0.0
    for text in texts:
        for row in range(len(text.ids)):
            if text.bears(row, 0):
                p = softmax(text.h_TD[row + 1] @ paper.unembedding_VD.T)
                z = live[id(text)][row + 1] @ paper.unembedding_VD.T
                kept = kept + config.distil * measure("kl", p, z, 0) + config.text * measure("ce", p, z, 0)
    return kept, paper_loss(paper, texts, lambda text: live[id(text)])


@pytest.fixture
def medusa2(monkeypatch):
    """A maker of (head, target, an untouched copy of the target). The distance to the old target is made in fp32; here in
    fp64.
    """
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)

    def make(words=WORDS, adapter=None, **options):
        target = make_target64()
        head = make_head64(target, "medusa", words, adapter={"rank": 3, "alpha": 6, **(adapter or {})}, **options)
        return head, target, make_model().double().requires_grad_(False)

    return make


@pytest.mark.parametrize(
    ("progress", "share", "adapter", "options"),
    [
        (0.6, 1.0, {"ramp": "constant", "heads_weight": 0.3}, {}),
        (0.7, math.sin(math.pi / 2 * 0.4), {}, {"lm_head": "shared", "steps": 3}),
        (1.0, 1.0, {"distil": 0.7, "text": 0.4}, {"loss": {"kl": 0.1, "topk": 1.0}, "steps": 2}),
        (0.5, math.sin(math.pi / 2 * 0.375), {"joint_from": 0.2, "modules": ["q_proj", "down_proj"]}, {"steps": 2}),
    ],
)
def test_medusa2_loss_and_gradients_are_the_papers(medusa2, progress, share, adapter, options):
    """L = KL(base ‖ adapted) + λ(t) Σ_k 0.8^k L_k, k from 1; the heads read the adapted target; the adapter's gradients too."""
    head, target, clean = medusa2(adapter=adapter, **options)
    head.engine.progress = progress
    texts, strength = write_all(target), head.config.adapter.heads_weight * share
    ours = head.loss(as_batch(target, texts), target).total
    kept, heads = joint_loss(head, target, clean, texts)
    assert_same_gradients(head, ours, kept + strength * head.config.step_weight * heads)


def test_medusa2_weighs_its_heads_as_the_official_code(medusa2):
    """L_LM + λ Σ_{k ≥ 1} 0.8^k L_k: the first head already counts 0.8, beside a loss of the target that counts 1."""
    head, target, clean = medusa2(adapter={"ramp": "constant", "heads_weight": 0.2}, steps=2)
    head.engine.progress, texts = 1.0, write_all(target)
    ours = head.loss(as_batch(target, texts), target).total
    kept, heads = joint_loss(head, target, clean, texts)
    assert_same_gradients(head, ours, kept + 0.2 * 0.8 * heads)


def test_medusa2_begins_with_the_heads_alone(medusa2):
    """Before joint_from: Medusa-1 on the old target's states; no gradient for the adapter."""
    head, target, clean = medusa2()
    texts = write_all(target)
    head.engine.progress = 0.4
    head.train()
    ours = head.loss(as_batch(target, texts), target).total
    idle = tuple(name for name, _ in head.adapter.named_parameters())
    theirs = paper_loss(Medusa(head, target, clean), texts, lambda text: text.h_TD)
    assert_same_gradients(head, ours, theirs, idle=idle)


def test_medusa2_drafts_from_the_adapted_target(medusa2):
    """The target that the decoder runs is the one with merged weights."""
    head, target, clean = medusa2()
    text = write(target, "." * 12, 5)
    states = target.features(torch.tensor([text.ids]))
    merged = adapted_states(clean, head, text.ids).detach()
    assert torch.allclose(states.last_BND[0], merged, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(merged, clean.model(torch.tensor([text.ids])).last_hidden_state[0], atol=0.1)
    text.h_TD = states.last_BND[0].clone()
    context = context_of(target, [text], [0], [9])
    tree = head.propose(head.start(1, 24), context, TreeShape.chain(4))
    assert tree.tokens_BN[0, 1:].tolist() == paper_draft(Medusa(head, target, clean), text, merged, 9, 4)

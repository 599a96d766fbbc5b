"""Multi-token prediction: modules in the manner of DeepSeek-V3 (arXiv 2412.19437), or one applied to its own output (FastMTP,
arXiv 2509.18362).

A module: W [enorm(embedding) ; hnorm(feature)] → a decoder layer of the target's own kind → norm → the target's lm_head. The
feature is the target's state after its final norm, or what the module before (the same one, when there is one) handed on.
Trained from scratch for any target, or from the tensors that a checkpoint ships (mtp_native.py), and written back beside them.

modules 1: the rollout of EAGLE-3: the module's keys of step 0 are kept, and each later step sees its own. modules D: module i
reads its own sequence, one token further on: token x_j gives each of them a row, from the state that the module below made of
x_{j-1}.

Shapes: B texts, M new rows, C context rows, P computed rows, N rows of a step, D target width, Q query heads, G key-value
heads, E head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor, nn

from headwright.configs import UserError
from headwright.data.batch import FeatureBatch, shift, to_device
from headwright.data.block import DecoderBlock, make_block, renew
from headwright.data.cache import KVCache
from headwright.data.rows import Rows, Spans
from headwright.data.target import Target, TargetSpec
from headwright.data.vocab import DraftVocab
from headwright.heads.attention import rollout_attention
from headwright.heads.base import Context, Export
from headwright.heads.draft_tree import Tree, TreeShape
from headwright.heads.grow import Frontier, grow
from headwright.heads.layers import RMSNorm, attend
from headwright.heads.mtp_native import FAMILIES, import_native, layer_place
from headwright.heads.mtp_tables import export_native
from headwright.heads.mtp_vehicles import FAMILIES as VEHICLES
from headwright.heads.mtp_vehicles import export_vehicle
from headwright.heads.pair import Pair
from headwright.heads.recurrent import Recurrent
from headwright.heads.stepwise import SharedOrOwn, StepwiseConfig


@dataclass
class Config(StepwiseConfig):
    """Keys of an MTP head."""

    kind: Literal["mtp"] = "mtp"
    step_weight: Annotated[float, "weight of step i is step_weight**i; FastMTP: 0.6, DeepSeek: 1", Gt(0), Le(1)] = 0.6
    modules: Annotated[int, "1: one module, applied to its own output; as many as steps: one for each step", Ge(1)] = 1
    block: Annotated[
        Literal["target", "llama"],
        "kind of the decoder layer: the target's, or Llama's (what engines' ERNIE vehicle computes)",
    ] = "target"
    start: Annotated[
        Literal["last-layer", "random", "native"],
        "the layer's first weights: those of the target's last layer; random; or the MTP tensors of the target's checkpoint",
    ] = "random"
    norm: Annotated[bool, "a norm after the layer; ERNIE's has none"] = True
    feed: Annotated[
        Literal["normed", "raw"], "what the next step reads of an output: after that norm, or before it"
    ] = "normed"
    mask_first: Annotated[bool, "the token at position 0 counts as zeros, as engines have it"] = True
    native: Annotated[dict[str, Any], "filled in by start: native: family and place of the checkpoint's tensors"] = (
        field(default_factory=dict)
    )

    def __post_init__(self) -> None:
        if self.modules not in (1, self.steps):
            raise UserError(f"head.modules {self.modules}: 1, or as many as head.steps ({self.steps})")
        if self.block == "llama" and self.start == "native":
            raise UserError(
                "head.start native: a checkpoint's own module has the target's kind of layer: head.block=target"
            )

    def choose_taps(self, layers: int, stored: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """The stream after the last layer."""
        return (layers,)


class Module(nn.Module):
    """One MTP module. The decoder layer comes with the target."""

    block: DecoderBlock

    def __init__(self, config: Config, spec: TargetSpec):
        super().__init__()
        width, eps = spec.hidden_size, spec.rms_norm_eps
        self.enorm, self.hnorm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.norm = RMSNorm(width, eps) if config.norm else nn.Identity()
        self.pair = Pair(self.eh_proj, self.enorm, self.hnorm, config.mask_first)

    def like(self, gain_from_zero: bool, mask_first: bool) -> None:
        """Compute as a family does."""
        self.pair.mask_first = mask_first
        for part in (self.enorm, self.hnorm, self.norm):
            if isinstance(part, RMSNorm):
                part.offset = 1.0 if gain_from_zero else 0.0

    def forward(self, token_XD: Tensor, feature_XD: Tensor, positions_X: Tensor, attending: "Attending") -> Tensor:
        """The layer's output for rows [N] or [B, N], before the norm."""
        stream = self.pair.join(token_XD, feature_XD, positions_X)
        if stream.ndim == 3:
            return self.block(stream, positions_X, attending)
        return self.block(stream[None], positions_X[None], attending)[0]


class Attending:
    """A block's attention in a rollout: over step-0 keys (none given: these are they) and the rows' own later ones."""

    def __init__(self, spans: Spans, context: "Attending | None" = None, own: Sequence[tuple[Tensor, Tensor]] = ()):
        self.spans, self.context, self.before = spans, context, own
        self.made: tuple[Tensor, Tensor]

    def __call__(self, query_1QNE: Tensor, keys_1GNE: Tensor, values_1GNE: Tensor) -> Tensor:
        query, keys, values = (part[0].transpose(0, 1) for part in (query_1QNE, keys_1GNE, values_1GNE))
        self.made = (keys, values)
        if self.context is None:
            return rollout_attention(query, keys, values, self.spans, ())[None]
        return rollout_attention(query, *self.context.made, self.spans, [*self.before, self.made])[None]


class Head(Recurrent):
    """The trainable head."""

    config: Config

    def __init__(self, config: Config, spec: TargetSpec, taps: tuple[int, ...], vocab: DraftVocab):
        super().__init__(config, spec, taps, vocab)
        self.mtp = nn.ModuleList(Module(config, spec) for _ in range(config.modules))
        self.links: list[Module] = list(self.mtp)  # type: ignore[arg-type]
        self.lm_head = SharedOrOwn(False, spec.hidden_size, vocab)
        self.chained = config.modules > 1
        self.deepest = config.modules if self.chained else None

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.links[0].eh_proj.weight.dtype

    def attach(self, target: Target) -> None:
        """A decoder layer of the target's kind for every module."""
        super().attach(target)
        for module in self.links:
            module.block = make_block(target, self.config.block, self.layer_like(target)).to(
                module.eh_proj.weight.device
            )
            if self.config.native:
                family = FAMILIES[self.config.native["family"]]
                module.like(family.gain_from_zero, family.mask_first)

    def layer_like(self, target: Target) -> int | None:
        """The layer of the target whose kind the modules have; None: the last."""
        if self.config.start != "native":
            return None
        if "like" in self.config.native:
            return int(self.config.native["like"])
        return layer_place(target.folder(), list(target.body.layers))

    def initialise(self, target: Target) -> None:
        """The layers as the config asks. Beside a layer that knows what to do, eh_proj starts by handing on the feature."""
        if self.config.start == "native":
            like = self.layer_like(target)
            self.config.native = import_native(self, target.folder()) | ({} if like is None else {"like": like})
            return
        for module in self.links:
            if self.config.start == "random":
                renew(module.block, self.spec)
            else:
                module.block.start_as(target)
                with torch.no_grad():
                    module.eh_proj.weight[:, self.spec.hidden_size :] = torch.eye(self.spec.hidden_size)

    def read(self, taps_XKD: Tensor, target: Target) -> Tensor:
        """The target's final norm of its last state."""
        return target.final_norm(taps_XKD[..., -1, :])

    def read_context(self, context: Context) -> Tensor:
        """The same, as the target has it already."""
        return context.last_BMD.to(self.dtype)

    def feed(self, hidden_XD: Tensor) -> Tensor:
        """What the next step reads; with several modules, by the norm of the one that made it: see `handed`."""
        return self.handed(0, hidden_XD)

    def handed(self, place: int, hidden_XD: Tensor) -> Tensor:
        """What module `place` hands on."""
        return self.links[place].norm(hidden_XD) if self.config.feed == "normed" else hidden_XD

    def ready(self, hidden_XD: Tensor) -> Tensor:
        """What the lm_head reads of the one module."""
        return self.links[0].norm(hidden_XD)

    # Training

    def outputs(self, batch: FeatureBatch, target: Target, plan: Rows) -> list[Tensor]:
        """The lm_head's inputs at each step."""
        found = self.rollout(batch, target, plan)
        return [self.links[min(i, len(self.links) - 1)].norm(output) for i, output in enumerate(found)]

    def rollout(self, batch: FeatureBatch, target: Target, plan: Rows) -> list[Tensor]:
        """The modules' outputs at each step, of the rows that are computed."""
        feature_CD = self.read(batch.taps_TKD[plan.context_C].to(self.dtype), target)
        if not len(feature_CD):  # transformers' layers cannot run no rows at all
            return [feature_CD] * plan.steps
        if self.chained:
            return self.chain(batch, target, plan, feature_CD)
        return self.recursion(target, plan, feature_CD)

    def recursion(self, target: Target, plan: Rows, feature_CD: Tensor) -> list[Tensor]:
        """One module on its own output."""
        module = self.links[0]
        token_UD = module.pair.token(target.embed(plan.tokens_U).to(self.dtype))
        context = Attending(plan.everything)
        outputs = [module(token_UD[plan.reads_C], feature_CD, plan.position_C, context)[plan.place_P]]
        own: list[tuple[Tensor, Tensor]] = []
        for step in range(1, plan.steps):
            count = plan.counts[step]
            if not count:
                outputs.append(outputs[-1][:0])
                continue
            attending = Attending(plan.spans[step], context, own)
            feature_ND, positions_N = self.feed(outputs[-1][:count]), plan.position_P[:count] + step
            outputs.append(module(token_UD[plan.reads_PI[:count, step]], feature_ND, positions_N, attending))
            own = [*own, attending.made]
        return outputs

    def chain(self, batch: FeatureBatch, target: Target, plan: Rows, feature_CD: Tensor) -> list[Tensor]:
        """A module for each step, over the whole context: each needs what the one below made of every row."""
        outputs = []
        for step, module in zip(range(plan.steps), self.links):
            ids_C = to_device(shift(batch.ids_T, 1 + step), plan.context_C.device)[plan.context_C]
            token_CD = module.pair.token(target.embed(ids_C).to(self.dtype))
            hidden_CD = module(token_CD, feature_CD, plan.position_C + step, Attending(plan.everything))
            outputs.append(hidden_CD[plan.place_P[: plan.counts[step]]])
            feature_CD = self.handed(step, hidden_CD)
        return outputs

    # Drafting

    def run(self, cache: KVCache, embedding: Tensor, feature: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """The one module on new rows [B, M, D] with a cache; the caller advances it."""
        return self.run_module(0, cache, embedding, feature, positions, mask)

    def run_module(
        self, place: int, cache: KVCache, embedding: Tensor, feature: Tensor, positions: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Module `place` on new rows, with its layer of the cache."""

        def attending(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            keys, values = cache.write(place, keys, values)
            return attend(query.transpose(1, 2), keys, values, mask)

        module = self.links[place]
        out: Tensor = module(module.pair.token(embedding.to(self.dtype)), feature, positions, attending)
        return out

    def start(self, batch: int, slots: int) -> Any:
        """A cache with a layer for each module; with several, what each made of the last row, too."""
        cache = KVCache(len(self.links), batch, slots, self.ids_W.device)
        if not self.chained:
            return cache
        shape = (batch, len(self.links), self.spec.hidden_size)
        return Links(cache, torch.zeros(shape, dtype=self.dtype, device=self.ids_W.device))

    @torch.inference_mode()
    def absorb(self, state: Any, context: Context) -> Tensor:
        """Confirmed rows into the cache; the output [B, 1, D] of each text's last one, or [B, modules, D] of all modules."""
        return self.absorb_links(state, context) if self.chained else super().absorb(state, context)

    def absorb_links(self, state: "Links", context: Context) -> Tensor:
        """Every module reads every row; above the first, from what the one below made of the row before."""
        feature_BMD = self.read_context(context)
        cache, new = state.cache, feature_BMD.shape[1]
        cache.make_room(new)
        embedding_BMD, positions = context.target.embed(context.tokens_BM), cache.next_slots(new)
        visible, made = cache.visible(new), []
        for place in range(len(self.links)):
            mask = seen_by(place, visible, positions)
            hidden_BMD = self.run_module(place, cache, embedding_BMD, feature_BMD, positions, mask)
            handed_BMD = self.handed(place, hidden_BMD)
            feature_BMD = torch.cat([state.last_BLD[:, place, None].to(handed_BMD.dtype), handed_BMD[:, :-1]], 1)
            made.append((context.final(hidden_BMD), context.final(handed_BMD)))
        cache.advance(context.counts)
        state.last_BLD = torch.stack([handed for _, handed in made], 1)
        return torch.stack([hidden for hidden, _ in made], 1)

    @torch.inference_mode()
    def propose(self, state: Any, context: Context, shape: TreeShape) -> Tree:
        """Take in the rows that the target has confirmed, then draft below the root."""
        if not self.chained:
            return super().propose(state, context, shape)
        hidden_BLD = self.absorb(state, context)
        drafting = LinkedDrafting(self, state, context.target, shape.rows)
        tree = grow(shape, context, self.guess(0, hidden_BLD[:, 0], context.target), drafting.step, self.ids_W)
        drafting.frontier.forget()
        return tree

    def guess(self, place: int, hidden_XD: Tensor, target: Target) -> Tensor:
        """Logits over the draft vocabulary [..., W] of a module, in fp32."""
        return (self.links[place].norm(hidden_XD) @ self.lm_head.rows(target, self.ids_W).T).float()

    def export(self, engine: str) -> Export:
        """mimo, ernie: dressed as another family's, for an ordinary target; native: the tensors that the checkpoint ships,
        under its own names; stitched: a copy of the checkpoint with them.
        """
        return export_vehicle(self, engine) if engine in VEHICLES else export_native(self, engine)


def seen_by(place: int, mask_BNS: Tensor, positions_BN: Tensor) -> Tensor:
    """A module's rows begin `place` slots late; those that do not exist see themselves, so that they stay finite."""
    if not place:
        return mask_BNS
    slots_S = torch.arange(mask_BNS.shape[-1], device=mask_BNS.device)
    return (mask_BNS & (slots_S >= place)) | (mask_BNS & (slots_S == positions_BN[..., None]))


@dataclass
class Links:
    """The state of a chain of modules: their cache, and what each handed on at the last confirmed row [B, modules, D]."""

    cache: KVCache
    last_BLD: Tensor

    def put(self, row: int, other: "Links") -> None:
        """Let `row` hold what the only row of `other` holds."""
        self.cache.put(row, other.cache)
        self.last_BLD = self.last_BLD.clone()
        self.last_BLD[row] = other.last_BLD[0]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only `rows`, in that order."""
        self.cache.select(rows)
        self.last_BLD = self.last_BLD[list(rows)]


class LinkedDrafting:
    """One draft by a chain of modules: a node at depth m gives a row to every module from m on."""

    def __init__(self, head: Head, state: Links, target: Target, rows: int):
        self.head, self.target, self.frontier = head, target, Frontier(state.cache, rows)
        self.handed_BkLD = state.last_BLD[:, None]
        self.depth = 0

    def step(self, tokens_Bk: Tensor, parents_Bk: Tensor) -> Tensor:
        """Run the modules that are still needed on a new frontier; logits of the one whose turn it is."""
        self.depth += 1
        index = parents_Bk[..., None, None].expand(-1, -1, *self.handed_BkLD.shape[2:])
        above_BkLD = self.handed_BkLD.gather(1, index)
        embedding_BkD, made = self.target.embed(tokens_Bk), []
        with self.frontier.level(parents_Bk) as (positions_Bk, mask_BkS):
            for place in range(self.depth, len(self.head.links)):
                mask = seen_by(place, mask_BkS, positions_Bk)
                feature = above_BkLD[:, :, place - 1]
                made.append(
                    self.head.run_module(place, self.frontier.cache, embedding_BkD, feature, positions_Bk, mask)
                )
        handed = [self.head.handed(self.depth + place, hidden) for place, hidden in enumerate(made)]
        missing = [torch.zeros_like(handed[0])] * self.depth
        self.handed_BkLD = torch.stack([*missing, *handed], 2)
        return self.head.guess(self.depth, made[0], self.target)

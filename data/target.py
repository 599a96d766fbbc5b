"""The target: the frozen model that a head drafts for. The only code that knows Hugging Face model classes.

Shapes: B rows, N new tokens, S key slots, T tokens of one document, K taps, D target width, V vocabulary, Q query
heads, G key-value heads, E head width.

Taps. Tap i is the residual stream after i decoder layers (0: embeddings), before any final norm; `last` is the state
after the final norm, the lm_head's direct input. `Target.check` proves both against Hugging Face's own output.
"""

import contextlib
import importlib.util
import inspect
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import torch.nn.functional as F
import transformers
import xxhash
from accelerate.utils import align_module_device
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface

from headwright.configs import UserError, reason
from headwright.configs.schema import TargetConfig
from headwright.data.cache import KVCache
from headwright.data.embedded import PREFIX, embedded_target
from headwright.data.placing import ends_map, in_turn, spread_layers

ATTENTION = "headwright"
Taps = Sequence[int] | Callable[[int], Sequence[int]]
transformers.utils.logging.disable_progress_bar()


@dataclass(frozen=True)
class TargetSpec:
    """What a head and an export must know of the target. `dtype` is the checkpoint's, whatever it was loaded in."""

    name: str
    revision: str | None
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: dict[str, Any]
    max_positions: int
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    template_hash: str

    @property
    def pad_token_id(self) -> int:
        """What stands on padding; never read."""
        return next(iter(self.eos_token_ids), 0)


@dataclass
class Features:
    """States of N tokens in B rows."""

    taps_BNKD: Tensor
    last_BND: Tensor


class AttentionPlan:
    """What one forward of the target may attend to. Carried to every layer through the model's keyword arguments.

    Without a mask each token sees those before it and itself, and nothing else is there: for that there are kernels that read
    half as much, and of a long prompt no mask is made.
    """

    def __init__(self, mask_BNS: Tensor | None, query_positions_BN: Tensor, key_positions_BS: Tensor):
        self.causal = mask_BNS is None
        self.given_BNS, self.queries_BN, self.keys_BS = mask_BNS, query_positions_BN, key_positions_BS
        self.ready: dict[tuple[int | None, int, torch.device], Tensor] = {}

    @cached_property
    def mask_BNS(self) -> Tensor:
        """What each token sees."""
        if self.given_BNS is not None:
            return self.given_BNS
        length = self.keys_BS.shape[1]
        return torch.ones(1, length, length, dtype=torch.bool, device=self.keys_BS.device).tril()

    @cached_property
    def distance_BNS(self) -> Tensor:
        """How far back each key lies."""
        return self.queries_BN[:, :, None] - self.keys_BS[:, None, :]

    def mask(self, window: int | None, groups: int, device: torch.device) -> Tensor:
        """Boolean mask [B, 1, groups·N, S], cut to a sliding window where the layer has one."""
        if (window, groups, device) not in self.ready:
            mask_BNS = self.mask_BNS
            if window is not None:
                mask_BNS = mask_BNS & (self.distance_BNS < window)
            self.ready[window, groups, device] = mask_BNS.repeat(1, groups, 1)[:, None].to(device)
        return self.ready[window, groups, device]


class BorrowedAttention:
    """In a plan's place: whoever runs a layer does its attention."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]):
        self.attend = attend

    def run(
        self, query_BQNE: Tensor, key_BGSE: Tensor, value_BGSE: Tensor, scaling: float | None, special: dict[str, Any]
    ) -> Tensor:
        """Attention [B, N, Q, E]. What the caller cannot know of must not be there."""
        found = [name for name, value in special.items() if value is not None]
        if found:
            words = {
                "softcap": "caps its attention scores",
                "sliding_window": "slides a window",
                "s_aux": "has attention sinks",
            }
            raise UserError(
                f"this target {words[found[0]]}, which a module of its kind of layer does not: set head.block=llama"
            )
        usual = query_BQNE.shape[-1] ** -0.5
        return self.attend(query_BQNE * ((scaling or usual) / usual), key_BGSE, value_BGSE)


def plan_attention(
    module: nn.Module,
    query_BQNE: Tensor,
    key_BGSE: Tensor,
    value_BGSE: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    plan: AttentionPlan | BorrowedAttention | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention under a plan. Query heads of one group are folded into the query length: keys are never repeated."""
    if isinstance(plan, BorrowedAttention):
        special = {"softcap": softcap, "sliding_window": sliding_window, "s_aux": others.get("s_aux")}
        return plan.run(query_BQNE, key_BGSE, value_BGSE, scaling, special), None
    if plan is None:
        raise RuntimeError("this model's layers do not pass keyword arguments on to their attention")
    batch, query_heads, new, width = query_BQNE.shape
    groups = query_heads // key_BGSE.shape[1]
    sinks_Q = others.get("s_aux")
    plain = softcap is None and sinks_Q is None and (sliding_window is None or new <= sliding_window)
    if plan.causal and plain:
        out = F.scaled_dot_product_attention(
            query_BQNE, key_BGSE, value_BGSE, is_causal=True, scale=scaling, enable_gqa=groups > 1
        )
        return out.transpose(1, 2), None
    mask = plan.mask(sliding_window, groups, query_BQNE.device)
    folded = query_BQNE.reshape(batch, -1, groups * new, width)
    if softcap is None and sinks_Q is None:
        out = F.scaled_dot_product_attention(folded, key_BGSE, value_BGSE, attn_mask=mask, scale=scaling)
    else:
        scores = folded @ key_BGSE.transpose(-1, -2) * (scaling or width**-0.5)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~mask, -torch.inf).float()
        if sinks_Q is not None:  # one more key per head, with a learned score and no value
            sink = sinks_Q.float().reshape(-1, groups).repeat_interleave(new, 1)[None, :, :, None]
            scores = torch.cat([scores, sink.expand(batch, -1, -1, -1)], -1)
        out = scores.softmax(-1)[..., : key_BGSE.shape[2]].to(value_BGSE.dtype) @ value_BGSE
    return out.reshape(batch, query_heads, new, -1).transpose(1, 2), None


AttentionInterface.register(ATTENTION, plan_attention)


class CacheAdapter:
    """Our KVCache behind the two methods that Hugging Face layers call."""

    is_compileable = False

    def __init__(self, cache: KVCache):
        self.cache = cache

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store, and return all that this layer may attend to."""
        return self.cache.write(layer_idx, keys, values)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens held; positions are always given, so that nothing depends on it."""
        return max(self.cache.lengths)


class Target:
    """A frozen causal LM with its tokenizer.

    `extend` runs it on new tokens with a cache, `features` on whole documents without one; both return taps and `last`.
    `embed` and `logits` are the two ends that a head shares.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        name: str,
        taps: Taps,
        revision: str | None = None,
        stored: torch.dtype | None = None,
    ):
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.body = model.get_decoder()
        if not isinstance(getattr(self.body, "layers", None), nn.ModuleList):
            raise UserError(f"target {name}: {type(model).__name__} has no list of decoder layers to read states from")
        self.norm = [child for name, child in self.body.named_children() if "norm" in name or name == "ln_f"][-1]
        self.text = model.config.get_text_config()
        self.taps = choose_taps(taps, len(self.body.layers), name)
        self.spec = read_spec(model, tokenizer, name, revision, stored or model.dtype)
        self.own_attention = model.config._attn_implementation
        self.cache_key = "cache" if "cache" in inspect.signature(self.body.forward).parameters else "past_key_values"
        self.captured: dict[int, Tensor] = {}
        self.adapted: dict[str, nn.Module] = {}  # what stood where an adapter's layers stand
        self.source: str | None = None  # a directory, or a hub name
        self.shared = False  # spread over processes, which must all run it equally often
        self.spare: dict[tuple[int, int], list[Any]] = {}  # caches with captured passes that are free (graphs.py)
        self.kept_rows: tuple[Tensor, Tensor, Tensor | None] | None = None
        self.place_hooks()
        try:
            self.check()
        except (RuntimeError, IndexError, TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"target {name}: {type(model).__name__} cannot be run under Headwright's attention and cache: {reason(error)}"
            ) from None

    @classmethod
    def load(
        cls, config: TargetConfig, taps: Taps = (0,), device: str | torch.device = "cpu", shared: bool = False
    ) -> "Target":
        """The model that `config` names, on `device`, its contract checked; `shared`: spread over the processes (placing.py).

        Raises UserError if it cannot be had.
        """
        device = torch.device(device)
        if config.quantize == "nf4":
            refuse_four_bits(device)
        where = locate(config.model)
        dtype = choose_dtype(config.dtype, device)
        options: dict[str, Any] = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
        tokenizer = load_tokenizer(config)
        try:
            stored = transformers.AutoConfig.from_pretrained(where, **options).get_text_config().dtype
            if config.device_map:
                ends = config.device_map == "ends"
                options["device_map"] = ends_map(empty_model(config, where), device) if ends else config.device_map
            if config.quantize == "nf4":
                options |= four_bits(device)
            with in_turn() if shared else contextlib.nullcontext():
                model, loaded = load_model(where, dtype, options)
                model = spread_layers(model, device) if shared else model
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise UserError(f"target.model {config.model}: cannot be loaded: {reason(error)}") from None
        if loaded["missing_keys"]:  # transformers fills them with noise and only warns
            raise UserError(f"target.model {config.model}: weights are missing: {sorted(loaded['missing_keys'])[:3]}")
        model = model if shared or config.device_map or config.quantize != "none" else model.to(device)
        target = cls(model, tokenizer, config.model, taps, config.revision, stored)
        target.source, target.shared = where, shared
        return target

    def want_layers(self, who: str) -> None:
        """For whoever copies or changes layers. Raises UserError where they are not whole on one device."""
        layers = list(self.body.layers.parameters())
        if self.shared or any(weight.is_meta for weight in layers):
            key = "target.shard" if self.shared else "target.device_map"
            raise UserError(f"{who} takes layers of the target, which {key} keeps elsewhere: leave that at its default")

    def as_it_was(self) -> None:
        """Without any adapter. Captured passes are forgotten: they would not notice."""
        self.spare.clear()
        for name, layer in self.adapted.items():
            owner, _, last = name.rpartition(".")
            setattr(self.model.get_submodule(owner), last, layer)
        self.adapted.clear()

    def folder(self) -> Path:
        """Where its checkpoint lies; that of a hub model is what was downloaded."""
        if self.source is None:
            raise UserError(f"target {self.spec.name}: it was not loaded from a checkpoint")
        path = Path(self.source)
        if path.is_dir():
            return path
        return Path(huggingface_hub.snapshot_download(self.source, revision=self.spec.revision))

    @property
    def device(self) -> torch.device:
        """Where the model's first parameter lives."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """The model's compute dtype."""
        return self.model.dtype

    @property
    def lm_head(self) -> nn.Linear:
        """The frozen output projection [V, D]."""
        return self.model.get_output_embeddings()

    def embed(self, ids_X: Tensor) -> Tensor:
        """Rows [..., D] of the embedding table, unscaled, which is what engines hand to a draft head."""
        return F.embedding(ids_X, self.model.get_input_embeddings().weight)

    def logits(self, last_XD: Tensor, ids_W: Tensor | None = None) -> Tensor:
        """Logits [..., V] from the lm_head's input, with the model's own scaling and soft-capping; of `ids_W` only, if
        given.
        """
        weight, asked = self.lm_head.weight, last_XD.device
        last_XD = last_XD.to(weight.device, weight.dtype)
        logits_XV = self.lm_head(last_XD) if ids_W is None else F.linear(last_XD, *self.lm_head_rows(ids_W))
        logits_XV = logits_XV if self.logit_scale == 1.0 else logits_XV * self.logit_scale
        cap = getattr(self.text, "final_logit_softcapping", None)
        return (logits_XV if cap is None else torch.tanh(logits_XV / cap) * cap).to(asked)

    @property
    def logit_scale(self) -> float:
        """The factor between the lm_head's product and the logits."""
        return float(getattr(self.text, "logit_scale", 1.0) / getattr(self.text, "logits_scaling", 1.0))

    def final_norm(self, state_XD: Tensor) -> Tensor:
        """`last`, of the residual stream after the last layer (tap L)."""
        weight = next(self.norm.parameters())
        out: Tensor = self.norm(state_XD.to(weight.device, weight.dtype))
        return out.to(state_XD.device, state_XD.dtype)

    def last_of(self, taps_XKD: Tensor) -> Tensor:
        """`last`, of taps that hold the last layer's; zeros where they do not, for whoever does not read it."""
        if self.taps[-1] != self.spec.num_layers:
            return torch.zeros_like(taps_XKD[..., 0, :])
        return self.final_norm(taps_XKD[..., -1, :])

    def lm_head_rows(self, ids_W: Tensor) -> tuple[Tensor, Tensor | None]:
        """The lm_head's weight and bias for some ids. The last set is kept: a draft vocabulary is asked for in every
        step.
        """
        if len(ids_W) == len(self.lm_head.weight):  # ids ascend: the whole vocabulary, which needs no copy
            return self.lm_head.weight, self.lm_head.bias
        if self.kept_rows is None or self.kept_rows[0] is not ids_W or self.lm_head.weight.requires_grad:
            bias = self.lm_head.bias
            self.kept_rows = (ids_W, self.lm_head.weight[ids_W], None if bias is None else bias[ids_W])
        return self.kept_rows[1], self.kept_rows[2]

    def weights(self) -> int:
        """Bytes of weights that one decoding step reads: layers and lm_head."""
        return sum(weight.nbytes for part in (self.body.layers, self.lm_head) for weight in part.parameters())

    def new_cache(self, batch: int, slots: int) -> KVCache:
        """An empty cache for `batch` rows of at most `slots` tokens."""
        return KVCache(self.spec.num_layers, batch, slots, self.device)

    @torch.inference_mode()
    def extend(
        self,
        ids_BN: Tensor,
        cache: KVCache,
        positions_BN: Tensor | None = None,
        among_BNN: Tensor | None = None,
        mask_BNS: Tensor | None = None,
    ) -> Features:
        """Run N new tokens behind those in `cache`; write their keys and values, but leave `advance` to the caller.

        Args:
            ids_BN: token ids.
            positions_BN: rotary positions; default: the row's next ones.
            among_BNN: which new tokens see which (a tree); default: causal.
            mask_BNS: which slots each new token sees; default: all tokens of its row, and the new ones by `among_BNN`.
        """
        if positions_BN is None:
            positions_BN = cache.next_slots(ids_BN.shape[1])
        new = ids_BN.shape[1]
        if mask_BNS is None:
            mask_BNS = cache.seen(new) if among_BNN is None else cache.visible(new, among_BNN)
        cache.place(positions_BN)
        end = cache.room(new) if mask_BNS is None else mask_BNS.shape[2]
        plan = AttentionPlan(mask_BNS, positions_BN, cache.positions[:, :end])
        return self.run(ids_BN, positions_BN, plan, CacheAdapter(cache))

    @torch.inference_mode()
    def features(self, ids_BT: Tensor) -> Features:
        """States of right-padded documents; what stands on padding means nothing."""
        length = ids_BT.shape[1]
        positions = torch.arange(length, device=self.device).expand_as(ids_BT)
        return self.run(ids_BT, positions, AttentionPlan(None, positions[:1], positions[:1]), None)

    def packed(self, ids_T: Tensor, segment_T: Tensor, position_T: Tensor) -> Tensor:
        """`last` [T, D] of documents that lie behind each other, none of which sees another. Gradients flow, where the model
        has any to train.
        """
        ids_T, segment_T, position_T = (part.to(self.device) for part in (ids_T, segment_T, position_T))
        rows_T = torch.arange(len(ids_T), device=self.device)
        seen_TT = (segment_T[:, None] == segment_T[None, :]) & (rows_T[None, :] <= rows_T[:, None])
        plan = AttentionPlan(seen_TT[None], position_T[None], position_T[None])
        return self.run(ids_T[None], position_T[None], plan, None).last_BND[0]

    def run(self, ids_BN: Tensor, positions_BN: Tensor, plan: AttentionPlan, cache: Any | None) -> Features:
        """One forward of the decoder under our attention."""
        self.captured.clear()  # another pass over the model may have left its states
        with self.attention(ATTENTION):
            out = self.body(
                input_ids=ids_BN,
                position_ids=positions_BN,
                use_cache=cache is not None,
                plan=plan,
                **{self.cache_key: cache},
            )
        taps = [self.captured[tap].to(self.device) for tap in self.taps if tap in self.captured]
        self.captured.clear()
        last_BND = out.last_hidden_state.to(self.device)
        return Features(torch.stack(taps, dim=2) if taps else last_BND[:, :, None, :0], last_BND)

    @contextlib.contextmanager
    def attention(self, name: str) -> Iterator[None]:
        """The model under another attention implementation for a while."""
        before = self.text._attn_implementation
        self.text._attn_implementation = name
        try:
            yield
        finally:
            self.text._attn_implementation = before

    def place_hooks(self) -> None:
        """Record the residual stream where the taps are: the input of layer i, or the output of the last layer."""

        def before(tap: int) -> Any:
            return lambda _, args, kwargs: self.captured.update({tap: args[0] if args else kwargs["hidden_states"]})

        def after(tap: int) -> Any:
            return lambda _, __, out: self.captured.update({tap: out if isinstance(out, Tensor) else out[0]})

        layers = self.body.layers
        for tap in self.taps:
            if tap < len(layers):
                layers[tap].register_forward_pre_hook(before(tap), with_kwargs=True)
            else:
                layers[-1].register_forward_hook(after(tap))

    @torch.inference_mode()
    def check(self) -> None:
        """Prove the contract on a probe: taps, `last`, logits and cached extension equal Hugging Face's own.

        Raises UserError with the first difference: a head trained on wrong states would train well and serve badly.
        """
        refuse_recurrent(self.text, self.spec.name)
        ids = torch.randint(self.spec.vocab_size, (1, 11), generator=torch.Generator().manual_seed(0)).to(self.device)
        with self.attention(self.own_attention):
            theirs = self.model(input_ids=ids, output_hidden_states=True, use_cache=False)
        ours = self.features(ids)
        cache = self.new_cache(1, ids.shape[1])
        first = self.extend(ids[:, :4], cache)
        cache.advance(4)
        rest = self.extend(ids[:, 4:], cache)
        pairs = {
            f"hidden_states[{tap}]": (ours.taps_BNKD[:, :, k], theirs.hidden_states[tap])
            for k, tap in enumerate(self.taps)
            if tap < self.spec.num_layers
        }
        pairs["the last hidden state"] = (ours.last_BND, theirs.hidden_states[-1])
        pairs["the logits"] = (self.logits(ours.last_BND), theirs.logits)
        pairs["cached extension"] = (torch.cat([first.last_BND, rest.last_BND], 1), theirs.hidden_states[-1])
        if self.taps[-1] == self.spec.num_layers:
            pairs["the final norm"] = (self.final_norm(ours.taps_BNKD[:, :, -1]), theirs.hidden_states[-1])
        for what, (mine, reference) in pairs.items():
            self.compare(what, mine, reference)

    def compare(self, what: str, mine: Tensor, reference: Tensor) -> None:
        """Relative error of one part of the contract."""
        tolerance = 1e-4 if self.dtype == torch.float32 else 5e-2
        error = ((mine.float() - reference.float()).norm() / reference.float().norm().clamp_min(1e-9)).item()
        if not error <= tolerance:
            raise UserError(
                f"target {self.spec.name}: {what} differs from Hugging Face's own by {error:.2g} relative "
                f"(allowed {tolerance:g}); {self.spec.architecture} computes something that Headwright does not know yet"
            )

    @torch.inference_mode()
    def generate_hf(self, ids_1T: Tensor, max_new_tokens: int, ignore_eos: bool = False) -> list[int]:
        """transformers' own greedy `generate`: an outside baseline for speed and text."""
        with self.attention(self.own_attention):
            out = self.model.generate(
                ids_1T,
                attention_mask=torch.ones_like(ids_1T),
                generation_config=transformers.GenerationConfig(
                    do_sample=False,
                    max_new_tokens=max_new_tokens,
                    # the model's own end tokens would take the place of none; this one is never said
                    eos_token_id=[self.spec.vocab_size] if ignore_eos else list(self.spec.eos_token_ids),
                    pad_token_id=self.spec.pad_token_id,
                ),
            )
        return out[0, ids_1T.shape[1] :].tolist()


class EarlyExit:
    """The target's first layers with its final norm and lm_head: a small model that costs no memory (LayerSkip, 2404.16710)."""

    def __init__(self, target: Target, layers: int):
        if not 0 < layers <= target.spec.num_layers:
            raise UserError(f"early exit after {layers} layers: the target has {target.spec.num_layers}")
        self.target, self.exit = target, layers
        self.first = nn.ModuleList(list(target.body.layers)[:layers])

    @property
    def spec(self) -> TargetSpec:
        """The target's."""
        return self.target.spec

    @property
    def device(self) -> torch.device:
        """The target's."""
        return self.target.device

    def new_cache(self, batch: int, slots: int) -> KVCache:
        """A cache of its own, for these layers."""
        return KVCache(self.exit, batch, slots, self.device)

    def weights(self) -> int:
        """Bytes of weights that one step reads."""
        with self.shortened():
            return self.target.weights()

    def logits(self, last_XD: Tensor, ids_W: Tensor | None = None) -> Tensor:
        """The target's lm_head."""
        return self.target.logits(last_XD, ids_W)

    def extend(self, *new: Any, **places: Any) -> Features:
        """`Target.extend` through the first layers only."""
        with self.shortened():
            return self.target.extend(*new, **places)

    def features(self, ids_BT: Tensor) -> Features:
        """`Target.features` through the first layers only."""
        with self.shortened():
            return self.target.features(ids_BT)

    @contextlib.contextmanager
    def shortened(self) -> Iterator[None]:
        """The decoder without its other layers for a while."""
        body, whole = self.target.body, self.target.body.layers
        body.layers = self.first
        try:
            yield
        finally:
            body.layers = whole


def locate(model: str) -> str:
    """Where transformers finds `model`: a directory, or a hub name."""
    if model.startswith(PREFIX):
        return str(embedded_target(model.removeprefix(PREFIX)))
    path = Path(model).expanduser()
    if path.exists() or model.startswith((".", "/", "~")):
        if not (path / "config.json").is_file():
            raise UserError(f"target.model {model}: no such model directory (looked for {path / 'config.json'})")
        return str(path)
    return model


def load_tokenizer(config: TargetConfig) -> Any:
    """The target's tokenizer alone."""
    options = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    where = config.tokenizer or locate(config.model)
    try:
        return transformers.AutoTokenizer.from_pretrained(where, **options)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"target.model {config.model}: cannot be loaded: its tokenizer: {reason(error)}") from None


def load_model(where: str, dtype: torch.dtype | str, options: dict[str, Any]) -> Any:
    """The model and what its loading reported. Of a model that also sees, the text part is used."""
    kind: Any = transformers.AutoModelForCausalLM
    trusted = {"trust_remote_code": options["trust_remote_code"], "revision": options["revision"]}
    config = transformers.AutoConfig.from_pretrained(where, **trusted)
    if (
        type(config) in transformers.AutoModelForImageTextToText._model_mapping
        and type(config) not in kind._model_mapping
    ):
        kind = transformers.AutoModelForImageTextToText
    return kind.from_pretrained(where, dtype=dtype, output_loading_info=True, **options)


def refuse_four_bits(device: torch.device) -> None:
    """Where 4-bit weights cannot be had."""
    if device.type != "cuda" or importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            "target.quantize nf4: needs a CUDA GPU and bitsandbytes (pip install bitsandbytes): set target.quantize=none"
        )


def four_bits(device: torch.device) -> dict[str, Any]:
    """How transformers loads weights in NF4 (QLoRA, arXiv 2305.14314), computing in bfloat16."""
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    return {"quantization_config": config, "device_map": {"": device}}


def choose_dtype(name: str, device: torch.device) -> torch.dtype | str:
    """auto is the checkpoint's own dtype, but fp32 on a CPU that would emulate bfloat16 (six times slower)."""
    if name != "auto":
        return getattr(torch, name)
    return torch.float32 if device.type == "cpu" and not cpu_has_bfloat16() else "auto"


def cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 natively."""
    if platform.machine().lower() in ("arm64", "aarch64") and platform.system() == "Darwin":
        return True
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return any(flag in flags for flag in ("avx512_bf16", "amx_bf16", " bf16"))


def refuse_recurrent(text: Any, name: str) -> None:
    """A layer that keeps a running state cannot forget a rejected draft."""
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention", "chunked_attention"}
    if kinds:
        raise UserError(
            f"target {name}: it has layers of {', '.join(sorted(kinds))}, whose running state cannot be taken back after a "
            "rejected draft: such targets are not supported yet"
        )


def choose_taps(taps: Taps, layers: int, name: str) -> tuple[int, ...]:
    """The taps as ascending indices into the residual stream, or UserError. A function gives those of a number of layers."""
    if callable(taps):
        found = tuple(taps(layers))
        if list(found) != sorted(set(found)):
            raise UserError(
                f"target {name} has {layers} layers: harvest.taps auto needs 7; give the taps, such as [0, {layers // 2}]"
            )
        return choose_taps(found, layers, name)
    if not taps or list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] > layers:
        raise UserError(
            f"harvest.taps {list(taps)}: give ascending, distinct numbers from 0 to {layers} (tap i = after i layers)"
        )
    return tuple(taps)


def read_spec(model: Any, tokenizer: Any, name: str, revision: str | None, stored: torch.dtype) -> TargetSpec:
    """The facts of a loaded model."""
    text = model.config.get_text_config()
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return TargetSpec(
        name=name,
        revision=revision,
        architecture=type(model).__name__,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        hidden_size=text.hidden_size,
        num_layers=text.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        intermediate_size=text.intermediate_size,
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        rope=read_rope(text),
        max_positions=text.max_position_embeddings,
        dtype=str(stored).removeprefix("torch."),
        bos_token_id=text.bos_token_id,
        eos_token_ids=end_tokens(model, tokenizer),
        fingerprint=weight_fingerprint(model),
        template_hash=xxhash.xxh64_hexdigest((getattr(tokenizer, "chat_template", None) or "").encode()),
    )


def empty_model(config: TargetConfig, where: str) -> Any:
    """The model without weights."""
    trusted = {"trust_remote_code": config.trust_remote_code, "revision": config.revision}
    described = transformers.AutoConfig.from_pretrained(where, **trusted).get_text_config()
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(described, trust_remote_code=config.trust_remote_code)


def read_facts(config: TargetConfig) -> tuple[TargetSpec, str]:
    """The facts of a model that is not loaded, and the name of its embedding's weight. The fingerprint is empty.

    Raises UserError if its config cannot be had.
    """
    where, trusted = locate(config.model), {"trust_remote_code": config.trust_remote_code, "revision": config.revision}
    tokenizer = load_tokenizer(config)
    try:
        described = transformers.AutoConfig.from_pretrained(where, **trusted).get_text_config()
        model = empty_model(config, where)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"target {config.model}: its config cannot be read: {reason(error)}") from None
    embedding = model.get_input_embeddings().weight
    name = next(name for name, weight in model.named_parameters() if weight is embedding)
    return read_spec(model, tokenizer, config.model, config.revision, described.dtype or torch.float32), name


def read_rope(text: Any) -> dict[str, Any]:
    """The rotary parameters; where layer types have their own, those of full attention."""
    rope = dict(getattr(text, "rope_parameters", None) or {})
    rope = {"rope_type": "default", "rope_theta": 10000.0} | dict(rope.get("full_attention", rope))
    if rope["rope_type"] == "yarn" and rope.get("factor") is None:
        rope["factor"] = text.max_position_embeddings / rope["original_max_position_embeddings"]
    return rope


def end_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every token id that ends a generation: the generation config's, the model's, the tokenizer's."""
    found: list[int] = []
    for value in (
        model.generation_config.eos_token_id if model.generation_config else None,
        model.config.get_text_config().eos_token_id,
        getattr(tokenizer, "eos_token_id", None),
    ):
        found += value if isinstance(value, list | tuple) else [] if value is None else [value]
    return tuple(dict.fromkeys(int(token) for token in found))


def weight_fingerprint(model: nn.Module) -> str:
    """A hash of every parameter's name and shape and of 64 spread values of each: cheap, and changes with any fine-
    tune.
    """
    state = xxhash.xxh64()
    for name, weight in model.named_parameters():
        owner, _, last = name.rpartition(".")
        with align_module_device(model.get_submodule(owner)):  # from where it lies, if not on a device
            weight = model.get_submodule(owner).get_parameter(last)
            if weight.is_meta:
                return ""
            flat = (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach().flatten()
        probe = flat[:: max(1, flat.numel() // 64)][:64].float().cpu()
        state.update(f"{name}{tuple(weight.shape)}".encode())
        state.update(probe.numpy().tobytes())
    return state.hexdigest()

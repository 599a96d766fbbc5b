"""Medusa heads as directories, and out of them: vLLM 0.32 drafts a chain of each head's first choice; SGLang serves none."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwright.configs import UserError
from headwright.data.target import TargetSpec
from headwright.heads.base import Adopted, Case, Drafts, Export, Tables
from headwright.heads.contract import Contract, Key, Method, Shapes, always
from headwright.heads.directory import Config, Entry
from headwright.heads.engine_tables import (
    VERSIONS,
    VLLM,
    is_one_of,
    other_tokens,
    other_width,
    vllm_arguments,
    vllm_line,
)
from headwright.heads.plain import written

if TYPE_CHECKING:
    from headwright.heads.medusa import Head


# The table


def read_config(config: Config) -> Config:
    """With what vLLM fills in. It renames any key with `num` and `heads` or `layers` in its name."""
    renamed: Config = {}
    for key, value in config.items():
        if "num" in key and "heads" in key:
            key = "num_heads"
        elif "num" in key and "layers" in key:
            key = "num_hidden_layers"
        renamed[key] = value
    sizes = {"hidden_size": 4096, "vocab_size": 32001, "num_heads": 5, "num_hidden_layers": 1}
    renamed = sizes | {"medusa_fc_bias": False, "original_lm_head": False} | renamed
    return renamed | {"truncated_vocab_size": renamed.get("truncated_vocab_size") or renamed.get("vocab_size")}


def shapes_of(config: Config) -> Shapes:
    """Every tensor. lm_heads span the whole vocabulary, for vLLM 0.32 can load none of fewer tokens (`cut`)."""
    D, V, kept = config["hidden_size"], config["vocab_size"], config["truncated_vocab_size"]
    shapes: Shapes = {}
    for head in range(config["num_heads"]):
        for block in range(config["num_hidden_layers"]):
            shapes[f"blocks.{head}.layers.{block}.weight"] = (D, D)
            if config["medusa_fc_bias"]:
                shapes[f"blocks.{head}.layers.{block}.bias"] = (D,)
    if config["original_lm_head"]:
        shapes["lm_heads.0.weight"] = (kept, D)
    else:
        shapes |= {f"lm_heads.{head}.weight": (V, D) for head in range(config["num_heads"])}
    return shapes | ({"token_map": (kept,)} if kept != V else {})


def spelled(name: str) -> str:
    """The official code's names are remapped."""
    name = name.removeprefix("medusa_heads.")
    linear = re.fullmatch(r"(\d+)\.(\d+)\.linear\.(\w+)", name)
    if linear:
        return "blocks.{}.layers.{}.{}".format(*linear.groups())
    last = re.fullmatch(r"(\d+)\.\d+\.weight", name)
    if last:
        return f"lm_heads.{last[1]}.weight"
    return "lm_heads.0.weight" if name == "lm_head.weight" else name


def count_keys(part: str, config: Config) -> list[str]:
    """Keys that vLLM renames to the same one."""
    return sorted(key for key in config if "num" in key and part in key)


def renamed_over(config: Config, spec: TargetSpec | None) -> str | None:
    """One key at most with `num` and `heads`, and with `num` and `layers`."""
    for part in ("heads", "layers"):
        found = count_keys(part, config)
        if len(found) > 1:
            return f"{' and '.join(found)} are renamed to one key"
    return None


def cut(config: Config, spec: TargetSpec | None) -> str | None:
    """A vocabulary of fewer tokens: vLLM has no place for it, or misses the map that it was given."""
    read = read_config(config)
    if read["truncated_vocab_size"] == read["vocab_size"]:
        return None
    return f"is {read['truncated_vocab_size']} of {read['vocab_size']} tokens"


def no_vocabulary(config: Config, spec: TargetSpec | None) -> str | None:
    """hidden_size, which old configs leave out. vLLM takes the vocabulary from the target."""
    return None if isinstance(config.get("hidden_size"), int) else "is missing: vLLM assumes 4096"


def targets_sizes(config: Config, spec: TargetSpec | None) -> Config:
    """The target's."""
    return {"hidden_size": spec.hidden_size, "vocab_size": spec.vocab_size} if spec else {}


def biases_unsaid(config: Config, spec: TargetSpec | None) -> str | None:
    """The official heads have biases, which vLLM reads only where it is told so."""
    return None if "medusa_fc_bias" in config else "is missing: vLLM then drops the heads' biases without a word"


def arguments(config: Config, target: str, folder: Path, count: int) -> dict[str, Any]:
    """No more tokens than there are heads."""
    return vllm_arguments("medusa")(config, target, folder, min(count, read_config(config)["num_heads"]))


def missing_in_vllm(name: str) -> str:
    """vLLM counts what its heads were given, lm_heads excepted."""
    if name.startswith("lm_head"):
        return "vLLM serves uninitialised memory there without a word: nothing is accepted"
    return "vLLM stops: weights were not initialized from checkpoint"


CONTRACT = Contract(
    method="medusa",
    engine=VLLM,
    version=VERSIONS[VLLM],
    shapes=shapes_of,
    reads=read_config,
    spells=spelled,
    launch=vllm_line(arguments),
    arguments=arguments,
    missing=missing_in_vllm,
    extra=always("vLLM drops it without a word"),
    keys=(
        is_one_of("model_type", ("medusa",), "vLLM reads another config", "medusa"),
        Key(
            "num_heads",
            renamed_over,
            "vLLM takes the one that comes last",
            "leave all but num_heads and num_hidden_layers",
        ),
        Key("hidden_size", no_vocabulary, "vLLM stops at the shapes", "write it", targets_sizes),
        Key("vocab_size", other_tokens, "vLLM writes the target's there, and stops at the shapes", "its own target"),
        Key("hidden_size", other_width, "vLLM stops at the first draft", "use these heads with their own target"),
        Key(
            "truncated_vocab_size",
            cut,
            "vLLM 0.32 stops: “token_map was not initialized from checkpoint”, or at the shapes",
            "lm_heads over the whole vocabulary, as `headwright export` writes them",
        ),
        Key(
            "medusa_fc_bias",
            biases_unsaid,
            "every guess is shifted",
            "write it",
            lambda config, spec: {"medusa_fc_bias": True},
        ),
    ),
)


# Writing


def export_medusa(head: "Head", engine: str) -> Export:
    """The directory. Raises UserError for another engine."""
    if engine != VLLM:
        raise UserError(f"export.engines {engine!r}: Medusa heads export as: vllm (no other engine serves them)")
    config, ids_W, shared = medusa_config(head), head.vocab.ids_W, head.config.lm_head == "shared"
    tensors: dict[str, Tensor] = {}
    for name, tensor in head.heads.state_dict().items():
        number, block, _, kind = name.split(".")
        tensors[f"blocks.{number}.layers.{block}.{kind}"] = tensor
    tensors |= {f"lm_heads.{name}": tensor for name, tensor in head.lm_heads.state_dict().items()}
    names = ["lm_heads.0.weight"] if shared else [name for name in tensors if name.startswith("lm_heads.")]
    return Export(
        tensors,
        config,
        shapes_of(read_config(config)),
        PlainMedusa.read,
        (CONTRACT,),
        from_target=dict.fromkeys(names, ids_W) if shared else {},
        spread={} if head.vocab.full else dict.fromkeys(names, ids_W),
        warnings=notes(head),
    )


def notes(head: "Head") -> list[str]:
    """What to know before serving."""
    found = []
    if not head.vocab.full:
        found.append(
            "vLLM 0.32 loads no Medusa heads of a reduced vocabulary: other tokens get rows that are never drafted, and each "
            f"lm_head takes the room of {head.spec.vocab_size} tokens for {len(head.vocab)}"
        )
    if head.changes_target() is not None:
        found.append(
            "these heads belong to an adapted target: merge head/adapter into it (peft) and serve that, not the original"
        )
    return found


def medusa_config(head: "Head") -> dict[str, Any]:
    """config.json. vLLM renames keys with `num` and `heads` or `layers` in them, so none but its own may be there."""
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": head.spec.hidden_size,
        "vocab_size": head.spec.vocab_size,
        "num_heads": head.config.steps,
        "num_hidden_layers": head.config.blocks,
        "medusa_fc_bias": head.config.bias,
        "original_lm_head": head.config.lm_head == "shared",
    }


class PlainMedusa:
    """An independent reader: plain tensors, nothing of the trainer's module. It drafts over all rows, as vLLM does; its
    log-probabilities are over those that were learned.
    """

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor]):
        self.config, self.w = config, tensors
        self.ids_W = tensors.get("token_map", torch.arange(len(tensors["lm_heads.0.weight"])))
        self.known_W = known_rows(tensors)

    @classmethod
    def read(cls, folder: Path) -> "PlainMedusa":
        """A written directory."""
        return cls(*written(folder))

    def draft(self, tables: Tables, case: Case, count: int) -> Drafts:
        """Each head's first choice."""
        tokens, scores = [], [0.0]
        for number in range(min(count, self.config["num_heads"])):
            logits = self.lm_head(number) @ self.blocks(number, case.last_TD[-1])
            best = int(logits.argmax())
            scores.append(scores[-1] + float(logits[best] - logits[self.known_W].logsumexp(-1)))
            tokens.append(int(self.ids_W[best]))
        return Drafts(tokens, scores[1:])

    def blocks(self, number: int, x_D: Tensor) -> Tensor:
        """The residual blocks of a head."""
        for block in range(self.config["num_hidden_layers"]):
            name = f"blocks.{number}.layers.{block}"
            inner = self.w[f"{name}.weight"].float() @ x_D
            if f"{name}.bias" in self.w:
                inner = inner + self.w[f"{name}.bias"].float()
            x_D = x_D + inner * torch.sigmoid(inner)
        return x_D

    def lm_head(self, number: int) -> Tensor:
        """Rows of its lm_head [W, D]."""
        return self.w[f"lm_heads.{0 if self.config['original_lm_head'] else number}.weight"].float()


# Reading


def known_rows(tensors: Mapping[str, Tensor]) -> Tensor:
    """The rows of lm_heads that are not all the same: the tokens that the heads learned."""
    weight = next(tensor for name, tensor in sorted(tensors.items()) if name.startswith("lm_heads.")).float()
    marks, counts = torch.unique(weight[:, :8], dim=0, return_counts=True)
    if counts.max() == 1:
        return torch.arange(len(weight))
    return torch.nonzero((weight[:, :8] != marks[counts.argmax()]).any(1))[:, 0]


def knows(config: Config, names: Iterable[str]) -> bool:
    """Residual blocks and lm_heads side by side."""
    return any(spelled(name).startswith("blocks.") for name in names)


def infer(config: Config, entries: Mapping[str, Entry]) -> Config:
    """Sizes, which official configs leave out, and whether there are biases."""
    shapes = {spelled(name): entry.shape for name, entry in entries.items()}
    block, lm_head = shapes.get("blocks.0.layers.0.weight"), shapes.get("lm_heads.0.weight")
    found: Config = {"medusa_fc_bias": "blocks.0.layers.0.bias" in shapes}
    if block and lm_head:
        found |= {"hidden_size": block[0], "vocab_size": lm_head[0]}
    return found | config


def adopt(config: Config, tensors: dict[str, Tensor], spec: TargetSpec, shared: Tensor | None) -> Adopted:
    """Heads of ours from a plain directory."""
    count, blocks = config["num_heads"], config["num_hidden_layers"]
    bias = "blocks.0.layers.0.bias" in tensors
    own, known_W = not config["original_lm_head"], known_rows(tensors)
    state: dict[str, Tensor] = {}
    for head in range(count):
        for block in range(blocks):
            for part in ("weight", "bias") if bias else ("weight",):
                state[f"heads.{head}.{block}.linear.{part}"] = tensors[f"blocks.{head}.layers.{block}.{part}"]
        if own:
            state[f"lm_heads.{head}.weight"] = tensors[f"lm_heads.{head}.weight"][known_W]
    options = {"kind": "medusa", "steps": count, "blocks": blocks, "bias": bias, "lm_head": "own" if own else "shared"}
    ids_W = tensors["token_map"].long()[known_W] if "token_map" in tensors else known_W
    return Adopted(options, state, (spec.num_layers,), ids_W)


METHODS = (Method("medusa", "medusa", (CONTRACT,), knows, read_config, spelled, PlainMedusa, adopt, infer=infer),)

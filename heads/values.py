"""The kinds of value that a head's config.json may hold, checked before anything is computed from it."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headwright.configs import UserError

MOST, DEEPEST = 1 << 24, 1 << 10  # of widths and vocabularies; of layers, heads of Medusa, captured states


def count(most: int) -> Callable[[Any], bool]:
    """A whole number from 0, or null."""
    return lambda value: value is None or (type(value) is int and value <= most)


def number(value: Any) -> bool:
    """A finite number, or null."""
    return value is None or (type(value) in (int, float) and abs(value) < 1e30 and math.isfinite(value))


def flag(value: Any) -> bool:
    """True, false, or null."""
    return value is None or isinstance(value, bool)


def text(value: Any) -> bool:
    """A string, or null."""
    return value is None or isinstance(value, str)


def listed(inner: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A list of values of one kind, none of them null; or null."""
    return lambda value: (
        value is None or (isinstance(value, list) and all(item is not None and inner(item) for item in value))
    )


def table(value: Any) -> bool:
    """An object, or null."""
    return value is None or isinstance(value, dict)


WIDTH, DEPTH, TEXTS, IDS = count(MOST), count(DEEPEST), listed(text), listed(count(DEEPEST))
WIDTHS = (
    "hidden_size intermediate_size vocab_size draft_vocab_size target_hidden_size truncated_vocab_size head_dim "
    "hot_vocab_size sliding_window"
)
DEPTHS = (
    "num_attention_heads num_key_value_heads num_hidden_layers num_aux_hidden_states num_heads medusa_num_heads "
    "medusa_num_layers num_nextn_predict_layers mtp_num_hidden_layers num_mtp_layers num_aux_layers"
)
FLAGS = (
    "tie_word_embeddings attention_bias mlp_bias bias qkv_bias fc_norm norm_before_fc norm_output norm_before_residual "
    "use_sliding_window original_lm_head medusa_fc_bias use_aux_hidden_state"
)
KINDS: dict[str, tuple[Callable[[Any], bool], str]] = (
    dict.fromkeys(WIDTHS.split(), (WIDTH, f"a number up to {MOST}"))
    | dict.fromkeys(DEPTHS.split(), (DEPTH, f"a number up to {DEEPEST}"))
    | dict.fromkeys(FLAGS.split(), (flag, "true or false"))
    | dict.fromkeys(("rms_norm_eps", "rope_theta", "factor", "max_position_embeddings"), (number, "a number"))
    | dict.fromkeys(("model_type", "dtype", "torch_dtype", "rope_type", "speculators_model_type"), (text, "a string"))
    | dict.fromkeys(("architectures", "layer_types"), (TEXTS, "a list of strings"))
    | {"eagle_aux_hidden_state_layer_ids": (IDS, "a list of layers")}
)
NESTED = (
    "rope_parameters",
    "rope_scaling",
    "eagle_config",
    "transformer_layer_config",
    "text_config",
    "headwright_mtp",
)


def refuse_strange(path: Path, config: dict[str, Any], before: str = "") -> None:
    """Raises UserError for a known key with a value of another kind, by its place."""
    for key, value in config.items():
        known = KINDS.get(key)
        if known is not None and not known[0](value):
            raise UserError(f"{path}: {before}{key} is {value!r:.60}, {known[1]} is expected")
        if key in NESTED and not table(value):
            raise UserError(f"{path}: {before}{key} is {value!r:.60}, an object is expected")
        if key in NESTED and value:
            refuse_strange(path, value, f"{before}{key}.")

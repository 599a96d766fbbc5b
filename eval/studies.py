"""The studies: what each sweeps, its columns, its plot and its sentence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headwright.eval import costs, forecast, prompting, proofs, sweeps
from headwright.eval.scene import Row, Scene


@dataclass(frozen=True)
class Study:
    """One sweep. columns: of the table, by key of a row. plot: see plots.study. says: what the rows show."""

    about: str
    work: Callable[[Scene], list[Row]]
    columns: dict[str, str]
    plot: dict[str, Any]
    says: Callable[[Sequence[Row]], str]


RACE = {
    "shape": "shape",
    "tau": "τ",
    "tau_ci95": "95 %",
    "speedup": "speed-up",
    "speedup_ci95": "95 % ",
    "draft_ms": "draft, ms",
    "verify_ms": "verify, ms",
    "verify_share": "verify / cycle",
    "cycle_in_steps": "cycle, plain steps",
    "same_text": "same text",
}


def lines(x: str, *y: str, by: str | None = None, **words: Any) -> dict[str, Any]:
    """A plot of lines."""
    return {"kind": "lines", "x": x, "y": list(y), "by": by} | words


STUDIES = {
    "depth": Study(
        "trees of one width, deeper and deeper",
        sweeps.depth_rows,
        RACE,
        lines("depth", "tau", "speedup", title="τ and speed-up by depth", xlabel="depth of the tree", break_even=True),
        sweeps.depth_says,
    ),
    "width": Study(
        "trees of one depth, wider and with more nodes",
        sweeps.width_rows,
        RACE,
        lines("nodes", "speedup", by="top_k", title="speed-up by nodes and width", xlabel="nodes", break_even=True),
        sweeps.width_says,
    ),
    "chain-tree": Study(
        "chains against trees of equal depth, and after equally many target passes",
        sweeps.chain_tree_rows,
        RACE | {"tokens_in_equal_passes": "tokens in equal passes"},
        lines("depth", "tau", "speedup", by="kind", title="chain and tree", xlabel="depth", break_even=True),
        sweeps.chain_tree_says,
    ),
    "temperature": Study(
        "greedy and sampled",
        sweeps.temperature_rows,
        {"temperature": "T"} | RACE,
        lines("temperature", "tau", "speedup", by="shape", title="τ and speed-up by temperature", break_even=True),
        sweeps.temperature_says,
    ),
    "batch": Study(
        "several texts at the same time",
        sweeps.batch_rows,
        {
            "batch": "batch",
            "shape": "shape",
            "tau": "τ",
            "tokens_per_second": "tok/s",
            "speedup": "over plain of this batch",
            "same_text": "texts of batch 1",
        },
        lines("batch", "tokens_per_second", by="shape", title="tokens per second by batch size"),
        sweeps.batch_says,
    ),
    "context": Study(
        "longer and longer prompts",
        sweeps.context_rows,
        {"context": "context"}
        | RACE
        | {"decode_speedup": "speed-up after the prefill", "plain_ttft_ms": "prefill, ms"},
        lines("context", "tau", "decode_speedup", by="shape", title="by context length", break_even=True),
        sweeps.context_says,
    ),
    "pass": Study(
        "the target's pass over more and more tokens",
        costs.pass_rows,
        {"tokens": "tokens", "ms": "ms", "steps": "plain steps", "ms_per_token": "ms a token"},
        lines("tokens", "steps", title="a target pass, in plain steps", xlabel="tokens of the pass"),
        costs.pass_says,
    ),
    "size": Study(
        "larger targets (random weights: costs alone)",
        costs.size_rows,
        {
            "size": "hidden×layers×…",
            "parameters": "parameters",
            "plain_ms": "plain step, ms",
            "draft_chain_steps": "draft chain, steps",
            "verify_chain_steps": "verify chain",
            "break_even_chain": "τ from which the chain pays",
            "draft_tree_steps": "draft tree",
            "verify_tree_steps": "verify tree",
            "break_even_tree": "τ from which the tree pays",
        },
        lines("parameters", "break_even_chain", "break_even_tree", title="τ that breaks even, by target size"),
        costs.size_says,
    ),
    "domain": Study(
        "the run's own domains against other sets and languages, shallow and deep",
        sweeps.domain_rows,
        {"domain": "domain", "trained_on": "trained on", "prompts": "prompts"} | RACE,
        lines("depth", "speedup", by="line", title="speed-up by domain", xlabel="depth", break_even=True),
        sweeps.domain_says,
    ),
    "template": Study(
        "prompts that look otherwise than in training: system prompt, thinking mode, no template",
        prompting.template_rows,
        {
            "way": "asked",
            "prompt_tokens": "prompt tokens",
            "tau": "τ",
            "tau_ci95": "95 %",
            "tau_gain": "τ less that of training",
            "tau_gain_ci95": "95 % ",
            "speedup": "speed-up",
            "same_text": "same text",
        },
        lines("way", "tau", "speedup", title="τ and speed-up by how prompts are put", break_even=True),
        prompting.template_says,
    ),
    "lossless": Study(
        "is the text the target's own?",
        proofs.lossless_rows,
        {
            "side": "side",
            "check": "check",
            "cases": "cases",
            "result": "result",
            "per_1000_tokens": "per 1000 tokens",
            "largest_gap": "largest logit gap",
            "p": "p",
        },
        lines("side", "per_1000_tokens", title="divergences per 1000 tokens"),
        proofs.lossless_says,
    ),
    "forecast": Study(
        "speed-ups foretold from recorded text and costs, against the clock",
        forecast.forecast_rows,
        {
            "shape": "shape",
            "calibrated": "in the calibration",
            "tau_foretold": "τ foretold",
            "tau": "τ",
            "foretold": "speed-up foretold",
            "decode_speedup": "measured, after the prefill",
            "off": "off by",
        },
        {
            "kind": "diagonal",
            "x": "foretold",
            "y": ["decode_speedup"],
            "by": "shape",
            "title": "foretold and measured",
            "ylabel": "measured",
        },
        forecast.forecast_says,
    ),
    "break-even": Study(
        "gain or loss by depth and acceptance, at the costs measured here",
        forecast.break_even_rows,
        {"depth": "depth", "alpha": "α", "tau": "τ", "speedup": "speed-up", "break_even_tau": "τ that breaks even"},
        {"kind": "map", "x": "depth", "y": ["speedup"], "by": "alpha", "title": "gain or loss", "ylabel": "α"},
        forecast.break_even_says,
    ),
}

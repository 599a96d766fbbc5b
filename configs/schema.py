"""The sections of a run file, as dataclasses. Torch-free.

Every key carries its help text in its annotation; `--help` prints them. A draft head's own keys are not here: they
live in the head's file (`heads/<kind>.py`, class `Config`) and are found by `head.kind`.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen

Fraction = Annotated[float, Ge(0), Le(1)]
StrategyName = Literal["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"]


@dataclass
class TargetConfig:
    """The frozen model that the head will serve."""

    model: Annotated[
        str, "hub name, local directory, or embedded:smollm2-135m-instruct (also embedded:gemma-3-270m)"
    ] = ""
    revision: Annotated[str | None, "hub revision"] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        "auto: the checkpoint's own; float32 on a CPU without native bfloat16",
    ] = "auto"
    trust_remote_code: Annotated[bool, "run Python code that the model repository ships"] = False
    tokenizer: Annotated[str | None, "tokenizer name or directory, if not the model's own"] = None
    device_map: Annotated[
        str | None,
        "auto: spread a target larger than one GPU over all of them; ends: only what heads read in training on stored "
        "features, with the layers left on disk",
    ] = None
    shard: Annotated[bool, "training: spread a target larger than one GPU over the processes of the launch"] = False
    quantize: Annotated[
        Literal["none", "nf4"], "nf4: weights in 4 bits (QLoRA: adapt it so); needs a GPU and bitsandbytes"
    ] = "none"


@dataclass
class Source:
    """One corpus source: exactly one of demo, path, hub."""

    demo: Annotated[str | None, "a set from a registry package: gsm8k, humaneval, mt-bench, vicuna, …"] = None
    path: Annotated[
        str | None,
        "a file or a pattern (chats/*.jsonl.gz): .jsonl, .json, .csv, .tsv, .parquet, .arrow, or plain text "
        "(.txt, .md); all but .parquet and .arrow also as .gz and .zst",
    ] = None
    hub: Annotated[str | None, "a data set on the Hugging Face hub"] = None
    config: Annotated[str | None, "hub: configuration name"] = None
    split: Annotated[str, "hub: split"] = "train"
    revision: Annotated[str | None, "hub: revision"] = None
    streaming: Annotated[bool, "hub: read the first `limit` rows of a seeded shuffle, without a download"] = False
    name: Annotated[str | None, "label in tables; default: made from the above"] = None
    limit: Annotated[int | None, "at most this many documents, chosen by seeded hash", Gt(0)] = None
    weight: Annotated[
        float | None, "share of the mix, relative to the other weighted sources; what is too much is left out", Gt(0)
    ] = None
    samples: Annotated[int, "answers per prompt when answers.by is target", Ge(1)] = 1
    words: Annotated[int, "plain text: words of the prompt that the target continues", Ge(1)] = 48
    general: Annotated[
        bool, "adaptation: traffic that must not be forgotten, replayed and measured beside the domain's"
    ] = False


@dataclass
class LearnConfig:
    """Which of the assistant's words bear loss. The generation prompt never does."""

    thinking: Annotated[bool, "its reasoning, where the chat template keeps it"] = True
    tool_calls: Annotated[bool, "its tool calls"] = True
    last_turn: Annotated[bool, "only its last turn"] = False


@dataclass
class CorpusConfig:
    """Which texts, and which of them are held out."""

    sources: Annotated[list[Source], "where the text comes from"] = field(default_factory=list)
    held_out: Annotated[float, "share of documents kept for evaluation, by document hash", Ge(0), Le(0.9)] = 0.1
    max_length: Annotated[int, "longest document in tokens; longer prompts are skipped and counted", Gt(8)] = 1024
    system: Annotated[str | None, "a system prompt put before each chat that has none"] = None
    template: Annotated[dict[str, Any], "arguments of the chat template, such as {enable_thinking: false}"] = field(
        default_factory=dict
    )
    learn: Annotated[LearnConfig, "which of the corpus's own answers bear loss"] = field(default_factory=LearnConfig)
    near_duplicates: Annotated[
        float | None,
        "drop documents whose words (in runs of five) overlap an earlier one's by this share; needs datasketch",
        Gt(0),
        Le(1),
    ] = None
    strict: Annotated[bool, "stop at the first row that cannot be used, instead of listing it"] = False


@dataclass
class AnswersConfig:
    """Who wrote the text that the head learns: the target itself (best), or the corpus."""

    by: Annotated[Literal["target", "corpus"], "target: the model answers the prompts itself (on-policy)"] = "target"
    max_new_tokens: Annotated[int, "longest answer; tiny models loop when it is long", Gt(0)] = 96
    rows: Annotated[int, "answers that the target writes at the same time", Gt(0)] = 64
    turns: Annotated[int | None, "assistant turns of a chat that are answered anew; null: all", Ge(1)] = None
    temperature: Annotated[float, "of every answer but a prompt's first, which is greedy", Ge(0)] = 0.7
    top_p: Annotated[float, "nucleus of the sampled answers", Gt(0), Le(1)] = 0.95
    top_k: Annotated[int | None, "most likely tokens among which an answer is sampled; null: all", Gt(0)] = None


@dataclass
class RegenerateConfig:
    """`headwright regenerate`: chats rewritten by the target as text, in process or by OpenAI-compatible servers."""

    urls: Annotated[list[str], "servers, such as http://localhost:8000/v1; none: in process"] = field(
        default_factory=list
    )
    model: Annotated[str | None, "the model's name at the servers; default: target.model"] = None
    api_key_env: Annotated[str, "environment variable that holds the servers' key"] = "OPENAI_API_KEY"
    concurrency: Annotated[int, "requests in flight, per server", Gt(0)] = 32
    requests_per_minute: Annotated[int | None, "at most this many over all servers", Gt(0)] = None
    retries: Annotated[int, "attempts after the first, with growing pauses", Ge(0)] = 6
    timeout: Annotated[float, "seconds for one request", Gt(0)] = 300.0
    head: Annotated[str | None, "in process: a trained head that drafts the answers"] = None


@dataclass
class HarvestConfig:
    """Hidden states: which, and how they are stored."""

    taps: Annotated[
        list[int] | Literal["auto"],
        "states of the residual stream, tap i = after i layers; auto: those that the head reads",
    ] = "auto"
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32", "fp8", "fp8-taps"],
        "of the stored features; fp8: e4m3 with a scale per row (fp8-taps: the last state stays bfloat16)",
    ] = "bfloat16"
    features: Annotated[
        Literal["stored", "live", "hybrid"],
        "stored: before training, on disk; live: by the target during training; hybrid: live once, kept on disk",
    ] = "stored"
    tokens_per_batch: Annotated[int, "tokens of one batch of texts that the target reads", Gt(0)] = 4096
    shard_mib: Annotated[float, "size of a shard, the unit of work that a killed harvest loses", Gt(0)] = 256
    check_disk: Annotated[bool, "refuse to start when the features may not fit the disk"] = True


@dataclass
class VocabConfig:
    """The draft vocabulary: the target tokens that the head may guess."""

    size: Annotated[int | None, "most frequent response tokens to keep; null: the full vocabulary", Gt(0)] = 32000
    coverage: Annotated[Fraction, "warn when less of the held-out response tokens is inside"] = 0.9
    least: Annotated[
        Fraction, "refuse to train when less of a script's held-out response tokens is inside; 0: train in any case"
    ] = 0.3
    pin_bytes: Annotated[bool, "always keep the pieces that spell single bytes, so that any text can be said"] = True
    quotas: Annotated[
        dict[str, Fraction], "share of the places for a script (Cyrillic, Latin, Han, …) or a source's name"
    ] = field(default_factory=dict)


@dataclass
class TrackConfig:
    """Where metrics go besides metrics.jsonl and `headwright plot`."""

    wandb: Annotated[
        Literal["auto", "off", "online", "offline"],
        "Weights & Biases; auto: where a key is there (`wandb login`), or as WANDB_MODE says",
    ] = "auto"
    project: Annotated[str, "project, or experiment, that the run belongs to"] = "headwright"
    also: Annotated[
        list[Literal["tensorboard", "mlflow", "trackio"]], "further trackers, by Accelerate's interface"
    ] = field(default_factory=list)


@dataclass
class DecodeConfig:
    """Real decoding of held-out prompts during training, beside the τ that stored features give."""

    evals: Annotated[int, "how often in the whole run; the last time at its end. 0: never", Ge(0)] = 2
    prompts: Annotated[int, "prompts, in turn from the sources; shared by the processes", Ge(1)] = 4
    max_new_tokens: Annotated[int, "tokens per answer", Ge(2)] = 32
    seconds: Annotated[float, "no further prompt is begun after so long", Gt(0)] = 60.0


@dataclass
class LoraConfig:
    """Low-rank updates of the head's own matrices, in place of training all of it."""

    rank: Annotated[int, "rank of an update", Ge(1)] = 16
    alpha: Annotated[float | None, "its scale is alpha / rank; default: twice the rank", Gt(0)] = None
    modules: Annotated[list[str], "names or patterns of the matrices that are adapted", MinLen(1)] = field(
        default_factory=lambda: ["*"]
    )
    new_rows: Annotated[
        bool,
        "adaptation: train the lm_head's rows of draft tokens that the head did not know in full, whatever the rank",
    ] = True


@dataclass
class TrainConfig:
    """The training loop."""

    epochs: Annotated[float, "passes over the features", Gt(0)] = 4
    tokens_per_batch: Annotated[int, "packed tokens per micro-batch and process", Gt(0)] = 2048
    accumulate: Annotated[int, "micro-batches per optimizer step and process", Ge(1)] = 1
    long_documents: Annotated[
        Literal["split", "whole", "refuse"],
        "a document above tokens_per_batch: in parts of its loss-bearing rows, each with all before it as context; "
        "as one batch; or an error",
    ] = "split"
    bad_documents: Annotated[
        Literal["stop", "skip"],
        "NaN or infinite features, unknown tokens, nothing to learn: an error, or left out and counted",
    ] = "stop"
    recompute: Annotated[
        bool, "run each rollout step again in the backward pass: less memory, a third more time, the same result"
    ] = False
    loss_mib: Annotated[
        float | None,
        "memory of one chunk of logits; default: as much as the lm_head's gradient, 32 MiB at least",
        Gt(0),
    ] = None
    compile: Annotated[
        Literal["auto", "on", "off"], "torch.compile of norms, activations and losses; auto: on GPUs"
    ] = "auto"
    warm_start: Annotated[
        str | None,
        "directory of a trained head to start from: whatever fits is taken over, lm_head rows token by token",
    ] = None
    lora: Annotated[LoraConfig | None, "train low-rank updates alone; they are merged when the head is saved"] = None
    workers: Annotated[int, "threads that read features ahead of the training step", Ge(1)] = 2

    # How the work is spread. Launchers decide; what stands here must agree with them.
    strategy: Annotated[
        Literal["auto"] | StrategyName,
        "what the launch must be, else the run does not start; auto: whatever was launched (configs/accelerate-*.yaml)",
    ] = "auto"
    processes: Annotated[int | None, "likewise: how many processes", Ge(1)] = None
    mixed_precision: Annotated[
        Literal["auto", "no", "bf16", "fp16"],
        "of the head's computation, under autocast; weights stay in fp32. auto: as launched; fp16 scales its losses",
    ] = "auto"
    hang_minutes: Annotated[
        float, "a rank that makes no progress for so long is named, and the training ends with an error", Gt(0)
    ] = 30.0

    # The optimizer
    optimizer: Annotated[
        Literal["adamw", "muon", "adamw-8bit"],
        "muon: for matrices, with AdamW for the rest; adamw-8bit: needs bitsandbytes and a GPU",
    ] = "adamw"
    lr: Annotated[float, "peak learning rate", Gt(0)] = 1e-4
    lr_scale: Annotated[
        dict[str, Annotated[float, Ge(0)]],
        "learning rates of parts, in the run's, by name or pattern: {lm_head: 0.5, '*norm*': 2}",
    ] = field(default_factory=dict)
    schedule: Annotated[
        Literal["cosine", "linear", "wsd", "constant"], "after the warm-up; wsd: constant, then down in the last part"
    ] = "cosine"
    decay: Annotated[Fraction, "wsd: share of the steps in which the rate falls"] = 0.2
    warmup: Annotated[Fraction, "share of the steps with rising learning rate"] = 0.04
    final_lr: Annotated[Fraction, "learning rate at the end of the schedule, as a share of the peak"] = 0.05
    betas: Annotated[tuple[float, float], "AdamW"] = (0.9, 0.95)
    weight_decay: Annotated[float, "of matrices", Ge(0)] = 0.0
    clip: Annotated[float, "global gradient norm", Gt(0)] = 1.0
    ema: Annotated[
        float | None,
        "moving average of the weights, such as 0.999: what is measured and kept is the average",
        Gt(0),
        Le(1),
    ] = None
    bad_steps: Annotated[
        int, "steps in a row with a loss or gradient that is not finite, each left out, after which the run ends", Ge(1)
    ] = 8

    # What is kept and measured
    evals: Annotated[int, "held-out measurements of τ in the whole run; the best head is kept", Ge(1)] = 6
    eval_every: Annotated[int | None, "steps between measurements, in place of evals", Ge(1)] = None
    decode: Annotated[DecodeConfig, "real decoding beside it"] = field(default_factory=DecodeConfig)
    patience: Annotated[
        int | None, "measurements without a better τ after which the training ends; null: it goes to its end", Ge(1)
    ] = None
    saves: Annotated[int, "checkpoints in the whole run", Ge(1)] = 12
    save_every: Annotated[int | None, "steps between checkpoints, in place of saves", Ge(1)] = None
    keep: Annotated[int, "newest checkpoints that are kept; the best head is always", Ge(1)] = 1
    log_every: Annotated[int, "steps between lines of metrics.jsonl", Ge(1)] = 5
    track: Annotated[TrackConfig, "trackers"] = field(default_factory=TrackConfig)


@dataclass
class ShapeConfig:
    """One draft shape to evaluate."""

    kind: Annotated[
        Literal["chain", "dynamic", "static"], "chain, the EAGLE-2 dynamic tree, or a tree of fixed layout"
    ] = "chain"
    depth: Annotated[int, "chain, dynamic: drafted tokens below the root", Ge(1)] = 5
    top_k: Annotated[int, "dynamic: children per node and width of a level", Ge(1)] = 1
    nodes: Annotated[int | None, "dynamic: drafted nodes kept for verification", Ge(1)] = None
    file: Annotated[
        str | None, "static: a JSON list of rank paths, [[0], [1], [0, 0], …], or a built-in tree: eagle-1"
    ] = None


@dataclass
class PromptSet:
    """One prompt set: held-out, a known one (docs/evaluation.md), or any file or data set."""

    set: Annotated[
        str | None, "held-out (the run's own split), mt-bench, gsm8k, …: what is known of rows and wording"
    ] = None
    path: Annotated[str | None, "a local file in that set's own format, or any file of prompts; see corpus.sources"] = (
        None
    )
    hub: Annotated[str | None, "a data set on the Hugging Face hub; default: the known set's"] = None
    demo: Annotated[str | None, "a set from a registry package: gsm8k, humaneval, mt-bench, vicuna"] = None
    config: Annotated[str | None, "hub: configuration name"] = None
    split: Annotated[str | None, "hub: split"] = None
    revision: Annotated[str | None, "hub: revision"] = None
    name: Annotated[str | None, "label in tables; default: made from the above"] = None
    domain: Annotated[str | None, "domain in tables; default: the set's, or each row's category"] = None
    language: Annotated[
        str | None, "language in tables; default: the set's, or the script that a prompt is written in"
    ] = None
    template: Annotated[str | None, 'how a row becomes a prompt: "Summarize: {article}"'] = None
    prompts: Annotated[int | None, "at most so many, in turn from its domains; default: eval.prompts", Ge(1)] = None
    turns: Annotated[int | None, "at most so many of a conversation's user turns", Ge(1)] = None
    general: Annotated[bool, "adaptation: traffic that must not be forgotten; held-out: see corpus.sources"] = False


@dataclass
class EvalConfig:
    """What is measured, on which prompts."""

    sets: Annotated[list[PromptSet], "prompt sets", MinLen(1)] = field(default_factory=lambda: [PromptSet("held-out")])
    prompts: Annotated[int, "prompts of each set", Ge(1)] = 32
    max_new_tokens: Annotated[int, "tokens per answer", Ge(2)] = 96
    temperatures: Annotated[list[float], "0 is greedy", MinLen(1)] = field(default_factory=lambda: [0.0])
    shapes: Annotated[list[ShapeConfig], "draft shapes", MinLen(1)] = field(default_factory=lambda: [ShapeConfig()])
    verification: Annotated[
        Literal["auto", "walk", "sampled", "typical"],
        "above temperature 0: guesses drawn from the head (sampled) or its most likely ones (walk); auto: what is accepted "
        "longest; typical: Medusa's rule, which is not lossless",
    ] = "auto"
    baselines: Annotated[
        list[Literal["prompt-lookup", "suffix", "retrieval", "lookahead", "early-exit"]],
        "training-free drafters to measure beside the head, in the first shape that suits each",
    ] = field(default_factory=lambda: ["prompt-lookup"])
    draft_model: Annotated[
        str | None, "a small model with the target's tokenizer, measured as a drafter: hub name or directory"
    ] = None
    heads: Annotated[
        list[str], "further heads to measure beside the run's own, in the same turns: directories or checkpoints"
    ] = field(default_factory=list)
    timed_prompts: Annotated[
        int, "prompts of each set on which speed is measured: every side and both plain baselines in turn", Ge(1)
    ] = 8
    rounds: Annotated[int, "how often each side decodes a timed prompt; the median counts", Ge(1)] = 1
    patience: Annotated[
        float,
        "seconds that are spent in all on measurements which other processes disturbed: waiting until these have finished, and "
        "measuring again",
        Ge(0),
    ] = 60.0
    ignore_eos: Annotated[bool, "equal work: end tokens do not end a text, so that all have max_new_tokens"] = False
    gpu_ceiling: Annotated[
        tuple[float, float],
        "modelled GPU: cost of one draft step and of verifying all nodes, in plain steps",
    ] = (0.05, 1.05)


@dataclass
class TuneConfig:
    """`headwright tune`: which shapes are compared."""

    depth: Annotated[int, "deepest draft", Ge(1), Le(32)] = 6
    widths: Annotated[list[Annotated[int, Ge(1)]], "1: chains; others: top_k of dynamic trees", MinLen(1)] = field(
        default_factory=lambda: [1, 2, 4, 8]
    )
    nodes: Annotated[int, "most drafted nodes per pass", Ge(1)] = 64
    prompts: Annotated[int, "held-out answers on which τ is computed", Ge(1)] = 24
    real_runs: Annotated[int, "best predicted shapes that are then really run, beside plain decoding", Ge(1)] = 3
    run_prompts: Annotated[int, "prompts of a real run", Ge(1)] = 8
    rounds: Annotated[int, "bursts in which each cost is measured; medians are used", Ge(1)] = 3


@dataclass
class TemplateConfig:
    """Another way in which a server may put prompts."""

    name: Annotated[str, "in tables"] = ""
    system: Annotated[str | None, "system prompt in place of the chats' own"] = None
    template: Annotated[dict[str, Any], "arguments of the chat template, such as {enable_thinking: true}"] = field(
        default_factory=dict
    )
    file: Annotated[str | None, "a chat template (Jinja) in place of the tokenizer's"] = None


@dataclass
class StudyConfig:
    """`headwright study`: what is swept. Prompts are the run's held-out ones, unless a study is about other sets."""

    prompts: Annotated[int, "held-out prompts of each row", Ge(1)] = 6
    max_new_tokens: Annotated[int, "tokens per answer", Ge(2)] = 64
    rounds: Annotated[int, "how often each side decodes a prompt; the median counts", Ge(1)] = 1
    depths: Annotated[list[Annotated[int, Ge(1)]], "depths of chains and trees", MinLen(1)] = field(
        default_factory=lambda: [1, 2, 3, 5, 7, 10]
    )
    width: Annotated[int, "top_k of trees, where the width is fixed", Ge(2)] = 4
    nodes: Annotated[int, "nodes of trees, where they are fixed", Ge(2)] = 12
    widths: Annotated[list[Annotated[int, Ge(2)]], "top_k of trees", MinLen(1)] = field(
        default_factory=lambda: [2, 4, 8]
    )
    node_counts: Annotated[list[Annotated[int, Ge(2)]], "nodes of trees", MinLen(1)] = field(
        default_factory=lambda: [7, 12, 23, 40]
    )
    depth: Annotated[int, "depth, where it is fixed", Ge(1)] = 5
    temperatures: Annotated[list[Annotated[float, Ge(0)]], "0 is greedy", MinLen(1)] = field(
        default_factory=lambda: [0.0, 0.3, 0.7, 1.0]
    )
    batches: Annotated[list[Annotated[int, Ge(1)]], "texts at the same time", MinLen(1)] = field(
        default_factory=lambda: [1, 2, 4, 8]
    )
    contexts: Annotated[list[Annotated[int, Ge(16)]], "tokens of a prompt", MinLen(1)] = field(
        default_factory=lambda: [512, 1024, 2048, 4096, 8000]
    )
    context_prompts: Annotated[int, "prompts of each length", Ge(1)] = 2
    passes: Annotated[list[Annotated[int, Ge(1)]], "tokens of a target pass", MinLen(1)] = field(
        default_factory=lambda: [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128]
    )
    sizes: Annotated[
        list[str], "targets whose costs are compared, of random weights: HIDDENxLAYERSxHEADSxKV-HEADSxMLPxVOCABULARY"
    ] = field(default_factory=lambda: ["576x30x9x3x1536x49152", "960x32x15x5x2560x49152", "2048x16x32x8x8192x128256"])
    templates: Annotated[
        list[TemplateConfig],
        "template: ways in which prompts are put besides that of training; none: those that servers usually differ in",
    ] = field(default_factory=list)
    samples: Annotated[int, "texts drawn for the test of sampled losslessness", Ge(100)] = 500


@dataclass
class ExportConfig:
    """Engine directories."""

    engines: Annotated[
        list[str],
        "formats that the head knows (docs/serving.md); portable: one directory for vLLM and SGLang",
        MinLen(1),
    ] = field(default_factory=lambda: ["portable"])
    dtype: Annotated[Literal["target", "float32", "bfloat16", "float16"], "of the written weights"] = "target"
    name_or_path: Annotated[str | None, "how the target is called in SERVE.md; default: target.model"] = None
    prompts: Annotated[int, "held-out prompts on which the written files must draft as the head does", Ge(1)] = 4


@dataclass
class PlanConfig:
    """`headwright plan`."""

    seconds: Annotated[float, "time for the probes; two batches of the target are run in any case", Gt(0)] = 60.0


@dataclass
class AdaptConfig:
    """`headwright adapt`: a trained head, taken to another domain or language."""

    head: Annotated[
        str | None, "directory of the head to start from: ours, a checkpoint, an export, or one of another project"
    ] = None
    vocab: Annotated[
        Literal["keep", "extend", "rebuild"],
        "the draft vocabulary. keep: the head's; extend: with the most frequent tokens of the new text, up to vocab.size; "
        "rebuild: vocab.size tokens chosen anew. Rows of tokens that were known are carried over in any case",
    ] = "extend"
    replay: Annotated[
        Annotated[float, Ge(0), Lt(1)] | Literal["search"],
        "share of the training rows that come from general sources (corpus.sources[i].general); search: the one of "
        "adapt.shares that is best for the domain within the budget, by short trials",
    ] = 0.25
    budget: Annotated[
        Fraction, "how much of its accepted drafts per cycle (τ - 1) on general text a head may lose and still be kept"
    ] = 0.05
    shares: Annotated[list[Annotated[float, Ge(0), Lt(1)]], "replay: search: what is tried", MinLen(1)] = field(
        default_factory=lambda: [0.0, 0.1, 0.25, 0.5]
    )
    trial: Annotated[float, "replay: search: epochs of a trial, as a share of the training's", Gt(0), Le(1)] = 0.34
    curve: Annotated[
        list[Annotated[float, Gt(0), Lt(1)]],
        "learning curve: shares of the domain's documents with which heads are trained besides, such as [0.25, 0.5], to "
        "say what more text would give; none: no curve",
    ] = field(default_factory=list)
    part: Annotated[float, "share of the domain's training documents that is learned", Gt(0), Le(1)] = 1.0
    fresh: Annotated[
        bool, "begin with new weights in place of the head's: training from scratch, to compare an adaptation with"
    ] = False


@dataclass
class RunConfig:
    """A run: harvest, train, eval, export, all from one file."""

    name: Annotated[str, "names the run directory"] = ""
    runs: Annotated[str, "where run directories live"] = "runs"
    seed: Annotated[int, "of everything random"] = 0
    features: Annotated[str | None, "name of the run whose harvested features are used; default: this run's own"] = None
    target: TargetConfig = field(default_factory=TargetConfig)
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    answers: AnswersConfig = field(default_factory=AnswersConfig)
    regenerate: RegenerateConfig = field(default_factory=RegenerateConfig)
    harvest: HarvestConfig = field(default_factory=HarvestConfig)
    vocab: VocabConfig = field(default_factory=VocabConfig)
    head: Annotated[Any, "kind, and the keys of heads/<kind>.py"] = None
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    tune: TuneConfig = field(default_factory=TuneConfig)
    study: StudyConfig = field(default_factory=StudyConfig)
    adapt: AdaptConfig = field(default_factory=AdaptConfig)

    @property
    def directory(self) -> Path:
        """`runs/<name>/`."""
        return Path(self.runs) / self.name

"""`headwright STAGE`, for every stage in the table below. Imports a stage only when it is asked for."""

import importlib
import sys

STAGES = {
    "plan": ("headwright.train.plan", "disk, memory and time of a run, from short probes, before anything is spent"),
    "preview": ("headwright.data.preview", "show what the loss mask covers, in colour"),
    "regenerate": ("headwright.data.regenerate", "let the target rewrite a corpus's answers, here or over servers"),
    "harvest": ("headwright.data.harvest", "run the target over the corpus and store its hidden states"),
    "verify": ("headwright.data.damage", "compare stored features with their checksums"),
    "vocab": ("headwright.data.coverage", "what the draft vocabulary covers, by source and script"),
    "train": ("headwright.train.run", "train a draft head on them"),
    "adapt": ("headwright.train.adapt", "take a trained head to a domain or language, with a before and an after"),
    "eval": (
        "headwright.eval.acceptance",
        "measure τ, speed and losslessness; write report.json and report.html",
    ),
    "compare": ("headwright.eval.compare", "evaluations side by side, paired over prompts, with a test: RUN RUN …"),
    "study": (
        "headwright.eval.study",
        "sweeps, each a table and a plot: depth, width, batch, context, domain, …: NAME",
    ),
    "speedup": ("headwright.eval.calculator", "what speculation would bring, by formula: --alpha A --cost C --depth K"),
    "watch": (
        "headwright.eval.monitor",
        "a serving vLLM's or SGLang's acceptance against what was measured: --url URL",
    ),
    "tune": ("headwright.eval.tune", "choose the draft shape for this device and these prompts, from measured costs"),
    "export": ("headwright.heads.export", "write directories that vLLM and SGLang load"),
    "import": ("headwright.heads.importer", "take a head of others (EAGLE, SpecForge, speculators, …) into a run: DIR"),
    "doctor": ("headwright.heads.doctor", "will an engine load this head, and serve what was trained? DIR"),
    "prove": ("headwright.eval.prove", "run the real vLLM on the exports: its acceptance counters must equal ours"),
    "chat": ("headwright.eval.chat", "talk to a target through a head, accepted draft tokens in colour: --head DIR"),
    "plot": ("headwright.train.plot", "the curves of a run, without any tracker: DIR"),
    "push": ("headwright.train.push", "a head with its model card, into a folder or to the Hugging Face Hub: DIR"),
    "terms": ("headwright.data.embedded", "show and accept the terms of an embedded model that has its own: MODEL"),
    "summary": ("headwright.train.summary", "one table over a finished run"),
}


def usage() -> str:
    """The help text."""
    lines = [f"  {name:10} {about}" for name, (_, about) in STAGES.items()]
    return (
        "headwright: train draft heads for speculative decoding, and prove what they are worth\n\n"
        "usage: headwright STAGE --config FILE [--dry-run] [section.key=value …]\n\n"
        + "\n".join(lines)
        + "\n\nheadwright STAGE --help explains every key of its sections. Start here:\n"
        "  headwright harvest --config configs/smollm2-eagle3.yaml"
    )


def main() -> None:
    """Console script."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return
    if arguments[0] not in STAGES:
        from headwright.configs.load import nearest

        hint = nearest(arguments[0], STAGES, words="stages")
        print(f"error: no stage {arguments[0]!r}; {hint}", file=sys.stderr)
        sys.exit(2)
    from headwright.configs.command import clean_exit

    with clean_exit():
        importlib.import_module(STAGES[arguments[0]][0]).main(arguments[1:])


if __name__ == "__main__":
    main()

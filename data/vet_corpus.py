"""Whether a domain's text can be adapted to at all: found out from the text and the tokenizer, before the target runs."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

from headwright.configs import RunConfig, UserError
from headwright.configs.console import say
from headwright.data.corpus import Document, general_sources, read_corpus
from headwright.data.scripts import script_of
from headwright.data.vocab import byte_pieces

LOOKED_AT = 200  # documents
BYTES = 0.8  # share of a text's tokens that are single bytes: the tokenizer has no pieces for it
UNKNOWN = 0.05  # share of unknown tokens


def refuse_corpus(run: RunConfig, tokenizer: Any) -> None:
    """Both splits must hold text of the domain, and the tokenizer must have pieces for it. Raises UserError."""
    corpus, general = read_corpus(run.corpus, run.seed, run.directory), general_sources(run.corpus)
    for side, documents in (("training", corpus.train), ("held-out", corpus.held_out)):
        if all(document.source in general for document in documents):
            raise UserError(
                f"corpus: no {side} document is of the domain (sources without general: true): change corpus.held_out "
                f"({run.corpus.held_out:g}), or give it more text"
            )
    if general and not any(document.source in general for document in corpus.held_out):
        if run.adapt.replay == "search":
            raise UserError(
                "adapt.replay search: no general text is held out: nothing would say what is forgotten; raise corpus.held_out"
            )
        say("no general text is held out: nothing will say what the head forgets (raise corpus.held_out)")
    domain = (document for document in corpus.train if document.source not in general)
    refuse_script(run, list(islice(domain, LOOKED_AT)), tokenizer)


def refuse_script(run: RunConfig, documents: Iterable[Document], tokenizer: Any) -> None:
    """Text that the tokenizer spells by the byte, or does not know. Raises UserError, unless vocab.least is 0."""
    text = "\n".join(filter(None, (" ".join(document.words_of) for document in documents)))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
    if not ids or run.vocab.least == 0:
        return
    script, spelled = script_of(text), set(byte_pieces(tokenizer, len(tokenizer)))
    single = sum(token in spelled for token in ids) / len(ids)
    unknown = sum(token == tokenizer.unk_token_id for token in ids) / len(ids)
    if single > BYTES or unknown > UNKNOWN:
        what = f"{unknown:.0%} unknown tokens" if unknown > UNKNOWN else f"single bytes for {single:.0%} of its tokens"
        raise UserError(
            f"corpus: the domain's text is {script}, for which the tokenizer of {run.target.model} has no pieces ({what}): "
            "the target cannot have learned it, and a head can draft no more than letters. Choose a target that was made for "
            "this language, or set vocab.least=0 to go on in any case"
        )

"""speculators' EAGLE-3 step, offline: its draft model with its own batch shift and loss.

On a CPU attention is sdpa and the loss its "eager" one: simple_flex_attention has no backward there, and its fused loss is
a Triton kernel. Its lm_head is frozen as shipped; here it learns, as everybody else's does.
"""

from importlib.metadata import version
from typing import Any

import torch
from common import Data, Problem, Side, main


def make_config(problem: Problem) -> Any:
    """No verifier's name: what it would load from a verifier is put in by hand."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    layer = LlamaConfig(**problem.llama())
    layer._attn_implementation = "sdpa" if problem.device == "cpu" else "simple_flex_attention"
    proposal = GreedyTokenProposalConfig(speculative_tokens=problem.steps)
    verifier = VerifierConfig(name_or_path=None, architectures=[])
    return Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=problem.draft_vocabulary,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3", proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier
        ),
    )


def make_model(problem: Problem, data: Data) -> Any:
    """Their draft model, filled in."""
    from speculators.models.eagle3.core import Eagle3DraftModel

    model = Eagle3DraftModel(make_config(problem))
    ids_W = data.ids_W.cpu()
    in_draft_V = torch.zeros(problem.vocabulary, dtype=torch.bool).scatter_(0, ids_W, True)
    model.load_vocab_mappings(in_draft_V, ids_W - torch.arange(len(ids_W)))
    model.embed_tokens.weight.data = data.embedding_VH
    model.verifier_lm_head.weight.data = data.lm_head_VH[data.ids_W]
    model.verifier_norm.weight.data.fill_(1.0)
    model.lm_head.weight.requires_grad_(True)
    for weight in model.parameters():
        if weight.isnan().any():
            weight.data.normal_(std=0.02)
    return model


def make_batch(data: Data) -> dict[str, Any]:
    """One document, shifted by their own function, which drops its last row."""
    from speculators.models.eagle3.data import shift_batch

    length = len(data.ids_T)
    batch = {
        "input_ids": data.ids_T,
        "hidden_states": data.taps_T3H.flatten(1),
        "verifier_last_hidden_states": data.last_TH,
        "loss_mask": data.mask_T,
        "lengths": torch.tensor([length]),
        "position_ids": torch.arange(length, device=data.ids_T.device),
    }
    batch = shift_batch(batch)
    del batch["lengths"]
    batch["document_ids"] = torch.zeros_like(batch["input_ids"])
    return {name: tensor[None] for name, tensor in batch.items()}


def build(problem: Problem, data: Data) -> Side:
    """Their call with the options that their trainer would pass."""
    from speculators.losses import resolve_loss_config

    model, batch = make_model(problem, data), make_batch(data)
    options = {
        "ttt_steps": problem.steps,
        "ttt_step_loss_decay": problem.decay,
        "loss_config": resolve_loss_config("kl_div", "eager" if problem.device == "cpu" else "fused"),
    }
    return Side(version("speculators"), model, lambda: model(**batch, **options)[1])


if __name__ == "__main__":
    main("speculators", build)

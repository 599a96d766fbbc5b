"""SpecForge's EAGLE-3 step, offline: its draft model, its target head, its strategy's loss.

Its loss is a Triton kernel, which cannot launch on a CPU. There the reference that it is tested against takes its place,
`_compute_loss` of the same package. Attention is sdpa on a CPU, since flex has no backward there.
"""

from importlib.metadata import version
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from common import Data, Problem, Side, main
from torch import Tensor


def make_config(problem: Problem) -> Any:
    """The draft model's, and the target's as far as its head goes."""
    from transformers import LlamaConfig

    return LlamaConfig(**problem.llama(), draft_vocab_size=problem.draft_vocabulary, pretraining_tp=1)


def make_target_head(config: Any, lm_head_VH: Tensor) -> Any:
    """Their frozen lm_head. It reads its shape from a directory."""
    from specforge.modeling.target.target_head import TargetHead

    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        head = TargetHead(folder)
    head.fc.weight.data = lm_head_VH
    head.freeze_weights()
    return head


def make_draft(config: Any, data: Data, attention: str) -> Any:
    """Their draft model with the target's embedding, frozen, and the draft vocabulary's maps."""
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

    draft = LlamaForCausalLMEagle3(config, attention_backend=attention)
    draft.embed_tokens.weight.data = data.embedding_VH
    draft.freeze_embedding()
    draft.t2d.zero_()[data.ids_W] = True
    draft.d2t.copy_(data.ids_W.cpu() - torch.arange(len(data.ids_W)))
    return draft


def make_strategy(problem: Problem, data: Data, config: Any) -> Any:
    """Their rollout and loss."""
    import specforge.algorithms.eagle3.model as eagle3
    from specforge.core.loss import _compute_loss
    from specforge.training.strategies.base import Eagle3TrainStrategy

    on_cpu = problem.device == "cpu"
    if on_cpu:
        eagle3.LogSoftmaxLoss = SimpleNamespace(apply=_compute_loss)
    attention = "sdpa" if on_cpu else "flex_attention"
    draft = make_draft(config, data, attention)
    model = eagle3.OnlineEagle3Model(draft, length=problem.steps, attention_backend=attention).to(problem.device)
    return Eagle3TrainStrategy(model, target_head=make_target_head(config, data.lm_head_VH), ploss_decay=problem.decay)


def build(problem: Problem, data: Data) -> Side:
    """One document, as their offline reader hands it over."""
    from specforge.data.preprocessing import process_offline_eagle3_sample
    from specforge.runtime.contracts import TrainBatch

    strategy = make_strategy(problem, data, make_config(problem))
    stored = {
        "input_ids": data.ids_T,
        "loss_mask": data.mask_T.long(),
        "aux_hidden_state": data.taps_T3H.flatten(1),
        "hidden_state": data.last_TH,
    }
    tensors = process_offline_eagle3_sample(stored, problem.sequence)
    batch = TrainBatch(["0"], "eagle3", tensors, {"target_repr": "hidden_state"})
    return Side(version("specforge"), strategy.trainable_module(), lambda: strategy.forward_loss(batch).loss)


if __name__ == "__main__":
    main("specforge", build)

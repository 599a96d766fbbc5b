"""An independent reader of exported EAGLE-3 directories. T rows of context, H head width, W draft vocabulary."""

import torch
from torch import Tensor

from headwright.heads.base import Case, Drafts, Tables
from headwright.heads.plain import PlainLlama


class PlainEagle3(PlainLlama):
    """The head in a directory."""

    def fuse(self, taps_TKD: Tensor) -> Tensor:
        """fc over the captured states, each or all of them normed first where the config says so."""
        parts = list(taps_TKD.unbind(1))
        if self.config["fc_norm"]:
            parts = [self.norm(part, f"fc_norm.{k}") for k, part in enumerate(parts)]
        whole = torch.cat(parts, -1)
        return self.linear(self.norm(whole, "input_norm") if self.config["norm_before_fc"] else whole, "fc")

    def stack(self, embedding_TH: Tensor, feature_TH: Tensor) -> Tensor:
        """All decoder layers on a whole causal sequence; output before the final norm."""
        normed = self.norm(feature_TH, "midlayer.hidden_norm")
        x = torch.cat([self.norm(embedding_TH, "midlayer.input_layernorm"), normed], -1)
        out = self.layer("midlayer", x, normed if self.config["norm_before_residual"] else feature_TH)
        for number in range(1, self.config["num_hidden_layers"]):
            out = self.layer(f"layers.{number}", self.norm(out, f"layers.{number}.input_layernorm"), out)
        return out

    def draft(self, tables: Tables, case: Case, count: int) -> Drafts:
        """`count` greedy tokens after the last of `following` (the token after each row), by full recomputation."""
        feature = self.fuse(case.taps_TKD)
        tokens, scores = list(case.following), [0.0]
        embedding_VH = self.w.get("embed_tokens.weight", tables.embedding_VD)
        for _ in range(count):
            hidden = self.stack(embedding_VH[torch.tensor(tokens)], feature)
            normed = self.norm(hidden[-1], "norm")
            logits = self.linear(normed, "lm_head") if "lm_head.weight" in self.w else normed @ tables.lm_head_VD.T
            draft = int(logits.argmax())
            scores.append(scores[-1] + float(logits.log_softmax(-1)[draft]))
            tokens.append(draft + int(self.w["d2t"][draft]) if "d2t" in self.w else draft)
            feature = torch.cat([feature, (normed if self.config["norm_output"] else hidden[-1])[None]])
        return Drafts(tokens[len(case.following) :], scores[1:])

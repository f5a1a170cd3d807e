"""Log-probabilities of sampled tokens and of the likeliest ones, from the raw logits."""

import torch

from rayfin.kernels.sampling.filters import stable_top


def top_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The log probabilities and ranks of `tokens`, and of the top tokens.

    Args:
        logits: [S, V] any float dtype, before temperature and filters.
        tokens: [S] integer ids.
        k: number of top tokens; 0 gives empty tensors, more than V gives V.

    Returns:
        token logprob [S] fp32; top ids [S, k] int64, likeliest first, lower id first among equals
        (so that the first one is the greedy token); top logprobs [S, k] fp32; rank [S] int64, 1 =
        no token has a higher logit than this one.
    """
    logits = logits.float()
    normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)  # [S, 1]
    chosen = logits.gather(1, tokens.long().unsqueeze(1))  # [S, 1]
    rank = (logits > chosen).sum(dim=-1) + 1
    top_ids = stable_top(logits, min(k, logits.shape[-1]))
    top = logits.gather(1, top_ids) - normaliser
    return (chosen - normaliser).squeeze(1), top_ids, top, rank

"""Penalties on tokens that a request has already used, as vLLM and the OpenAI API define them."""

import torch


def apply_penalties(
    logits: torch.Tensor,
    in_prompt: torch.Tensor,
    output_counts: torch.Tensor,
    *,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """Lower (or with negative penalties raise) the logits of used tokens.

    Args:
        logits: [S, V] any float dtype.
        in_prompt: [S, V] bool, the token occurs in the prompt.
        output_counts: [S, V] integer, how often the token has been generated.
        repetition: [S] fp32, 1 = off; tokens of prompt or output: positive logits are divided by
            it, negative ones multiplied (Keskar et al., 2019, "CTRL").
        presence: [S] fp32, 0 = off; subtracted once from generated tokens.
        frequency: [S] fp32, 0 = off; subtracted once per time a token was generated.

    Returns:
        [S, V] fp32, a new tensor.
    """
    logits = logits.float()
    generated = output_counts > 0
    factor = repetition.unsqueeze(1)
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(in_prompt | generated, repeated, logits)
    logits = logits - frequency.unsqueeze(1) * output_counts
    return logits - presence.unsqueeze(1) * generated

"""Random trajectories of widely varying length, padded for published formulas and packed for ours; all float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from laminar.algorithms.policy_losses import PolicyTokens

ROWS, LONGEST = 12, 10


@dataclass
class RandomTokens:
    """Padded tensors [ROWS, LONGEST]; row 0 has observations amid the response, row 1 is empty, row 2 has one token."""

    logprobs: torch.Tensor  # with gradient
    old: torch.Tensor
    engine: torch.Tensor
    reference: torch.Tensor
    advantages: torch.Tensor  # [ROWS]
    mask: torch.Tensor  # bool

    @property
    def rows(self):
        """The row of each packed token."""
        return torch.arange(ROWS)[:, None].expand(ROWS, LONGEST)[self.mask]

    def packed(self, old=None):
        return PolicyTokens(
            logprobs=self.logprobs[self.mask],
            old_logprobs=(self.old if old is None else old)[self.mask],
            engine_logprobs=self.engine[self.mask],
            advantages=self.advantages[:, None].expand(ROWS, LONGEST)[self.mask],
            loss_mask=torch.ones(int(self.mask.sum()), dtype=torch.bool),
            trajectories=self.rows,
        )


def random_tokens(seed, spread=0.4):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, LONGEST + 1, (ROWS,), generator=generator)
    lengths[:3] = torch.tensor([LONGEST, 0, 1])
    mask = torch.arange(LONGEST)[None] < lengths[:, None]
    mask[0, 2:4] = False
    old = -3 * torch.rand(ROWS, LONGEST, generator=generator, dtype=torch.float64)
    return RandomTokens(
        logprobs=(old + spread * normal(ROWS, LONGEST)).requires_grad_(),
        old=old,
        engine=old + 0.6 * normal(ROWS, LONGEST),
        reference=old + 0.5 * normal(ROWS, LONGEST),
        advantages=normal(ROWS),
        mask=mask,
    )


def same_gradient(ours, theirs, logprobs):
    """Value and gradient of two losses, to 1e-6 (they differ by far less)."""
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
    (our_gradient,) = torch.autograd.grad(ours, logprobs, retain_graph=True)
    (their_gradient,) = torch.autograd.grad(theirs, logprobs, retain_graph=True)
    assert their_gradient.abs().max() > 1e-4
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-6, atol=1e-9)

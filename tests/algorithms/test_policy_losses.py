from __future__ import annotations

import functools
import math
import operator

import pytest
import torch

from laminar.algorithms.policy_losses import (
    PolicyTokens,
    cispo,
    dapo,
    decoupled_ppo,
    gspo,
    plain_ratio,
    policy_loss_metrics,
    ppo,
)
from tests.algorithms.random_tokens import LONGEST, ROWS, random_tokens, same_gradient

LOSSES = (ppo, dapo, gspo, cispo, decoupled_ppo)


def tokens_of(ratios, advantages, mask=None, trajectories=None, engine=None):
    """Packed tokens with old logprob -1 and the given ratios; `.logprobs` takes a gradient."""
    old = torch.full((len(ratios),), -1.0)
    return PolicyTokens(
        logprobs=(old + torch.tensor(ratios).log()).requires_grad_(),
        old_logprobs=old,
        engine_logprobs=old if engine is None else torch.tensor(engine),
        advantages=torch.tensor(advantages),
        loss_mask=torch.ones(len(ratios)).bool() if mask is None else torch.tensor(mask).bool(),
        trajectories=torch.zeros(len(ratios), dtype=torch.long)
        if trajectories is None
        else torch.tensor(trajectories).long(),
    )


def value_and_gradient(loss, tokens, **options):
    """Losses of the tokens, and the gradient of their sum."""
    losses = loss(tokens, **options)
    (gradient,) = torch.autograd.grad(losses.values.sum(), tokens.logprobs)
    return losses, losses.values.tolist(), gradient.tolist()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "low", "high"),
    [
        # Positive advantage: gradient -ratio * A until the ratio passes 1.28, then none.
        (1.0, 2.0, -2.0, -2.0, 0, 0),
        (1.27, 2.0, -2.54, -2.54, 0, 0),
        (1.5, 2.0, -2.56, 0.0, 0, 1),
        (0.5, 2.0, -1.0, -1.0, 0, 0),  # fallen below the lower bound: still pulled up
        # Negative advantage: gradient until the ratio passes 0.8 downwards, then none; never clipped from above.
        (1.0, -2.0, 2.0, 2.0, 0, 0),
        (0.81, -2.0, 1.62, 1.62, 0, 0),
        (0.5, -2.0, 1.6, 0.0, 1, 0),
        (1.5, -2.0, 3.0, 3.0, 0, 0),
        (1.5, 0.0, 0.0, 0.0, 0, 0),
    ],
)
def test_dapo_by_hand(ratio, advantage, loss, gradient, low, high):
    losses, values, gradients = value_and_gradient(dapo, tokens_of([ratio], [advantage]))
    assert values == pytest.approx([loss], rel=1e-6)
    assert gradients == pytest.approx([gradient], rel=1e-6)
    assert (losses.clipped_low.item(), losses.clipped_high.item()) == (low, high)


def test_ppo_clips_both_sides_alike():
    _, values, gradients = value_and_gradient(ppo, tokens_of([1.25, 1.19, 0.75], [1.0, 1.0, -1.0]))
    assert values == pytest.approx([-1.2, -1.19, 0.8], rel=1e-6)
    assert gradients == pytest.approx([0.0, -1.19, 0.0], rel=1e-6)


def test_dual_clip_by_hand():
    # Negative advantage and a ratio of 5: -min(...) would be 10; it is bounded at 3 * 2, without gradient.
    losses, values, gradients = value_and_gradient(
        ppo, tokens_of([5.0, 2.9, 5.0, 0.5], [-2.0, -2.0, 2.0, -2.0]), dual_clip=3.0
    )
    assert values == pytest.approx([6.0, 5.8, -2.4, 1.6], rel=1e-6)
    assert gradients == pytest.approx([0.0, 5.8, 0.0, 0.0], rel=1e-6)
    assert losses.clipped_high.tolist() == [True, False, True, False]
    assert losses.clipped_low.tolist() == [False, False, False, True]


def test_gspo_by_hand():
    # Trajectory 0: mean log-ratio (log 1.2 + log 1.0) / 2, ratio sqrt(1.2); trajectory 1 has one token.
    root = math.sqrt(1.2)
    tokens = tokens_of([1.2, 1.0, 1.5, 7.0], [1.0, 1.0, -1.0, 9.0], mask=[1, 1, 1, 0], trajectories=[0, 0, 1, 1])
    losses, values, gradients = value_and_gradient(gspo, tokens, clip_low=0.2, clip_high=0.28)
    assert losses.ratio.tolist() == pytest.approx([root, root, 1.5, 1.0], rel=1e-6)
    assert values == pytest.approx([-root, -root, 1.5, 0.0], rel=1e-6)
    assert gradients == pytest.approx([-root, -root, 1.5, 0.0], rel=1e-6)
    # In the paper's range both trajectories are far outside: no gradient where it would push further.
    losses, values, gradients = value_and_gradient(gspo, tokens)
    assert values == pytest.approx([-1.0004, -1.0004, 1.5, 0.0], rel=1e-6)
    assert gradients == pytest.approx([0.0, 0.0, 1.5, 0.0], rel=1e-6)
    assert losses.clipped_high.tolist() == [True, True, False, False]


def test_cispo_by_hand():
    # -w A log p with w = min(ratio, 5); the gradient is -w A, also where the weight is bounded.
    losses, values, gradients = value_and_gradient(cispo, tokens_of([6.0, 0.1, 2.0], [1.0, 1.0, -2.0]))
    logs = [-1 + math.log(ratio) for ratio in (6.0, 0.1, 2.0)]
    assert values == pytest.approx([-5 * logs[0], -0.1 * logs[1], 4 * logs[2]], rel=1e-6)
    assert gradients == pytest.approx([-5.0, -0.1, 4.0], rel=1e-6)
    assert losses.clipped_high.tolist() == [True, False, False] and not losses.clipped_low.any()
    losses, _, gradients = value_and_gradient(
        cispo, tokens_of([6.0, 0.1, 2.0], [1.0, 1.0, -2.0]), clip_low=0.2, clip_high=0.28
    )
    assert gradients == pytest.approx([-1.28, -0.8, 2.56], rel=1e-6)
    assert losses.clipped_low.tolist() == [False, True, False]


def test_decoupled_ppo_by_hand():
    # proximal / behavior is 2, 0.5, 4; the clip looks at current / proximal alone.
    engine = [-1 - math.log(2), -1 + math.log(2), -1 - math.log(4)]
    tokens = tokens_of([1.1, 0.7, 1.3], [1.0, -1.0, 1.0], engine=engine)
    _, values, gradients = value_and_gradient(decoupled_ppo, tokens)
    assert values == pytest.approx([-2.2, 0.4, -4.8], rel=1e-6)
    assert gradients == pytest.approx([-2.2, 0.0, 0.0], rel=1e-6)
    _, values, gradients = value_and_gradient(decoupled_ppo, tokens, behavior_cap=3.0)
    assert values == pytest.approx([-2.2, 0.4, 0.0], rel=1e-6)


def test_with_one_behavior_policy_decoupled_ppo_is_ppo():
    tokens = random_tokens(3)
    tokens.engine = tokens.old
    same_gradient(decoupled_ppo(tokens.packed()).values.sum(), ppo(tokens.packed()).values.sum(), tokens.logprobs)


# Published formulas on padded tensors, written down anew.


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum()


def verl_ppo(tokens, low, high, dual=None):
    """verl's compute_policy_loss_vanilla, loss_agg_mode token-mean."""
    ratio = torch.exp(tokens.logprobs - tokens.old)
    advantages = tokens.advantages[:, None]
    first, second = -advantages * ratio, -advantages * torch.clamp(ratio, 1 - low, 1 + high)
    losses = torch.maximum(first, second)
    if dual is not None:
        losses = torch.where(advantages < 0, torch.min(-advantages * dual, losses), losses)
    return masked_mean(losses, tokens.mask)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dual", [None, 1.5])
def test_ppo_is_verls(seed, dual):
    tokens = random_tokens(seed)
    ours = ppo(tokens.packed(), clip_low=0.2, clip_high=0.3, dual_clip=dual).values.mean()
    same_gradient(ours, verl_ppo(tokens, 0.2, 0.3, dual), tokens.logprobs)
    if dual:
        assert abs(ours - ppo(tokens.packed(), clip_low=0.2, clip_high=0.3).values.mean()) > 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_gspo_is_the_papers_and_verls(seed):
    tokens = random_tokens(seed)
    lengths = tokens.mask.sum(-1)
    counted = lengths > 0
    means = torch.where(tokens.mask, tokens.logprobs - tokens.old, 0.0).sum(-1) / lengths.clamp(min=1)
    ratio = means.exp()  # equation 7: one per trajectory
    objective = torch.min(ratio * tokens.advantages, ratio.clamp(0.9, 1.1) * tokens.advantages)
    theirs = -objective[counted].sum() / counted.sum()
    packed = tokens.packed()
    weights = 1 / (counted.sum() * lengths[packed.trajectories])  # aggregation `trajectory`
    losses = gspo(packed, clip_low=0.1, clip_high=0.1)
    same_gradient((losses.values * weights).sum(), theirs, tokens.logprobs)
    # verl writes it token by token, with stopped gradients.
    log_ratio = tokens.logprobs - tokens.logprobs.detach() + means.detach()[:, None]
    token_ratio = torch.exp(torch.clamp(log_ratio, max=10.0))
    advantages = tokens.advantages[:, None]
    first, second = -advantages * token_ratio, -advantages * token_ratio.clamp(0.9, 1.1)
    per_token = torch.where(tokens.mask, torch.maximum(first, second), 0.0)
    theirs = (per_token.sum(-1) / lengths.clamp(min=1)).sum() / counted.sum()
    same_gradient((losses.values * weights).sum(), theirs, tokens.logprobs)


@pytest.mark.parametrize("seed", range(3))
def test_cispo_is_verls(seed):
    tokens = random_tokens(seed)
    ratio = torch.exp(tokens.logprobs - tokens.old)
    weights = torch.clamp(ratio, 1 - 0.3, 1 + 0.5).detach()
    theirs = masked_mean(-weights * tokens.advantages[:, None] * tokens.logprobs, tokens.mask)
    ours = cispo(tokens.packed(), clip_low=0.3, clip_high=0.5).values.mean()
    same_gradient(ours, theirs, tokens.logprobs)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cap", [None, 1.5])
def test_decoupled_ppo_is_areals(seed, cap):
    tokens = random_tokens(seed)
    ratio = torch.exp(tokens.logprobs - tokens.old)
    advantages = tokens.advantages[:, None]
    losses = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    weight = torch.exp(tokens.old - tokens.engine)
    if cap:
        weight = torch.where(weight <= cap, weight, 0.0)
        assert (weight == 0).any()
    theirs = torch.where(tokens.mask, losses * weight, 0.0).sum() / tokens.mask.sum()
    ours = decoupled_ppo(tokens.packed(), behavior_cap=cap).values.mean()
    same_gradient(ours, theirs, tokens.logprobs)


# What holds for all of them.


@pytest.mark.parametrize("loss", LOSSES)
def test_garbage_at_masked_tokens_is_never_seen(loss):
    nan = math.nan
    tokens = PolicyTokens(
        logprobs=torch.tensor([-1.0, nan, -math.inf], requires_grad=True),
        old_logprobs=torch.tensor([-1.0, -math.inf, nan]),
        engine_logprobs=torch.tensor([-1.0, nan, nan]),
        advantages=torch.tensor([1.0, nan, nan]),
        loss_mask=torch.tensor([True, False, False]),
        trajectories=torch.tensor([0, 0, 1]),
    )
    losses, values, gradient = value_and_gradient(loss, tokens)
    assert values == ([1, 0, 0] if loss is cispo else [-1, 0, 0])  # -A log p of a token with log p = -1
    assert gradient == [-1, 0, 0]
    metrics = policy_loss_metrics(losses, tokens.loss_mask)
    assert metrics.ratio_mean == metrics.ratio_max.item() == 1


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [1000.0, -1000.0])
def test_exploding_log_ratios_leave_finite_gradients(loss, log_ratio, advantage):
    tokens = PolicyTokens(
        logprobs=torch.tensor([log_ratio], requires_grad=True),
        old_logprobs=torch.zeros(1),
        engine_logprobs=torch.full((1,), -log_ratio),
        advantages=torch.tensor([advantage]),
        loss_mask=torch.ones(1).bool(),
        trajectories=torch.zeros(1).long(),
    )
    losses, values, gradient = value_and_gradient(loss, tokens)
    assert math.isfinite(values[0]) and math.isfinite(gradient[0])
    assert math.isfinite(policy_loss_metrics(losses, tokens.loss_mask).ratio_mean)


@pytest.mark.parametrize("loss", LOSSES)
def test_no_loss_tokens_have_a_zero_gradient(loss):
    _, values, gradient = value_and_gradient(loss, tokens_of([1.0, 2.0], [1.0, 1.0], mask=[0, 0]))
    assert values == gradient == [0, 0]
    assert loss(tokens_of([], [], mask=[], trajectories=[])).values.shape == (0,)


@pytest.mark.parametrize("loss", LOSSES)
def test_bfloat16_logprobs_are_compared_in_float32(loss):
    tokens = PolicyTokens(
        logprobs=torch.tensor([-1.0], dtype=torch.bfloat16),
        old_logprobs=torch.tensor([-1.0 + 1e-4]),
        engine_logprobs=torch.tensor([-1.0 + 1e-4]),
        advantages=torch.ones(1),
        loss_mask=torch.ones(1).bool(),
        trajectories=torch.zeros(1).long(),
    )
    assert loss(tokens).ratio.item() == pytest.approx(math.exp(-1e-4), rel=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("seed", range(3))
def test_any_cut_between_trajectories_gives_the_gradient_and_metrics_of_the_whole(loss, seed):
    tokens = random_tokens(seed)
    whole = loss(tokens.packed())
    parts = []
    for rows in ([0, 5, 6], [1], [2, 3, 4, 7], [8, 9, 10, 11]):
        mask = torch.zeros(ROWS, LONGEST).bool()
        mask[rows] = tokens.mask[rows]
        own = mask[tokens.mask]
        packed = tokens.packed()
        parts.append(
            loss(
                PolicyTokens(
                    logprobs=packed.logprobs[own],
                    old_logprobs=packed.old_logprobs[own],
                    engine_logprobs=packed.engine_logprobs[own],
                    advantages=packed.advantages[own],
                    loss_mask=packed.loss_mask[own],
                    trajectories=torch.unique(packed.trajectories[own], return_inverse=True)[1],
                )
            )
        )
    same_gradient(sum(part.values.sum() for part in parts), whole.values.sum(), tokens.logprobs)
    metrics = policy_loss_metrics(whole, torch.ones(len(whole.values)))
    added = functools.reduce(operator.add, (policy_loss_metrics(part, torch.ones(len(part.values))) for part in parts))
    for name in ("tokens", "clipped_low", "clipped_high", "ratio_sum", "ratio_max"):
        torch.testing.assert_close(getattr(added, name), getattr(metrics, name))


def test_metrics_by_hand():
    tokens = tokens_of([1.1, 1.5, 0.9, 3.0], [1.0, 2.0, -1.0, 5.0], mask=[1, 1, 1, 0])
    metrics = policy_loss_metrics(dapo(tokens), tokens.loss_mask)
    assert metrics.tokens.item() == 3
    assert metrics.clip_fraction_high == pytest.approx(1 / 3)
    assert metrics.clip_fraction_low == 0
    assert metrics.ratio_mean == pytest.approx(3.5 / 3, rel=1e-6)
    assert metrics.ratio_max.item() == pytest.approx(1.5, rel=1e-6)
    assert plain_ratio(tokens).tolist() == pytest.approx([1.1, 1.5, 0.9, 1.0], rel=1e-6)


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match=r"advantages \[1\]"):
        tokens_of([1.0, 1.0], [1.0])

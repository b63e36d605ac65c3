from __future__ import annotations

import numpy as np
import torch

from laminar.workers.rollout import token_sampling

LOGITS = torch.tensor([0.0, 2.0, -1.0, 1.0, float("-inf"), 0.5])


def draws(count: int, temperature: float, top_p: float = 1.0, keys: int = 50) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and logprobs of `count` positions under each of `keys` seeds."""
    tokens, logprobs = [], []
    for seed in range(keys):
        positions = np.arange(count)
        uniform = token_sampling.uniforms(np.full(count, token_sampling.key_of(seed)), positions)
        drawn = token_sampling.draw(
            LOGITS.expand(count, -1),
            np.full(count, temperature, np.float32),
            np.full(count, top_p, np.float32),
            uniform,
        )
        tokens.append(drawn[0].numpy())
        logprobs.append(drawn[1].numpy())
    return np.concatenate(tokens), np.concatenate(logprobs)


def assert_follows(tokens: np.ndarray, expected: np.ndarray) -> None:
    """Frequencies within five standard deviations of the expected probabilities."""
    frequencies = np.bincount(tokens, minlength=len(expected)) / len(tokens)
    deviation = np.sqrt(expected * (1 - expected) / len(tokens))
    assert (np.abs(frequencies - expected) <= 5 * deviation).all(), (frequencies, expected)


def test_draws_follow_the_scaled_distribution():
    for temperature in (0.5, 1.0, 2.0):
        expected = torch.softmax(LOGITS.double() / temperature, -1).numpy()
        tokens, logprobs = draws(400, temperature)
        assert_follows(tokens, expected)
        np.testing.assert_allclose(logprobs, np.log(expected[tokens]), atol=1e-6)


def test_top_p_draws_follow_the_renormalized_nucleus():
    # softmax: 0.077, 0.567, 0.028, 0.209, 0, 0.127 (rounded): three tokens are needed to reach 0.8.
    expected = torch.softmax(LOGITS.double(), -1).numpy()
    expected[[0, 2, 4]] = 0
    expected /= expected.sum()
    tokens, logprobs = draws(400, 1.0, top_p=0.8)
    assert_follows(tokens, expected)
    np.testing.assert_allclose(logprobs, np.log(expected[tokens]), atol=1e-6)


def test_greedy_rows_among_sampled_ones():
    logits = LOGITS.expand(3, -1)
    temperature, top_p = np.array([0.0, 1.0, 0.0], np.float32), np.array([0.1, 1.0, 1.0], np.float32)
    tokens, logprobs = token_sampling.draw(logits, temperature, top_p, np.array([0.0, 0.0, 0.999]))
    assert tokens.tolist() == [1, 0, 1]
    np.testing.assert_allclose(logprobs.numpy(), LOGITS.log_softmax(-1)[[1, 0, 1]].numpy(), atol=1e-6)


def test_the_ends_of_the_unit_interval_draw_possible_tokens():
    logits = torch.tensor([[float("-inf"), 1.0, 1.0, float("-inf")]]).expand(2, -1)
    ones = np.ones(2, np.float32)
    tokens, _ = token_sampling.draw(logits, ones, ones, np.array([0.0, 1 - 2.0**-52]))
    assert tokens.tolist() == [1, 2]


def test_uniforms_depend_on_key_and_position_only():
    keys = np.array([token_sampling.key_of(seed) for seed in (1, 2, 2**64 - 1)])
    together = token_sampling.uniforms(keys, np.array([5, 5, 6]))
    alone = [token_sampling.uniforms(keys[i : i + 1], np.array([p]))[0] for i, p in enumerate((5, 5, 6))]
    assert together.tolist() == alone
    assert len(set(together)) == 3
    many = token_sampling.uniforms(np.full(100_000, keys[0]), np.arange(100_000))
    assert many.min() >= 0
    assert many.max() < 1
    assert abs(many.mean() - 0.5) < 5 * np.sqrt(1 / 12 / len(many))
    assert abs(np.corrcoef(many[1:], many[:-1])[0, 1]) < 5 / np.sqrt(len(many))

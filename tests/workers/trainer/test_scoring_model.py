from __future__ import annotations

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

from laminar.workers.trainer.batch import StepBatch
from laminar.workers.trainer.model_loading import load_model
from laminar.workers.trainer.scoring_model import ScoringModel
from tests.workers.trainer.batches import random_step, trajectories


def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=256, n_positions=64))


def gemma2_with_capped_logits():
    """Scales logits after the head, and attends in a window."""
    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=256,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            sliding_window=8,
            final_logit_softcapping=0.05,
        )
    )


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "gemma2"])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_and_entropies_equal_those_of_each_trajectory_alone(model_folder, kind, temperature):
    torch.manual_seed(0)
    match kind:
        case "qwen3":
            model = load_model(str(model_folder), "model.path")
        case "gpt2":
            model = gpt2().eval()
        case "gemma2":
            model = gemma2_with_capped_logits().eval()
    message = random_step(seed=1)
    micro_batch = StepBatch(message).micro_batch(list(range(16)))
    shapes = []
    model.get_output_embeddings().register_forward_hook(lambda module, args, output: shapes.append(output.shape))
    with torch.no_grad():
        scoring = ScoringModel(model, temperature)
        logprobs, entropies = scoring(micro_batch.token_ids, micro_batch.positions, micro_batch.targets)
        assert shapes == [(1, len(micro_batch.targets), model.config.vocab_size)]  # no logits for any other token
        expected_logprobs, expected_entropies = [], []
        for token_ids, prompt, mask, _ in trajectories(message):
            logits = model(input_ids=token_ids[None], attention_mask=torch.ones(1, len(token_ids))).logits[0]
            distribution = torch.log_softmax(logits[prompt - 1 : -1] / (temperature or 1.0), -1)
            expected_logprobs.append(distribution.gather(-1, token_ids[prompt:, None])[:, 0][mask])
            expected_entropies.append(-(distribution.exp() * distribution).sum(-1)[mask])
    torch.testing.assert_close(logprobs, torch.cat(expected_logprobs), rtol=0, atol=2e-5)
    torch.testing.assert_close(entropies, torch.cat(expected_entropies), rtol=0, atol=2e-5)

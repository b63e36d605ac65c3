"""Which requests and weights an engine takes; the same rules for every engine.

Invariants: a request that passed here can be generated to its last token without running out of context; a weight file
that passed here is complete and holds the version that it was announced as.
"""

from __future__ import annotations

from laminar.weights.version_file import VersionReader
from laminar.workers.rollout.engine import EngineSettings, GenerationRequest


def check_request(request: GenerationRequest, settings: EngineSettings, vocabulary: int) -> None:
    """Refuse what cannot be generated.

    Args:
        request: the request as it came from the controller.
        settings: what the engine was started with.
        vocabulary: tokens that the model has an embedding for.

    Raises:
        ValueError: prompt empty or too long, nothing to generate, a token that the model does not have, or sampling
            parameters out of range; names the request, the value and the limit.
    """
    who = f"request {request.request_id!r}"
    prompt, given, wanted = (
        len(request.prompt_token_ids),
        len(request.token_ids),
        request.max_new_tokens,
    )
    if prompt == 0:
        raise ValueError(f"{who}: the prompt is empty")
    if wanted < 1:
        raise ValueError(f"{who}: max_new_tokens is {wanted}, at least 1 expected")
    if prompt + given + wanted > settings.context_tokens:
        raise ValueError(
            f"{who}: {prompt} prompt tokens + {given} generated before + {wanted} to generate do not fit the context of "
            f"{settings.context_tokens} tokens"
        )
    for name, tokens in (
        ("prompt_token_ids", request.prompt_token_ids),
        ("token_ids", request.token_ids),
    ):
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
            raise ValueError(f"{who}: {name} has a token outside 0 to {vocabulary - 1}, the model's vocabulary")
    if not 0.0 <= request.temperature < float("inf"):
        raise ValueError(f"{who}: temperature is {request.temperature}, expected 0 or more")
    if not 0.0 < request.top_p <= 1.0:
        raise ValueError(f"{who}: top_p is {request.top_p}, expected more than 0 and at most 1")


def check_weights(path: str, policy_version: int) -> None:
    """Refuse a weight file that is not that version.

    Raises:
        FileNotFoundError: no such file (any more).
        ValueError: not a complete weight file, or another version's.
    """
    with VersionReader(path) as reader:
        if reader.policy_version != policy_version:
            raise ValueError(f"{path} holds version {reader.policy_version}, expected {policy_version}")

"""Our requests as vLLM takes them, vLLM's outputs as our deltas.

vLLM is imported when it is needed: this module costs nothing where it is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from laminar.workers.rollout.engine import EngineDelta, GenerationRequest

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput
    from vllm.sampling_params import SamplingParams


def sampling(request: GenerationRequest, kv_parameters: dict[str, Any] | None) -> SamplingParams:
    """A request's sampling as vLLM takes it; `kv_parameters` are for the KV connector, if there is one."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        max_tokens=request.max_new_tokens,
        stop_token_ids=list(request.stop_token_ids),
        seed=request.seed,
        ignore_eos=True,  # only the request's own stop tokens stop
        logprobs=0,  # the drawn token's
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=None if kv_parameters is None else {"kv_transfer_params": kv_parameters},
    )


def delta_of(output: CompletionOutput, policy_version: int) -> EngineDelta:
    """vLLM's delta as ours. Raises RuntimeError if vLLM stamped another version on one of the stream's tokens."""
    for span in output.weight_versions or ():
        if span.version != str(policy_version):
            raise RuntimeError(f"tokens {span} came from another version than {policy_version}")
    logprobs: Any = output.logprobs
    return EngineDelta(
        token_ids=np.array(output.token_ids, np.int32),
        logprobs=np.array(logprobs.logprobs if output.token_ids else [], np.float32),
        policy_version=policy_version,
        finish_reason=output.finish_reason,
    )

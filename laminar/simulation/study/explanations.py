"""Why figures of a study differ from the paper's by more than 15 %: by key of the figure (`paper_figures.PAPER_FIGURES`).

Invariant: reasons name what the models or the controller do; none is a constant that was chosen for a figure. They hold for
`configs/simulation/paper_*.yaml`; where a figure of a study does not differ, its reason is not shown.
"""

from __future__ import annotations

_BOUND = (
    "The bound on staleness decides. Under max_staleness 4 five steps cannot take less than the longest trajectory and a "
    "training step, 130 to 200 s for 16K tokens with 7B, however many GPUs there are; it comes to a third of it per step"
)
_PARTIAL = (
    "Our partial rollout is charged re-prefill and a broadcast that stops all rollouts, both cheap next to what draining costs under "
    "laminar when trajectories are this skewed: interrupted rollouts are never short of work. The paper measured AReaL's own "
    "engine and trainer; here both schedules run on the same ones. On 1024 GPUs, where "
    "the longest trajectory decides, the two are level"
)

EXPLANATIONS = {
    "math_over_synchronous": (
        "Our trainer is the bottleneck on the smaller clusters (a third of a synchronous step is training there, which no schedule "
        "can shorten), and our synchronous baseline loses nothing to engine start-up, data transfer or imbalance between trainer ranks"
    ),
    "math_over_synchronous_max": f"{_BOUND}. A bound of 8 gains 12 % with 7B on 1024 GPUs",
    "math_over_one_step": (
        "On few GPUs training bounds both. On many, one-step staleness still waits for the longest trajectory of every batch, so "
        "the gap widens with size; the mean depends on the sizes that are run"
    ),
    "math_over_stream": (
        "Stream generation hides the training of early mini-batches only; on many GPUs, where training is short, that is little, and "
        "the gap widens with size; the mean depends on the sizes that are run"
    ),
    "math_over_partial": _PARTIAL,
    "tools_over_synchronous": (
        "The paper gives no latencies of its sandbox; a heavier tail of calls widens the gap, a lighter one closes it"
    ),
    "scaling_efficiency": f"{_BOUND}; the batch stays at 8192, so on 16 times the GPUs each rollout has a sixteenth of the work",
    "scaling_efficiency_32b": f"{_BOUND}; the batch stays at 8192, so on 16 times the GPUs each rollout has a sixteenth of the work",
    "generation_share": (
        "Generation takes about as long on any number of GPUs (its longest trajectory), training shrinks with them: the share grows "
        "with the cluster, and the mean depends on the sizes that are run"
    ),
    "wait_for_weights": (
        "Not comparable: where rollouts and trainer share GPUs the publish is the trainer's time, and our global broadcast has no "
        "GPU-side contention and needs no barrier of its own"
    ),
    "repack_throughput": (
        "Where rollouts and trainer are balanced the trainer bounds both runs, and where it waits for the longest trajectories of all "
        "(7B on 256 GPUs and more) little is moved. In between the gain depends on how many trajectories may share a rollout, "
        "repack.slowdown: contexts of 10K tokens slow each other at some ten already. The paper reports no cost in latency"
    ),
    "repack_kv_off": (
        "A batch of 8192 trajectories of 2,600 tokens on average is 21M tokens of KV cache if all ran at once at full length; the rollouts "
        "of 64 GPUs hold more than that. The paper's caches are fuller, so its responses are longer or its rollouts fewer"
    ),
    "repack_kv_on": "As without repack: the caches are far larger than what is under way",
    "repack_overhead": (
        "Ours is a stop without latency, and the prefill of what was moved at the target; the paper does not say what its figure holds"
    ),
    "repack_latency": (
        "Stragglers that share a rollout decode slower: with contexts of 10K tokens reading the KV cache outweighs reading the weights at "
        "a few trajectories already"
    ),
    "staleness_below_3": (
        "Rollouts are given GPUs until generation keeps up with training, or a bit more; then they run ahead, the buffer fills to the "
        "bound of 4, and the oldest go first. A lower max_staleness moves the whole distribution"
    ),
}

"""The experiment config: every key that a YAML file may hold, with its type, range, default and meaning.

Unknown keys are refused. `docs/configuration.md` is generated from this file and the `*_schema.py` beside it, so the docstring
under a field is its documentation. Checks that span sections or look at the machine are in `checks.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from laminar.config.algorithm_schema import AlgorithmConfig
from laminar.config.data_schema import DataConfig, PromptSourceConfig
from laminar.config.environment_schema import EnvironmentConfig
from laminar.config.optimizer_schema import OptimizerConfig
from laminar.config.reward_schema import RewardConfig, RewardTerms
from laminar.config.section import Section


class ModelConfig(Section):
    """The language model that is trained."""

    path: str
    """Folder of a Hugging Face causal language model with its tokenizer; relative to the working directory."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the rollouts' weights and of the trainer's forward pass; the optimizer's state is float32."""


class EvaluationConfig(Section):
    """Responses to held-out prompts, scored and never trained on; `docs/evaluation.md`."""

    source: PromptSourceConfig
    """Held-out prompts: any source that `data.source` can be. Templates and limits of prompts are those of `data`."""
    prompts: Annotated[int, Field(ge=1)] = 128
    """The first so many prompts of the source; fewer where it ends."""
    samples: Annotated[int, Field(ge=1)] = 1
    """Responses per prompt: the largest k of pass@k."""
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations during training; 0: none but those at the start and those that are asked for."""
    at_start: bool = True
    """Evaluate the model that training starts from."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Sampling temperature; 0 is greedy, and goes with one sample per prompt."""
    max_response_tokens: Annotated[int | None, Field(ge=1)] = None
    """Longest response, in tokens; `rollout.max_response_tokens` if not given."""
    reward: RewardTerms | None = None
    """How responses are scored where that is not as in training; null takes `reward` as it is. Time limits and retries are those of `reward`."""
    pass_reward: float = 1.0
    """A response with at least this reward counts as right in pass@k."""
    share: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Share of the trajectories that all rollouts can hold (`rollout.replicas` x `rollout.max_running`) that evaluation takes at most while there is training."""


Degree = Annotated[int, Field(ge=1, le=64)]


class RolloutConfig(Section):
    """The replicas that generate."""

    engine: Literal["auto", "vllm", "torch"] = "auto"
    """`auto` takes vLLM where it can be imported, else the embedded torch engine, and says which."""
    replicas: Annotated[int, Field(ge=1, le=4096)] = 2
    """Number of rollout replicas."""
    tensor_parallel: Degree | list[Degree] = 1
    """GPUs (or CPU ranks) per replica: one number for all, or a list of one for each; all divide the largest."""
    max_running: Annotated[int, Field(ge=1)] = 64
    """Trajectories that one replica decodes at once; it takes no more than these."""
    kv_cache_mib: Annotated[int, Field(ge=1)] = 64
    """Memory for the KV cache of one replica, in MiB."""
    max_response_tokens: Annotated[int, Field(ge=1)] = 1024
    """Longest response, in tokens; longer ones finish with reason `length`."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling mass. Below 1 the engine's logprobs are of the truncated distribution, the trainer's are not."""
    delta_interval_s: Annotated[float, Field(gt=0)] = 0.5
    """How often a replica sends what its trajectories gained; a finish is sent at once. Seconds."""
    threads: Annotated[int, Field(ge=1)] = 1
    """CPU threads per replica."""
    restarts: Annotated[int, Field(ge=0)] = 3
    """How often within an hour a lost replica is started anew, on the same devices, before the run goes on without it."""
    host_failures: Annotated[int, Field(ge=0)] = 6
    """Losses of replicas on one host within an hour after which the host is evicted: its other replicas leave, and none from there is let in. Never the only host."""
    suspect_after_s: Annotated[float, Field(gt=0)] = 5.0
    """A replica that has been silent for so long is a suspect: it is given nothing new until it is heard again. Seconds."""
    silence_limit_s: Annotated[float, Field(gt=0)] = 20.0
    """A replica that has been silent for so long (it hangs, or is cut off) counts as lost: its trajectories go on elsewhere. Seconds."""
    drain_s: Annotated[float, Field(gt=0)] = 30.0
    """What a replica that gets SIGTERM (a spot instance's notice) has until it must be gone, in seconds: for half of it, it finishes what it has; what is left then goes on elsewhere."""
    on_lost_version: Literal["regenerate", "wait"] = "regenerate"
    """Trajectories of a lost replica whose version no replica serves and no relay holds any more: generate them anew with the newest version, or wait for that version."""

    @property
    def degrees(self) -> tuple[int, ...]:
        """Tensor parallel degree of each replica."""
        given = self.tensor_parallel
        return tuple(given) if isinstance(given, list) else (given,) * self.replicas

    def degree(self, index: int) -> int:
        """Tensor parallel degree of one replica; of the last one for those that are added to a run."""
        given = self.tensor_parallel
        return given[min(index, len(given) - 1)] if isinstance(given, list) else given

    @property
    def largest_degree(self) -> int:
        """What the trainer lays the weights out for."""
        return max(self.degrees)


class RelayConfig(Section):
    """The processes that carry the weights; one stands for one rollout host."""

    count: Annotated[int, Field(ge=1, le=1024)] = 2
    """Relays of the run; relay 0 lives on the trainer's host, if one does, and is the master relay."""
    transport: Literal["auto", "tcp"] = "auto"
    """`auto`: MPI between relays that mpirun has started together, TCP to all others; `tcp`: no MPI at all."""
    encoding: Literal["delta", "full"] = "delta"
    """`delta` sends what has changed since a version that the receiver holds, where that is less; `full` sends all."""
    chunk_mib: Annotated[float, Field(gt=0, le=1024)] | Literal["auto"] = "auto"
    """Size of the chunks that travel down the chain, in MiB; `auto` computes it from measured latency and bandwidth."""
    keep_versions: Annotated[int, Field(ge=1)] = 2
    """Weight versions that each relay keeps in shared memory."""
    keep_mib: Annotated[int, Field(ge=1)] | None = None
    """Bound for what a relay keeps in shared memory, in MiB: fewer versions than `keep_versions` if they are larger."""
    stall_limit_s: Annotated[float, Field(gt=0)] = 5.0
    """A relay, or a hop, of which nothing is heard for so long during a broadcast is left out of the chain, in seconds."""
    broadcast_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Longest time that a broadcast may take before it is reported as failed, in seconds."""
    restarts: Annotated[int, Field(ge=0)] = 3
    """How often in a row lost relays are started anew at once; then once in 30 s, or never if none is left."""


class LoraConfig(Section):
    """Low-rank adapters beside frozen weights (Hu et al. 2021, arXiv 2106.09685); `docs/lora.md`."""

    rank: Annotated[int, Field(ge=1)] = 16
    """Rank of each adapter."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """An adapter's product is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout before each adapter, in updates only. What is published has none, so it adds noise to the ratios."""
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"
    """Linear layers that get an adapter: `all-linear` for all but the output layer, or the ends of their names, such as `q_proj`."""


class TrainerConfig(Section):
    """The ranks that learn."""

    ranks: Annotated[int, Field(ge=1, le=4096)] = 1
    """Trainer processes, started by torchrun."""
    strategy: Literal["data_parallel", "fsdp"] = "data_parallel"
    """`data_parallel` replicates the model on every rank (accelerate); `fsdp` shards it (torch's fully_shard)."""
    steps: Annotated[int, Field(ge=1)]
    """Actor updates to make; the run may end earlier when the data does."""
    groups_per_step: Annotated[int, Field(ge=1)]
    """Groups (prompts) that one step trains on."""
    group_size: Annotated[int, Field(ge=1)]
    """Trajectories per prompt; at least 2 for advantages that compare them (`grpo`, `dr_grpo`, `rloo`)."""
    mini_batches: Annotated[int, Field(ge=1)] = 1
    """Optimizer updates per step, each on an equal share of the step's groups."""
    max_tokens_per_micro_batch: Annotated[int, Field(ge=1)] = 16384
    """Padded tokens (prompt and response) of one forward and backward pass on one rank."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of the weights; null trains the weights."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints; 0 writes only the final one."""
    restarts: Annotated[int, Field(ge=0)] = 3
    """How often in a row lost ranks are started anew from the newest checkpoint without a step made between; needs `checkpoint_every`."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """Complete checkpoints that are kept; the oldest go first."""
    threads: Annotated[int, Field(ge=1)] = 1
    """CPU threads per rank."""


class ScheduleConfig(Section):
    """How generation and training are interleaved; `docs/schedules.md` says what waits for what under each."""

    name: Literal["laminar", "synchronous", "one_step", "stream", "partial"] = "laminar"
    """`laminar`: every trajectory on its own. `synchronous`: generate a batch, train on it, sync weights. `one_step`: train on an earlier batch while one is generated, sync between batches. `stream`: the same, and what has finished first goes to the first mini-batches. `partial`: interrupt all trajectories for each new version and go on with it (mixes versions)."""
    max_staleness: Annotated[int, Field(ge=0)] | Literal["unbounded"] | None = None
    """No trajectory is trained that is more versions old than this; enforced by admission, nothing is thrown away. null takes the schedule's own: 4 for `laminar` and `partial`, 1 for `one_step` and `stream`, 0 for `synchronous`. `unbounded` (`laminar`, `partial`) lets staleness follow from latency alone."""
    outstanding_batches: Annotated[float, Field(ge=1)] = 2.0
    """With `max_staleness: unbounded`: groups that are in progress or wait for the trainer at most, in steps' worth. More keeps rollouts busier and makes trajectories older."""
    on_stale: Literal["drop", "train"] = "drop"
    """What to do with groups that cannot be trained within `max_staleness` any more, which happens only after the trainer lost steps, or a step was cut short: leave them out, counted by length, or train on them all the same."""


class BufferConfig(Section):
    """The experience buffer: which complete groups are trained first, and which are evicted."""

    strategy: str = "fifo"
    """`fifo` (in order of admission), `freshest` (newest version first), `staleness_weighted` (drawn at random, by `half_life`), or a dotted path `package.module:function`. `schedule.max_staleness` holds under each."""
    half_life: Annotated[float, Field(gt=0)] = 1.0
    """`staleness_weighted`: versions of staleness that halve a group's weight."""
    capacity: Annotated[int | None, Field(ge=1)] = None
    """Complete groups that are kept at most; the oldest go first, and others are generated in their place. null keeps all."""
    max_age: Annotated[int | None, Field(ge=0)] = None
    """Complete groups that are more versions old than this are evicted. null keeps all."""


class RepackConfig(Section):
    """Emptying rollouts that hold only stragglers, so that they can take new weights (the paper, section 5; docs/repack.md)."""

    enabled: bool = False
    """Move unfinished trajectories of draining rollouts onto a few of the same version."""
    move_kv: Literal["auto", "always", "never"] = "auto"
    """Move a trajectory's KV blocks with it, instead of a prefill at the target; auto: unless that was measured to take longer."""
    interval_s: Annotated[float, Field(gt=0)] = 5.0
    """How often each rollout is asked for its load, and a plan is made, in seconds; a publish has both happen at once. Twelve times as long while repack is off, and at no publish."""
    kv_ceiling: Annotated[float, Field(gt=0, le=1)] = 0.9
    """C_max: no target is filled above this KV utilization."""
    batch_bound: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """B: trajectories up to which a larger batch costs no latency; rollouts with fewer may be emptied, none is filled above it. `auto` fits it from the decode steps that rollouts report."""
    batch_bound_floor: Annotated[int, Field(ge=1)] = 4
    """`auto`: never less, nor before there are steps to fit. No more than `rollout.max_running` in any case."""
    batch_bound_ceiling: Annotated[int, Field(ge=1)] | None = None
    """`auto`: never more. null is `rollout.max_running`."""
    slowdown: Annotated[float, Field(gt=1)] = 2.0
    """`auto`: B is the largest batch whose decode step takes at most so many times that of a single trajectory. More frees more rollouts, and slows the stragglers that share one."""


class ControllerConfig(Section):
    """The controller process and the address that workers dial."""

    host: str = "127.0.0.1"
    """Address to listen on; set the host's own address on a cluster."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to listen on; 0 takes a free one. It is published in the run directory."""
    heartbeat_s: Annotated[float, Field(gt=0)] = 1.0
    """Interval of heartbeats in both directions, in seconds."""
    silence_limit_s: Annotated[float, Field(gt=0)] = 60.0
    """A peer that is ready and has been silent for so long counts as lost, in seconds; one that is starting, after `start_timeout_s`."""
    grace_s: Annotated[float, Field(ge=0)] = 120.0
    """How long workers go on without a controller when its process has died, until another takes its place; then they end. Seconds."""
    reattach_s: Annotated[float, Field(gt=0)] = 15.0
    """How long that other controller waits for a worker to come back to it before it starts the worker anew, in seconds."""
    restarts: Annotated[int, Field(ge=0)] = 3
    """How often within an hour `laminar train` starts the controller again, from its journal, when its process was killed."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Longest wait for all workers to be ready, in seconds."""
    step_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Longest time for one step, one checkpoint or one pull before the run stops and names who did not answer, in seconds."""


class LaunchConfig(Section):
    """Which processes `laminar train` starts itself; `manual` ones are started by hand with the scripts in `scripts/`."""

    trainer: Literal["local", "manual"] = "local"
    """Trainer ranks, by torchrun."""
    relays: Literal["local", "manual"] = "local"
    """Relays, by mpirun."""
    rollouts: Literal["local", "manual"] = "local"
    """Rollout workers."""
    environments: Literal["local", "manual"] = "local"
    """Environment workers."""


class ExperimentConfig(Section):
    """One experiment: what `laminar train` runs."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    """Name of the experiment; the run directory is `runs/<name>` unless `--run-dir` says otherwise."""
    seed: int = 0
    """Seed of data order, sampling and training."""
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    evaluation: EvaluationConfig | None = None
    rollout: RolloutConfig = RolloutConfig()
    relay: RelayConfig = RelayConfig()
    trainer: TrainerConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    buffer: BufferConfig = BufferConfig()
    repack: RepackConfig = RepackConfig()
    controller: ControllerConfig = ControllerConfig()
    launch: LaunchConfig = LaunchConfig()

"""GPUs, interconnects and how much of them is reached: every hardware number of the simulator stands here.

Invariant: one set of constants serves every study and every figure; nothing is tuned per model, cluster size or schedule.
`docs/simulation-models.md` compares what follows from them with published measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

from laminar.errors import UserError

MIB = 1 << 20


@dataclass(kw_only=True, slots=True, frozen=True)
class GpuSpec:
    """One GPU as its data sheet has it."""

    name: str
    memory_bytes: int  # what the driver reports, ECC taken off
    memory_bandwidth: float  # bytes/s
    peak_flops: float  # bf16 tensor cores, dense (data sheets print twice that, with sparsity)
    nvlink_bandwidth: float  # bytes/s, both directions together
    host_link_bandwidth: float  # bytes/s of PCIe, one direction


GPUS = {
    spec.name: spec
    for spec in (
        # NVIDIA H100 Tensor Core GPU data sheet, SXM5 column: 3.35 TB/s, 1,979 TFLOPS with sparsity, NVLink 900 GB/s, PCIe Gen5
        # (128 GB/s both ways). Memory: nvidia-smi reports 81,559 MiB.
        GpuSpec(
            name="H100",
            memory_bytes=81_559 * MIB,
            memory_bandwidth=3.35e12,
            peak_flops=989.4e12,
            nvlink_bandwidth=900e9,
            host_link_bandwidth=64e9,
        ),
        # The H100 SXM5 for China: the same chip and memory, NVLink cut to 400 GB/s (and FP64, which is of no use here).
        GpuSpec(
            name="H800",
            memory_bytes=81_559 * MIB,
            memory_bandwidth=3.35e12,
            peak_flops=989.4e12,
            nvlink_bandwidth=400e9,
            host_link_bandwidth=64e9,
        ),
        # NVIDIA H200 Tensor Core GPU data sheet, SXM: the H100's chip with 141 GB of HBM3e at 4.8 TB/s. nvidia-smi: 143,771 MiB.
        GpuSpec(
            name="H200",
            memory_bytes=143_771 * MIB,
            memory_bandwidth=4.8e12,
            peak_flops=989.4e12,
            nvlink_bandwidth=900e9,
            host_link_bandwidth=64e9,
        ),
        # NVIDIA A100 80GB data sheet, SXM4: 2,039 GB/s, 312 TFLOPS dense, NVLink 600 GB/s, PCIe Gen4 (64 GB/s both ways).
        GpuSpec(
            name="A100-80GB",
            memory_bytes=81_920 * MIB,
            memory_bandwidth=2.039e12,
            peak_flops=312e12,
            nvlink_bandwidth=600e9,
            host_link_bandwidth=32e9,
        ),
    )
}


@dataclass(kw_only=True, slots=True, frozen=True)
class Constants:
    """Achieved shares of the data sheets' peaks, and the cluster around the GPUs."""

    decode_bandwidth_share: float = 0.75
    """Share of HBM bandwidth reached in decoding. Qwen2.5's published vLLM speeds at batch 1 (A100: 7B 84.3, 14B 46.3
    tokens/s; 2 H100: 72B 32.4 tokens/s, tt-inference-server issue 143) ask for 0.70 to 0.78."""

    step_overhead_s: float = 2e-3
    """Per decode step: scheduling, sampling, launch of the CUDA graph. What the same publications leave over: 1.3 to 3.8 ms
    at batch 1, newer engines at the lower end."""

    prefill_flops_share: float = 0.55
    """Share of peak FLOPs in prefill, and in decode steps that are bound by compute. Qwen2.5-72B on 2 H100: 7,924, 8,109 and
    7,700 prompt tokens/s at 1K, 4K and 8K tokens (the same issue), 0.56 to 0.58."""

    training_flops_share: float = 0.45
    """Share of peak FLOPs in training, recomputed activations counted. Qwen2.5-32B in Megatron on H200: 420 TFLOPS = 0.425
    (Megatron-LM issue 1565); verl on H100 reports 0.33 without counting the recomputation, that is 0.44 (verl issue 965)."""

    all_reduce_latency_s: float = 8e-6
    """One all-reduce of a decode step, for small messages. H100, 32 KB: 4.5, 4.8, 7.8 us at tensor parallel 2, 4, 8 in SGLang,
    8.7 to 11.8 us in vLLM (SGLang pull request 2904)."""

    all_reduce_bandwidth_share: float = 0.3
    """Share of one direction of NVLink in all-reduces of some hundred KB to some MB. The same table at 1 MB: 58 to 68 GB/s on
    H100's 450 (0.13 to 0.15); NCCL on large messages reaches about 0.8. Decode lies between."""

    gpu_memory_share: float = 0.9
    """Share of GPU memory that the engine takes; vLLM's `gpu_memory_utilization`, its long-time default."""

    activation_reserve_bytes: int = 3_000_000_000
    """Per GPU: activations of one prefill chunk of 8,192 tokens, CUDA graphs, NCCL buffers."""

    training_memory_share: float = 0.7
    """Share of GPU memory that weights, gradients and optimizer state may take in training; the rest is activations."""

    gpus_per_host: int = 8

    nics_per_host: int = 8
    """One NIC per GPU, the usual build of H100-class hosts (DGX H100 data sheet)."""

    nic_bandwidth: float = 50e9
    """Bytes/s of a 400 Gbit/s NIC, one direction."""

    network_share: float = 0.9
    """Share of line rate reached by RDMA in large messages: NCCL 92 % of 200 Gbit/s (published RoCE measurements), verl 25 GB/s of
    25 on one NIC and 90 of 100 on four (verl issue 7167)."""

    relay_nics: int = 2
    """NICs that a relay drives: one per CPU socket, each reading its own socket's memory. One NIC (45 GB/s) could not carry the paper's
    72B in 1.6 s, which needs 91 GB/s."""

    relay_latency_s: float = 10e-6
    """Per chunk and hop of the relay chain: RDMA (2 to 5 us) and the relay's own turn."""

    host_copy_bandwidth: float = 100e9
    """Bytes/s into one host's pinned memory, all GPUs together. The paper's publish stalls are 102 GB/s (32B) and 104 GB/s (72B): this
    constant is theirs, rounded, and not an independent prediction of them."""

    host_link_share: float = 0.85
    """Share of PCIe's rate reached by large copies from pinned memory: 53 to 56 GB/s of 64 on Gen5."""

    storage_bandwidth: float = 4e9
    """Bytes/s that one host writes to storage: a data-centre NVMe drive (Samsung PM9A3 data sheet: 4,000 MB/s)."""


CONSTANTS = Constants()


def gpu(name: str) -> GpuSpec:
    """The GPU of this name.

    Raises:
        UserError: no such preset.
    """
    if name not in GPUS:
        raise UserError(f"gpu: {name!r} is not known; expected one of {', '.join(GPUS)}")
    return GPUS[name]

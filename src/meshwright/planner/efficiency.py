"""How much of a chip's figures a step gets: every constant of the cost model, and where it is from.

Peak figures are in machines.chips. What is here says how far below them real steps stay. Each is
*measured* (by benchmarks/RESULTS.md), *compiled* (read from what a compiler made), *fitted* (chosen
so that the model gives a published figure, which then proves nothing about it) or *assumed*.
"""

import math

from meshwright.machines import Chip

# ---- matmuls, of the peak in bfloat16

# counted: of the peak in bfloat16, what matmuls of float32 get. GPUs: TF32's dense peak (NVIDIA's
# data sheets of A100 to B200); TPUs and CPUs: jax's default precision takes one pass
FLOAT32 = {"gpu": 0.5}
# compiled: cycle counts of large matmuls on v4, v5e and v5p are 1.05 to 1.14 times the roofline
MATMUL_TPU = 0.90
# measured: 714 to 719 of 989 TFLOP/s in large matmuls of an H200, at its power limit
MATMUL_GPU = 0.725
# fitted: v6e to MaxText's 45 and 50% of its peak for Llama 3.1 8B and 70B, where v5p has 65%. H100
# to MaxText's Llama 2 7B on one a3-highgpu-8g host (492 TFLOP/s) between NVIDIA's MaxText steps of
# 70B on 64 and 128 GPUs (7.9 and 15.6 s). With a power limit of 500 W, to torchtitan's 6,667 tokens
# a second and GPU for Llama 3.1 8B on 8 GPUs and 128 for 405B on 512
# compiled: 7x, from the cycles of two large matmuls, 0.81 and 0.85 of the peak
MATMUL_OF_CHIP = {
    "v6e": 0.72,
    "7x": 0.82,
    **dict.fromkeys(("h100", "a3-high", "a3-mega"), 0.70),
    "h100-500w": 0.46,
}
# assumed: a matmul whose smallest side on a device is below this is slower, down to half
SMALL_SIDE = 512

# fitted: H200, steps of benchmarks/train_step.py, 1.18 and 1.15 times as fast as in bfloat16 at
# embed 2048, 1.35 times at 4096: the matmuls of a layer are 1.38 and 1.59 times as fast. Of their
# time in bfloat16, 0.533 is left for the matmuls themselves; to quantize takes what does not grow
# with the smaller side, 0.533 + 392 / side in all. Held out: 1.75 and 1.91 times at 8192 and 16384,
# by this 1.72 and 1.80. A chip whose peak is not twice as high gains in proportion. Assumed to be
# alike on TPUs: the compiler's cycles say nothing (7x, libtpu 0.0.42: 2.4 times as fast at 4,096
# tokens, a twentieth at 8,192)
FP8_MATMUL = 0.533
FP8_QUANTIZE = 392.0

# ---- attention, of the peak; causal, forward and backward together

# measured: H200, cuDNN, by the count of ModelFamily.flops. head_dim 64: 235 TFLOP/s at
# 2K tokens (28 ms), 309 at 8K (171 ms); head_dim 128: 550 at 128K if its count is 7 for our 6. Our
# own kernels, which Hopper GPUs take for 64 now, are a tenth faster; not measured within a step
ATTENTION_GPU = {64: 0.35, 128: 0.48}
ATTENTION_GPU_HALF = 950.0  # tokens of a sequence at which half of that is reached
# assumed: half of the peak at head_dim 128, and half of that at 64, which fills half of the matrix
# unit; no TPU was there to measure
ATTENTION_TPU = {64: 0.25, 128: 0.50}
ATTENTION_TPU_HALF = 700.0

# times as long in plain JAX as in a fused kernel. TPU, reported: a step with a length that splash
# did not take then, by outside tests; not measured here. GPU, measured: H200, head_dim 64 and 128,
# 2K to 16K tokens, blockwise against cuDNN without documents 8.0 to 12 (with documents, against our
# own, 22 to 39)
PLAIN_ATTENTION = {"tpu": 2.6, "gpu": 9.0}

# measured: turn by turn around a ring, against one call: parts of 4K tokens 0.645, 16K 0.89, 64K
# 1.02 (H200); assumed to be alike on TPUs
RING_STEPS_HALF = 2250.0

# ---- memory

# measured: of the bandwidth, in updates: H200's optimizer (10 ms for 30 bytes of each of 1.24e9
# numbers) takes 3.7 of 4.8 TB/s; assumed for all that is elementwise, and on TPUs
MEMORY = 0.80

# ---- a scan over layers against unrolled ones

# measured: on one H200 281.7 ms for 254.9, later 17%: XLA copies what a layer keeps in and out of
# stacked arrays
SCAN_GPU = 1.15
SCAN_TPU = 1.03  # assumed

# ---- links

# assumed: of the bandwidth, in large collectives
ICI = 0.85
NVLINK = 0.80
HOST_NETWORK = 0.80
DATA_CENTER = 0.70
# fitted: GPUDirect-TCPX, to MaxText's Llama 2 7B on 1 to 16 hosts of a3-highgpu-8g (492, 422, 407,
# 409, 375 TFLOP/s a GPU; dp over the hosts): 53 to 76 of their 100 GB/s, if nothing hides it
HOST_NETWORK_OF_CHIP = {"a3-high": 0.60}
# fitted: what each doubling of more than two hosts leaves of it, to NVIDIA's MaxText steps of
# Llama 3 70B: 15.56 s on 16 hosts, 15.90 on 256
CONGESTION = 0.97
# assumed: of a host, where none is published, in bytes/s: 100 Gb/s
UNKNOWN_HOST_NETWORK = 12.5e9
# assumed: of the bandwidth to the host's memory, and that bandwidth where none is known (v4's)
HOST_LINK = 0.85
UNKNOWN_HOST_LINK = 16e9
# assumed, in seconds: to begin a collective, and for each link on its longest way
START_TPU, HOP_TPU = 2e-6, 1e-6
START_GPU, HOP_GPU = 12e-6, 1.5e-6
HOP_HOST_NETWORK = 6e-6
HOP_DATA_CENTER = 50e-6

# ---- overlap: of what could hide under a layer, how much does

# compiled: the TPU compiler's all-gathers for v4, v5p and v6e are synchronous, and so are the
# reduce-scatters (seen on v4). On v5e 13 fusions of a step's all-gathers are asynchronous, on 7x
# all in the loops of the step that was compiled. With `overlap` (train.tpu) 76 to 100% of the bytes
# all-gathered in the loops of fifteen steps are, on v4, v5p and v6e; 57% with sequence_parallel.
# How much of an asynchronous one hides is assumed, and all of it on GPUs.
HIDE_ALL_GATHERS = {"gpu": 0.75, "v5e": 0.75, "7x": 0.75}
HIDE_ALL_GATHERS_TOLD = 0.75
HIDE_SCATTERS = {"gpu": 0.75}
# fitted: to the same runs of MaxText: sums over hosts come after the sums inside a host, and
# continue when the layer has ended
HIDE_SUMS_OVER_HOSTS = 0.0
# published: compute is 18.9% slower on average while the GPU sends (Lee et al., Characterizing
# Compute-Communication Overlap in GPU-Accelerated Distributed Deep Learning, arXiv 2507.03114)
SLOWED_BY_SENDING = {"gpu": 0.189}
# assumed: at most this much of a layer's time has something under it
HIDE_MOST = 0.75
# of a pass over the layers, the part under which activations are on their way to the host or back.
# Compiled (XLA for GPUs, 8B on H200): a layer's input is sent while that layer computes, as other
# sends are, and fetched while one matmul of the layer runs that does not need it, 9% of that pass
HIDE_OFFLOADED = {"forward": HIDE_MOST, "backward": 0.09}
# compiled: of the hops of a ring, 7 of 8 have a kernel running meanwhile (v4)
HIDE_RING = 0.875

# ---- work beside

# measured: activations read and written, in numbers of embed, heads and mlp, of a token and layer
# (H200, 1B, 16K tokens: norms and residuals 6.5 ms, rotation 2.3, the mlp's activations 8)
ELEMENTWISE_EMBED = 23
ELEMENTWISE_HEADS = 8
ELEMENTWISE_MLP = 7
# measured for elementwise (H200: 1.3 of 17 ms for norms and activations), else assumed: how much
# of that remat does again
ELEMENTWISE_AGAIN = {"none": 0.0, "elementwise": 0.08, "mlp": 0.15, "full": 0.33, "offload": 0.33}
# measured: times the logits are read or written (H200: softmax of the loss, 5 ms)
LOSS_LOGITS = 4.6
# counted: without their gradient: written, and read for the maximum and for the sum
LOGITS_FORWARD = 3
# counted: the same without torch.compile, of the operators of a block of transformers: each reads
# and writes its arrays, the norms in float32 (tests/torch)
EAGER_EMBED = 140
EAGER_HEADS = 25
EAGER_MLP = 14
EAGER_LOSS_LOGITS = 20  # counted: in float32
# counted: the loss of logits that tp splits (torch/loss.py), compiled and not
SPLIT_LOSS_LOGITS = 11
EAGER_SPLIT_LOSS_LOGITS = 30
# numbers of embed that are read and written for each expert of a token, to sort tokens by expert
# and to sum what experts make of them: 4 forward and 6 backward, counted in ops/experts.py
DISPATCH = 10.0
# bytes of each parameter an update reads and writes: parameters and moments there and back, the
# gradient, its norm, and the cast of the new ones. Measured for adamw (H200: 10 + 1.4 + 1.7 ms of
# 1.24e9), counted for the others
OPTIMIZER_BYTES = {"adamw": 40, "lion": 32, "adafactor": 28, "muon": 36}
# of those, moments in float32 that are read and written; kept in fewer bytes they count as those
MOMENTS_READ_AND_WRITTEN = {"adamw": 4, "lion": 2, "adafactor": 0, "muon": 2}
ACCUMULATION_BYTES = 12  # of each parameter, for each micro-batch
# for each input and output of an adapted matrix, numbers read and written in all passes: x twice,
# the gradient of x three times, the update and its sum four, the gradient of the output twice
ADAPTER_NUMBERS = 5.5
# measured: seconds of a step in which nothing runs, 4 to 6 ms on H200
IDLE_STEP = 4e-3

# ---- serving (serving/engine.py), H200. Four constants are fitted to seven measured speeds of two
# dense decoders of 8B and 1.5B (tests/planner/test_serving.py), with contexts of 576 tokens

# measured: about 310 kernels of a decode step with 16 layers, 620 with 32
KERNELS_OF_LAYER = {"gpu": 19.4}
# fitted: launched in a second by the host. 1.5B with one sequence takes 1.55 ms, three times as
# long as its weights are read: 5.0 us for each of 310 kernels
LAUNCHES_PER_SECOND = 200_000.0
# fitted: kernels whose gaps fill a second. 8B with one sequence takes 0.46 ms more than its reading
GAPS_PER_SECOND = 1_360_000.0
# fitted: sequences of which the rest of a step (logits, choice of a token, the host's account)
# takes a second, beside weights and cache: 5 us each, at batch 128 of both models
SEQUENCES_PER_SECOND = 200_000.0
# fitted: of matmul, in steps with chunks of prompts: 35,276 tokens/s of 8B, two prompts of 1,024
PREFILL = 0.90
# measured (benchmarks/serve_parts.py): time of a matmul of weights and activations of fp8, to that
# in bfloat16: 0.66, 0.61 and 0.73 with 128, 256 and 2,048 tokens
FP8_SERVED = 0.67
# fitted: of the peak, in the kernel for experts of few tokens, which multiplies each with all of
# them: qwen3-30b-a3b in bfloat16 with 128 sequences, and its experts in fp8 with 16, 64 and 128
EXPERTS_OF_16_BITS = 0.38
EXPERTS_OF_8_BITS = 0.51
# measured under load (benchmarks/serve_steps.py, 8B, batch 64), seconds of a layer: what a step
# with a chunk takes beside its matmuls, reads and attention (1 x 32, 1 x 128 and 1 x 512 tokens:
# 8.1, 8.9 and 16.2 ms), and one with several prompts (4 x 128: 18.2 ms)
CHUNK_OF_LAYER = 62e-6
PROMPTS_OF_LAYER = 62e-6
# seconds of the host: to choose, prepare and launch a step; to read a request; for a token that is
# streamed; and from the end of a first step to the client. Fitted to the 1.5B shape, whose server
# the host limits (benchmarks/RESULTS.md: 109.5 requests/s of 128 tokens, 22.9 ms to the first token
# at p50, 3.8 between tokens; 107.5, 22.4 and 3.7 with these); the last one to the 8B
PLANNED_STEP = 1.5e-3
SERVED_REQUEST = 2e-3
SERVED_TOKEN = 40e-6
FIRST_TOKEN = 4e-3


def hidden_share(chip: Chip, room: float, wanted: float) -> float:
    """Of the seconds that could hide under `room` seconds of compute, the share that does.

    What is sent under a GPU's compute slows that down: so much less is gained.
    """
    return (1.0 - SLOWED_BY_SENDING.get(chip.platform, 0.0)) * min(1.0, room / wanted)


def peak(chip: Chip, dtype: str = "bfloat16") -> float:
    """FLOP/s in matmuls of a device, which is a core of chips that have several."""
    flops = chip.bf16_flops / chip.cores_per_chip
    if dtype == "fp8":
        return flops * max(1.0, (chip.fp8_flops or 0.0) / chip.bf16_flops)
    return flops * (FLOAT32.get(chip.platform, 1.0) if dtype == "float32" else 1.0)


def fp8(chip: Chip, smallest_side: float) -> float:
    """How many times as fast as in bfloat16 a layer's matmuls are, quantization included."""
    ratio = peak(chip, "fp8") / peak(chip)
    left = FP8_MATMUL + FP8_QUANTIZE / max(smallest_side, 1.0)
    return max(1.0, ratio / 2 / left)


def matmul(chip: Chip, smallest_side: float) -> float:
    """Of the peak, in a matmul whose smallest side on a device is this."""
    usual = MATMUL_TPU if chip.platform == "tpu" else MATMUL_GPU
    full = MATMUL_OF_CHIP.get(chip.kind, usual)
    return full * min(1.0, 0.5 + 0.5 * smallest_side / SMALL_SIDE)


def attention(chip: Chip, head_dim: int, length: float) -> float:
    """Of the peak, in attention of sequences this long on a device."""
    tpu = chip.platform == "tpu"
    table = ATTENTION_TPU if tpu else ATTENTION_GPU
    best = table[128] if head_dim >= 128 else table[64] * min(1.0, head_dim / 64)
    half = ATTENTION_TPU_HALF if tpu else ATTENTION_GPU_HALF
    return best * length / (length + half)


def ring_steps(part: float) -> float:
    """Of attention's speed, what is left where keys come in parts of this many tokens."""
    return part / (part + RING_STEPS_HALF)


def host_network(chip: Chip, hosts: int) -> float:
    """Of the bandwidth between hosts, what large collectives over this many of them get."""
    usable = HOST_NETWORK_OF_CHIP.get(chip.kind, HOST_NETWORK)
    return usable * CONGESTION ** max(math.log2(hosts) - 1, 0.0)


def hides(chip: Chip, operation: str, overlap: bool) -> float:
    """Of the seconds of a layer's all-gathers or reduce-scatters, the part that compute hides."""
    if overlap and operation == "all-gather" and chip.platform == "tpu":
        return HIDE_ALL_GATHERS_TOLD
    table = HIDE_ALL_GATHERS if operation == "all-gather" else HIDE_SCATTERS
    return table.get(chip.kind, table.get(chip.platform, 0.0))


def told_to_overlap(chip: Chip) -> bool:
    """Whether overlap changes anything: GPUs, v5e and 7x overlap by themselves."""
    return hides(chip, "all-gather", True) > hides(chip, "all-gather", False)

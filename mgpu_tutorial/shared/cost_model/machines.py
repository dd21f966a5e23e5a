"""GPUs and clusters: what their makers say, and what measurements add.

Each bandwidth, latency, peak and share of the course has its place here, and `the_machine`
is the chapter that prints them.
"""

from numbers import Real
from typing import NamedTuple

from mgpu_tutorial.shared.cost_model.links import Link, require_message
from mgpu_tutorial.shared.guards import whole

LINK_SHARE = 0.70  # of a link's nominal bandwidth, reached by collectives; set, not fitted
USABLE = 0.90  # of the memory: what was measured is up to 9% above the estimate
MEMORY_SHARE = 0.85  # of the memory's nominal bandwidth; set, not fitted


class GPU(NamedTuple):
    """One device, with its programs; `peak` is in 16-bit operations per second.

    The last two are fitted to measured steps: the share of the peak that matrix products
    reach, and how often what a layer saves for backward passes through the memory in each
    direction, because the operations between the products write and read it.
    """

    name: str
    peak: float
    memory: float
    memory_bandwidth: float
    matmul_efficiency: float
    activation_passes: float


class Taped(NamedTuple):
    """What a GPU adds to the tape of a program, whose every kernel is counted.

    A tape's products reach another `share` of the peak than those of the formula, whose
    passes stand for what a compiler fuses. `seen` are the lowest and the highest share that
    fit published steps (`benchmarks/price.md`). The peaks of products of 32 bits are those of
    the data sheet, with TF32 and without.
    """

    share: float
    seen: tuple[float, float]
    tensor_float: float
    exact: float


class Cluster(NamedTuple):
    """Nodes of some GPUs each; `inside` and `between` are nominal, for each GPU.

    `inside` is the link to the GPUs of the node, `between` the GPU's share of the node's
    network cards, both in one direction. `fixed` are the seconds of a step that no batch
    makes shorter; none of the published rows tells them, two steps of your own do.
    """

    gpu: GPU
    inside: Link
    between: Link
    gpus_per_node: int = 8
    fixed: float = 0.0

    def reached(self) -> list[Link]:
        """Both links with the bandwidth that is reached."""
        return [Link(latency, LINK_SHARE * b) for latency, b in (self.inside, self.between)]

    def memory_rate(self) -> float:
        """Bytes per second that a GPU reads and writes."""
        return MEMORY_SHARE * self.gpu.memory_bandwidth


def check_cluster(cluster: Cluster) -> None:
    """ValueError, with the name of the field, for a GPU or cluster that cannot be."""
    if not isinstance(cluster, Cluster):
        known = ", ".join(CLUSTERS)
        raise ValueError(
            f"cluster must be a Cluster: CLUSTERS has {known}, got {cluster!r:.60}"
        )
    if not isinstance(gpu := cluster.gpu, GPU):
        raise ValueError(f"gpu must be a GPU, such as CLUSTERS['H100'].gpu, got {gpu!r:.60}")
    for name in ("peak", "memory", "memory_bandwidth", "matmul_efficiency"):
        if not (isinstance(value := getattr(gpu, name), Real) and value > 0):
            raise ValueError(f"{gpu.name}: {name} must be above 0, got {value}")
    if gpu.matmul_efficiency > 1:
        share = f"a share of the peak, up to 1, got {gpu.matmul_efficiency}"
        raise ValueError(f"{gpu.name}: matmul_efficiency is {share}")
    for owner, name in ((gpu, "activation_passes"), (cluster, "fixed")):
        if not (value := getattr(owner, name)) >= 0:
            raise ValueError(f"{gpu.name}: {name} must be 0 or more, got {value}")
    whole("gpus_per_node", cluster.gpus_per_node)
    require_message(0, 1, cluster.inside, cluster.between)


# Latencies of a step are set, among those that NCCL takes for a ring's (src/graph/tuning.cc):
# 0.5 to 3.4 µs over NVLink and 2.7 to 9.6 over a network, by protocol.
NVLINK_3, NVLINK_4, NVLINK_5 = (Link(2e-6, rate) for rate in (300e9, 450e9, 900e9))
HDR, NDR = Link(5e-6, 25e9), Link(5e-6, 50e9)  # 200 and 400 Gb/s per GPU

# Bytes per second of a long copy to the host's memory, one way, over 16 lanes: some four
# fifths of PCIe 4's 32 GB/s, which an A100 has, and of PCIe 5's 64; set, not fitted.
HOST_4, HOST_5 = 25e9, 50e9

# The last two numbers are fitted; each line says to what. The tests fit them again.
# MPT on A100s of 80 GB, 7B on 8 GPUs, for the efficiency. The passes, here and below, are of
# Korthikanti et al. 2022, table 5, rows 22B and 175B (four times). Megatron's own products
# reach 80.8% there, with which another program's steps come out 12 to 19% too fast.
A100 = GPU("A100 80GB", 312e12, 80e9, 2.039e12, 0.688, 2.97)
# Narayanan et al. 2021, table 1, its first and its last row: an older program
A100_2021 = GPU("A100 80GB, 2021", 312e12, 80e9, 2.039e12, 0.735, 3.09)
# MPT, 7B on 8 GPUs, each layer recomputed
A100_40GB = GPU("A100 40GB", 312e12, 40e9, 1.555e12, 0.738, 2.97)
# Llama 3 405B, table 4, first row
H100 = GPU("H100 80GB", 989e12, 80e9, 3.35e12, 0.664, 2.97)
# torchtitan, table 1, 8B on 8 GPUs: not compiled, and with less power
H100_500W = GPU("H100 96GB, 500 W", 989e12, 96e9, 2.4e12, 0.346, 2.97)
# No row tells its numbers: they are the H100's
B200 = GPU("B200 180GB", 2250e12, 180e9, 8e12, 0.664, 2.97)

# The lowest and the highest share of the peak that `step_time` fits to programs in 16 bits:
# those that share out only the batch (DP, ZeRO, CP), then those that cut the model (TP, PP).
# Which of them a new program will reach nobody can tell.
SHARES_A100 = (0.688, 0.739), (0.735, 0.881)
SHARES_H100 = (0.525, 0.688), (0.664, 0.754)
SHARES = {
    A100: SHARES_A100,
    A100_40GB: SHARES_A100,
    A100_2021: SHARES_A100,
    H100: SHARES_H100,
    H100_500W: ((0.346, 0.408), (0.346, 0.408)),
    B200: SHARES_H100,
}

CLUSTERS = {
    "A100": Cluster(A100, NVLINK_3, HDR),
    "A100-40GB": Cluster(A100_40GB, NVLINK_3, HDR),
    "A100-2021": Cluster(A100_2021, NVLINK_3, HDR),
    "H100": Cluster(H100, NVLINK_4, NDR),
    "H100-500W": Cluster(H100_500W, NVLINK_4, NDR),
    "B200": Cluster(B200, NVLINK_5, NDR),
}

# Four programs were taped on A100s: 64, 66, 67 and 69%. Five on H100s, FSDP without a
# compiler: 44.9, 46, 50 and 60%, and 47 with 500 W. In the step of the one with 60, NeMo's
# 70B, the products alone are 56% of the peak, which no smaller share could give. Programs
# with tensor parallelism and a pipeline were fitted to the formula, which counts products as
# a tape does: Llama 3 405B 66%, and NeMo's 70B 75. So H100s have the 66, and a price there is
# that of a very good program. The peaks of 32 bits are those of the data sheets.
ON_A100, ON_H100 = (0.64, 0.69), (0.44, 0.66)
TAPED = {
    "A100": Taped(0.66, ON_A100, 156e12, 19.5e12),
    "A100-40GB": Taped(0.641, ON_A100, 156e12, 19.5e12),
    "A100-2021": Taped(0.66, ON_A100, 156e12, 19.5e12),
    "H100": Taped(0.664, ON_H100, 494.5e12, 67e12),
    "H100-500W": Taped(0.473, ON_H100, 494.5e12, 67e12),
    "B200": Taped(0.664, ON_H100, 1125e12, 75e12),
}

"""Steps that others have measured, with a complete plan. Every row names its table.

What a table leaves out is said beside it. TP, PP and the like are as in `Plan`.
"""

from typing import NamedTuple

from mgpu_tutorial.shared.cost_model.fitting import MeasuredStep
from mgpu_tutorial.shared.cost_model.machines import CLUSTERS, Cluster
from mgpu_tutorial.shared.cost_model.models import Model
from mgpu_tutorial.shared.cost_model.plans import Plan


class Run(NamedTuple):
    """A measured step: `published` in the `unit` that its authors use, per GPU.

    "hardware TFLOP/s" count what is computed again, "model TFLOP/s" do not, and with
    "causal" the attention is counted by half. `fitted` rows may tell the GPU's numbers.
    """

    name: str
    model: Model
    cluster: Cluster
    plan: Plan
    batch: int
    published: float
    unit: str
    fitted: bool = False

    @property
    def seconds(self) -> float:
        """Of a step, as the published figure tells them."""
        if self.unit == "s":
            return self.published
        tokens = self.batch * self.model.sequence / self.plan.ranks
        return tokens / self.published * flops_behind(self.unit, self.model) / 1e12

    def in_unit(self, seconds: float) -> float:
        """What the authors would have printed for a step of so many seconds."""
        if self.unit == "s":
            return seconds
        return self.published * self.seconds / seconds

    def measured(self) -> MeasuredStep:
        """The row as `fit_gpu` takes it."""
        return MeasuredStep(self.model, self.cluster, self.plan, self.batch, self.seconds)


def flops_behind(unit: str, model: Model) -> float:
    """What stands for one token in a unit, times 10^12: its operations, or one token."""
    if unit == "tokens/s":
        return 1e12
    return model.flops_per_token(recompute="hardware" in unit, causal="causal" in unit)


# Megatron-LM: no flash attention yet, and in 2021 no sequence parallelism.
OLD = {"sequence_parallel": False, "flash": False}
HARDWARE, OLDER = "hardware TFLOP/s", CLUSTERS["A100-2021"]
OLD_16_BIT = OLD | {"recompute": "full", "gradient_bytes": 2}

# Table 1: heads, hidden, layers, TP, PP, GPUs, batch, TFLOP/s; micro-batch and interleaving
# are in the authors' script, examples/sc21/run_table_1.sh of NVIDIA/Megatron-LM.
TABLE_1 = {
    "1.7B": (24, 2304, 24, 1, 1, 32, 512, 137, 16, 1),
    "3.6B": (32, 3072, 30, 2, 1, 64, 512, 138, 16, 1),
    "7.5B": (32, 4096, 36, 4, 1, 128, 512, 142, 16, 1),
    "18.4B": (48, 6144, 40, 8, 1, 256, 1024, 135, 8, 1),
    "39.1B": (64, 8192, 48, 8, 2, 512, 1536, 138, 4, 1),
    "76.1B": (80, 10240, 60, 8, 4, 1024, 1792, 140, 2, 3),
    "145.6B": (96, 12288, 80, 8, 8, 1536, 2304, 148, 2, 2),
    "310.1B": (128, 16384, 96, 8, 16, 1920, 2160, 155, 1, 2),
    "529.6B": (128, 20480, 105, 8, 35, 2520, 2520, 163, 1, 3),
    "1008B": (160, 25600, 128, 8, 64, 3072, 3072, 163, 1, 1),
}


def table_1() -> list[Run]:
    """Weak scaling from 32 to 3,072 GPUs; DDP overlaps where there is no pipeline.

    Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, table 1.
    """
    runs = []
    for name, (heads, hidden, layers, tp, pp, gpus, batch, tflops, mb, v) in TABLE_1.items():
        plan = Plan(tp, pp, gpus // tp // pp, mb, v, overlap=pp == 1, **OLD_16_BIT)
        model, fitted = Model(layers, hidden, heads), name in ("1.7B", "1008B")
        runs.append(Run(name, model, OLDER, plan, batch, tflops, HARDWARE, fitted))
    return runs


GPT_175B, GPT_530B = Model(96, 12288, 96), Model(105, 20480, 128)


def table_2() -> list[Run]:
    """Strong scaling: the same batch on two and four times the GPUs. Nothing is fitted.

    Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, table 2.
    """
    runs = []
    for model, pp, name, batch, rows in (
        (GPT_175B, 12, "175B", 1536, {384: 153, 768: 149, 1536: 141}),
        (GPT_530B, 35, "530B", 2240, {560: 171, 1120: 167, 2240: 159}),
    ):
        for gpus, tflops in rows.items():
            plan = Plan(8, pp, gpus // 8 // pp, overlap=False, **OLD_16_BIT)
            runs.append(Run(f"{name} on {gpus}", model, OLDER, plan, batch, tflops, HARDWARE))
    return runs


def zero_3() -> list[Run]:
    """DeepSpeed's ZeRO 3 of 2021. Nothing is fitted.

    Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, the other half of table 2.
    """
    rows = {
        "175B on 384": (GPT_175B, 384, 1536, 4, 144),
        "175B on 768": (GPT_175B, 768, 1536, 2, 88),
        "175B on 1536": (GPT_175B, 1536, 1536, 1, 44),
        "530B on 640": (GPT_530B, 640, 2560, 4, 138),
        "530B on 1120": (GPT_530B, 1120, 2240, 2, 98),
        "530B on 2240": (GPT_530B, 2240, 2240, 1, 48),
    }
    runs = []
    for name, (model, gpus, batch, micro_batch, tflops) in rows.items():
        plan = Plan(dp=gpus, micro_batch=micro_batch, zero=3, share_node=False, **OLD_16_BIT)
        runs.append(Run(name, model, OLDER, plan, batch, tflops, HARDWARE))
    return runs


# Table 5: heads, hidden, layers, PP, batch, micro-batch, interleaving, seconds with full
# recomputation, and with sequence parallelism and selective recomputation; TP 8, no DP.
TABLE_5 = {
    "22B": (64, 6144, 48, 1, 4, 4, 1, 1.42, 1.10),
    "175B": (96, 12288, 96, 8, 64, 1, 3, 18.13, 13.75),
    "530B": (128, 20480, 105, 35, 280, 1, 3, 49.05, 37.83),
    "1T": (160, 25600, 128, 64, 512, 1, 1, 94.42, 71.49),
}


def table_5() -> list[Run]:
    """Two ways to recompute, four sizes; the two smaller sizes are fitted.

    Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198, table 5.
    """
    runs = []
    for name, (heads, hidden, layers, pp, batch, mb, v, full, selective) in TABLE_5.items():
        model, fitted = Model(layers, hidden, heads), name in ("22B", "175B")
        plan = Plan(8, pp, 1, mb, v, flash=False)
        for way, seconds in (("full", full), ("selective", selective)):
            plan = plan._replace(recompute=way, sequence_parallel=way == "selective")
            given = batch, seconds, "s", fitted
            runs.append(Run(f"{name} {way}", model, CLUSTERS["A100"], plan, *given))
    return runs


def llama(sequence: int) -> Model:
    """Llama 3 405B."""
    return Model(126, 16384, 128, sequence, 128_256, 8, 53_248, gated=True, tied=False)


def llama_3() -> list[Run]:
    """Llama 3, 2024, https://arxiv.org/abs/2407.21783, table 4.

    The chunks of the interleaving are not given: 8 make a layer a stage. That 126 layers
    with embedding and head make 128 equal stages speaks for it. Nor does the paper say how
    it counts attention; we take half, as the kernel does.
    """
    rows = {
        "8,192 GPUs": (Plan(8, 16, 64, 1, 8, zero=2), 2048, 8192, 430),
        "16,384 GPUs": (Plan(8, 16, 128, 1, 8, zero=2), 2048, 8192, 400),
        "131,072 tokens": (Plan(8, 16, 8, 1, 8, zero=2, cp=16), 128, 131_072, 380),
    }
    runs = []
    for name, (plan, batch, sequence, tflops) in rows.items():
        given = batch, tflops, "model TFLOP/s, causal", name == "8,192 GPUs"
        runs.append(Run(name, llama(sequence), CLUSTERS["H100"], plan, *given))
    return runs


def mpt() -> list[Run]:
    """FSDP alone on A100s of 40 GB, each layer recomputed; from 8 to 128 GPUs.

    https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md
    """
    shapes = {"7B": (32, 4096, 32), "13B": (40, 5120, 40)}
    rows = {  # GPUs: micro-batch, tokens per second and GPU
        "7B": {8: (12, 3679), 16: (16, 3645), 32: (18, 3725), 64: (18, 3665),
               128: (18, 3623)},
        "13B": {16: (10, 1993), 32: (14, 1998), 64: (16, 1976), 128: (16, 1972)},
    }  # fmt: skip
    runs = []
    for size, by_gpus in rows.items():
        for gpus, (micro_batch, rate) in by_gpus.items():
            name = f"{size} on {gpus}"
            steps = 4 if name == "7B on 8" else 1  # micro-batches of a step
            plan = Plan(
                dp=gpus, micro_batch=micro_batch, zero=3, recompute="full", gradient_bytes=2
            )
            model = Model(*shapes[size], vocabulary=50_368)
            given = gpus * micro_batch * steps, rate, "tokens/s", name == "7B on 8"
            runs.append(Run(name, model, CLUSTERS["A100-40GB"], plan, *given))
    return runs


def torchtitan() -> list[Run]:
    """Llama 3.1 8B with `fully_shard`, not compiled: tables 1 and 3 of torchtitan's report.

    https://github.com/pytorch/torchtitan/blob/main/benchmarks/
    llama3_h100_202412_torchtitan.md
    """
    model = Model(32, 4096, 32, 8192, 128_256, 8, 14_336, gated=True, tied=False)
    runs = []
    for gpus, rate in ((8, 5762), (128, 5605)):
        plan = Plan(dp=gpus, micro_batch=2, zero=3, recompute="selective")
        given = 2 * gpus, rate, "tokens/s", gpus == 8
        runs.append(Run(f"{gpus} GPUs", model, CLUSTERS["H100-500W"], plan, *given))
    return runs


def torchtitan_405b() -> list[Run]:
    """Table 5 of the same report, with float8, compiled, and with asynchronous TP.

    Not in the table, and torchtitan's defaults of that time: as many micro-batches as
    stages, and two stages per rank.
    """
    runs = []
    for name, v, rate in (("1F1B", 1, 100), ("interleaved", 2, 128)):
        plan = Plan(8, 8, 8, 4, v, zero=3, recompute="full")
        given = 256, rate, "tokens/s", v == 1
        runs.append(Run(name, llama(8192), CLUSTERS["H100-500W"], plan, *given))
    return runs


def megascale() -> list[Run]:
    """The rows of Megatron-LM, put to the model when it was finished.

    Jiang et al. 2024, https://arxiv.org/abs/2402.15627, table 2.
    """
    model = Model(96, 12288, 128, vocabulary=64_000)
    rows = {
        768: {256: 40.0, 512: 21.2, 768: 15.2, 1024: 11.9},
        6144: {3072: 29.02, 6144: 14.78, 8192: 12.24, 12288: 8.57},
    }
    runs = []
    for batch, by_gpus in rows.items():
        for gpus, seconds in by_gpus.items():
            plan = Plan(8, 8, gpus // 64, 1, 6, recompute="selective", flash=False)
            plan, given = plan._replace(overlap=False), (batch, seconds, "s", gpus == 256)
            runs.append(Run(f"{gpus:,} GPUs", model, CLUSTERS["A100"], plan, *given))
    return runs


FAMILIES = {
    "table 1": table_1,
    "table 2": table_2,
    "ZeRO-3": zero_3,
    "table 5": table_5,
    "Llama 3 405B": llama_3,
    "MPT, FSDP": mpt,
    "torchtitan 8B": torchtitan,
    "torchtitan 405B": torchtitan_405b,
    "MegaScale's baseline": megascale,
}

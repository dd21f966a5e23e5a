"""A plan as two programs want to be told it: the flags of Megatron-LM and of torchtitan.

Names and meanings are those of their argument lists, at the two commits below; `python -m
tools.flags` says which names a newer checkout no longer has.
"""

from collections.abc import Mapping
from itertools import zip_longest
from typing import NamedTuple

from mgpu_tutorial.lab.table import Table
from mgpu_tutorial.shared.cost_model.plans import Model, Plan, check_plan

MEGATRON = "000c4ac24f61159c138b0975def722c65245983c"  # megatron/training/arguments.py
TORCHTITAN = "0014ac2ca45ae15db6706b4f5cc3e67546c98885"  # torchtitan/config/configs.py


class Command(NamedTuple):
    """Flags by what they decide, and the commit of the program that takes them.

    Notes say where the program does something else than the plan. A command prints as lines
    of a shell script: the checkout, the notes as comments, and the flags.
    """

    commit: str
    flags: Mapping[str, list[str]]
    notes: list[str]

    @property
    def words(self) -> list[str]:
        """All flags, in order."""
        return [flag for flags in self.flags.values() for flag in flags]

    def __str__(self) -> str:
        notes = [f"# {line}" for line in self.notes]
        return "\n".join([f"git checkout {self.commit}", *notes, " \\\n".join(self.words)])


def megatron(model: Model, plan: Plan, batch: int) -> Command:
    """The flags of Megatron-LM for `plan`, a batch in sequences, and the model's shape.

    Data, tokenizer, learning rate and checkpoints are not among them, nor what a shape does
    not tell: norms, positions, biases, dropout. Raises ValueError where the plan cannot be
    run.
    """
    check_plan(model, plan, batch)
    flags = {"model": shape(model), "TP": [], "CP": [], "PP": []}
    notes = []
    if model.gated:
        notes += ["norms, positions, biases and dropout are its defaults, GPT's, not Llama's"]
    if plan.tp > 1:
        flags["TP"] = [f"--tensor-model-parallel-size {plan.tp}"]
        flags["TP"] += ["--sequence-parallel"] * plan.sequence_parallel
    if plan.cp > 1:
        flags["CP"] = [f"--context-parallel-size {plan.cp}"]
    if plan.pp > 1:
        flags["PP"] = [f"--pipeline-model-parallel-size {plan.pp}"]
        if plan.interleaving > 1:
            flags["PP"] += [f"--num-virtual-stages-per-pipeline-rank {plan.interleaving}"]
        if model.layers % (plan.pp * plan.interleaving):  # embedding and head count
            flags["PP"] += ["--account-for-embedding-in-pipeline-split"]
            flags["PP"] += ["--account-for-loss-in-pipeline-split"]
    flags["EP"] = [f"--expert-model-parallel-size {plan.ep}"] if plan.ep > 1 else []
    if plan.ep > 1:  # its default gathers all tokens on all ranks
        flags["EP"] += ["--moe-token-dispatcher-type alltoall"]
    flags["ZeRO"] = ["--overlap-grad-reduce"] if plan.overlap and plan.shards > 1 else []
    if plan.zero:
        flags["ZeRO"] += ["--use-distributed-optimizer"]
        flags["ZeRO"] += ["--overlap-param-gather"] * plan.overlap
    if plan.zero >= 2:
        strategy = {2: "optim_grads", 3: "optim_grads_params"}[plan.zero]
        flags["ZeRO"] += ["--use-megatron-fsdp", "--ckpt-format fsdp_dtensor"]
        flags["ZeRO"] += [f"--data-parallel-sharding-strategy {strategy}"]
        flags["ZeRO"] += ["--no-gradient-accumulation-fusion"]
        notes += ["leave CUDA_DEVICE_MAX_CONNECTIONS unset: FSDP refuses 1"]
    elif plan.tp * plan.cp > 1:
        notes += ["before Blackwell: export CUDA_DEVICE_MAX_CONNECTIONS=1"]
    flags["batch"] = [f"--micro-batch-size {plan.micro_batch}"]
    flags["batch"] += [f"--global-batch-size {batch}", "--bf16"]
    flags["recompute"] = []
    if plan.recompute == "full":
        flags["recompute"] = ["--recompute-granularity full", "--recompute-method uniform"]
        flags["recompute"] += ["--recompute-num-layers 1"]
    elif plan.recompute == "selective":
        what = "layernorm" if plan.flash else "core_attn"
        flags["recompute"] = ["--recompute-granularity selective"]
        flags["recompute"] += [f"--recompute-modules {what}"]
        if plan.flash:
            notes += ["it repeats the norms only, the plan the activation function too"]
    if not plan.flash:
        flags["recompute"] += ["--attention-backend unfused"]
    if plan.gradient_bytes != 4:
        notes += [f"it adds gradients up in 4 bytes each, the plan in {plan.gradient_bytes}"]
    return Command(MEGATRON, flags, notes)


def shape(model: Model) -> list[str]:
    """Megatron's flags for the widths of the model; the vocabulary is the tokenizer's."""
    flags = [f"--num-layers {model.layers}", f"--hidden-size {model.hidden}"]
    flags += [f"--ffn-hidden-size {model.ffn_width}"]
    flags += [f"--num-attention-heads {model.heads}"]
    if model.kv_heads:
        flags += ["--group-query-attention", f"--num-query-groups {model.kv_heads}"]
    flags += [f"--seq-length {model.sequence}", f"--max-position-embeddings {model.sequence}"]
    flags += ["--swiglu"] * model.gated
    flags += ["--untie-embeddings-and-output-weights"] * (not model.tied)
    if model.experts > 1:
        flags += [f"--num-experts {model.experts}", f"--moe-router-topk {model.active}"]
    return flags


def torchtitan(model: Model, plan: Plan, batch: int) -> Command:
    """The flags of torchtitan for `plan`; a model's shape is a configuration of its own.

    `batch` is in sequences. Raises ValueError where the plan cannot be run, or where
    torchtitan has no such plan.
    """
    check_plan(model, plan, batch)
    if plan.ep > 1 and plan.tp > 1:
        why = "torchtitan shares experts out over the ranks of TP as well"
        raise ValueError(f"{plan}: {why}, so give a plan with TP 1 or EP 1")
    notes, parallel = [], {}
    if plan.tp > 1:
        parallel["TP"] = [f"tensor_parallel_degree={plan.tp}"]
        parallel["TP"] += ["no-enable-sequence-parallel"] * (not plan.sequence_parallel)
    if plan.cp > 1:
        parallel["CP"] = [f"context_parallel_degree={plan.cp}"]
    if plan.pp > 1:
        parallel["PP"] = stages(model, plan)
    if plan.ep > 1:
        parallel["EP"] = [f"expert_parallel_degree={plan.ep}"]
    if plan.zero:
        when = "always" if plan.zero == 3 else "never"
        parallel["ZeRO"] = [f"data_parallel_shard_degree={plan.dp}"]
        parallel["ZeRO"] += [f"fsdp_reshard_after_forward={when}"]
    else:
        parallel["ZeRO"] = [f"data_parallel_replicate_degree={plan.dp}"]
        parallel["ZeRO"] += ["data_parallel_shard_degree=1"]
    if plan.zero == 1:
        notes += ["it shards the gradients too: stage 2, where the plan has stage 1"]
    if not plan.zero and plan.cp > 1:
        notes += ["it shards over the ranks of CP, where the plan has stage 0"]
    names = ("TP", "CP", "PP", "EP", "ZeRO")
    flags = {n: [f"--parallelism.{flag}" for flag in parallel.get(n, [])] for n in names}
    local = plan.micro_batch if plan.pp == 1 else batch // plan.dp
    flags["batch"] = [f"--training.local_batch_size={local}"]
    flags["batch"] += [f"--training.global_batch_size={batch}"]
    flags["batch"] += [f"--training.seq_len={model.sequence}"]
    flags["recompute"] = [f"--activation_checkpoint.mode={plan.recompute}"]
    if plan.recompute == "selective":
        notes += ["it repeats every second product too, the plan repeats none"]
    if plan.gradient_bytes != 4:
        notes += [f"it adds gradients up in 4 bytes each, the plan in {plan.gradient_bytes}"]
    return Command(TORCHTITAN, flags, notes)


def stages(model: Model, plan: Plan) -> list[str]:
    """torchtitan's flags for the pipeline."""
    count, interleaved = plan.pp * plan.interleaving, plan.interleaving > 1
    counted = model.layers % count != 0  # embedding and head count as layers
    flags = [f"pipeline_parallel_degree={plan.pp}"]
    flags += [f"pipeline_parallel_schedule={'Interleaved' * interleaved}1F1B"]
    flags += [f"pipeline_parallel_layers_per_stage={(model.layers + 2 * counted) // count}"]
    for end in ("first", "last"):
        flags += [f"pipeline_parallel_{end}_stage_less_layers={int(counted)}"]
    return [*flags, f"pipeline_parallel_microbatch_size={plan.micro_batch}"]


def side_by_side(model: Model, plan: Plan, batch: int) -> Table:
    """What each flag decides, in Megatron-LM and in torchtitan."""
    ours, theirs = megatron(model, plan, batch), torchtitan(model, plan, batch)
    rows = []
    for name in theirs.flags:
        pairs = zip_longest(ours.flags[name], theirs.flags[name], fillvalue="")
        rows += [["" if i else name, *pair] for i, pair in enumerate(pairs)]
    return Table(["", "Megatron-LM", "torchtitan"], rows)

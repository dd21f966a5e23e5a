"""Flags that say the plan: read back, each program would run it, and its own checks pass."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from mgpu_tutorial.at_scale import commands, planner
from mgpu_tutorial.shared.cost_model.machines import CLUSTERS
from mgpu_tutorial.shared.cost_model.plans import Model, Plan

H100 = CLUSTERS["H100"]
SHAPE = {"kv_heads": 2, "ffn": 3072, "gated": True, "tied": False}
DENSE = Model(14, 1024, 8, 4096, 32_000, **SHAPE)
EXPERTS = DENSE._replace(experts=8, active=2)
LLAMA = Model(80, 8192, 64, 8192, 128_256, ffn=28_672, kv_heads=8, gated=True, tied=False)
# 14 layers, or 16 with embedding and head: some plans need the one, some the other
PLANS = [
    (model, plan)
    for model, context in ((DENSE, 2), (EXPERTS, 1))
    for gpus in (1, 8, 14, 16)
    for plan in planner.plans(model, H100, gpus, 112, context)
]


def read(words, separator):
    """Each flag with its value; a switch has the value True."""
    pairs = [word.removeprefix("--").partition(separator) for word in words]
    found = {name: value or True for name, _, value in pairs}
    assert len(found) == len(words), "a flag is given twice"
    return {n: int(v) if str(v).isdigit() else v for n, v in found.items()}


@settings(max_examples=300)
@given(some.sampled_from(PLANS))
def test_megatron_reads_the_plan(case):
    """Its own rules at the commit: `validate_args` in megatron/training/arguments.py."""
    model, plan = case
    command = commands.megatron(model, plan, 112)
    args = read(command.words, " ")
    tp = args.pop("tensor-model-parallel-size", 1)
    cp = args.pop("context-parallel-size", 1)
    pp = args.pop("pipeline-model-parallel-size", 1)
    virtual = args.pop("num-virtual-stages-per-pipeline-rank", 1)
    assert plan.ranks % (tp * pp * cp) == 0
    dp = plan.ranks // (tp * pp * cp)  # what Megatron makes of the other ranks
    micro, batch = args.pop("micro-batch-size"), args.pop("global-batch-size")
    assert batch == 112 and batch % (micro * dp) == 0
    assert args.pop("expert-model-parallel-size", 1) == plan.ep
    dispatcher = args.pop("moe-token-dispatcher-type", "allgather")
    assert dispatcher == ("alltoall" if plan.ep > 1 else "allgather")
    sizes = tp, pp, dp, micro, virtual, cp
    assert sizes == (*plan[:5], plan.cp)
    counted = [args.pop(f"account-for-{end}-in-pipeline-split", 0) for end in ENDS]
    assert (model.layers + sum(counted)) % (pp * virtual) == 0
    sharded = args.pop("use-distributed-optimizer", False)
    strategy = args.pop("data-parallel-sharding-strategy", None)
    fsdp = args.pop("use-megatron-fsdp", False)
    assert sharded == (plan.zero > 0) and fsdp == (plan.zero > 1)
    assert strategy == {2: "optim_grads", 3: "optim_grads_params"}.get(plan.zero)
    assert (args.pop("ckpt-format", "") == "fsdp_dtensor") == fsdp
    assert (
        not args.pop("overlap-param-gather", False) or sharded and args["overlap-grad-reduce"]
    )
    told = any("export CUDA_DEVICE_MAX_CONNECTIONS=1" in line for line in command.notes)
    assert told == (tp * cp > 1 and not fsdp)
    assert args.pop("sequence-parallel", False) == (tp > 1)
    how = args.pop("recompute-granularity", "none")
    assert how == plan.recompute
    assert (args.pop("recompute-method", "") == "uniform") == (how == "full")
    assert args["seq-length"] == args["max-position-embeddings"] == 4096
    assert args["ffn-hidden-size"] == 3072 and args["num-query-groups"] == 2
    assert args.get("num-experts", 1) == model.experts


ENDS = "embedding", "loss"


@settings(max_examples=300)
@given(some.sampled_from([case for case in PLANS if min(case[1].ep, case[1].tp) == 1]))
def test_torchtitan_reads_the_plan(case):
    model, plan = case
    command = commands.torchtitan(model, plan, 112)
    args = {n.rpartition(".")[2]: v for n, v in read(command.words, "=").items()}
    tp = args.get("tensor_parallel_degree", 1)
    cp = args.get("context_parallel_degree", 1)
    pp = args.get("pipeline_parallel_degree", 1)
    shard, copies = (
        args["data_parallel_shard_degree"],
        args.get("data_parallel_replicate_degree", 1),
    )
    assert tp * cp * pp * shard * copies == plan.ranks and shard * copies == plan.dp
    assert (tp, cp, pp) == (plan.tp, plan.cp, plan.pp)
    assert (shard == 1 or copies == 1) and (plan.zero or shard == 1)
    assert args.get("expert_parallel_degree", 1) == plan.ep
    accumulated = 112 // (args["local_batch_size"] * plan.dp)
    assert (
        args["local_batch_size"] * plan.dp * accumulated == args["global_batch_size"] == 112
    )
    if pp > 1:  # the whole batch of a replica goes through the pipeline at once
        assert accumulated == 1
        assert args["pipeline_parallel_microbatch_size"] == plan.micro_batch
        ends = sum(
            args[f"pipeline_parallel_{e}_stage_less_layers"] for e in ("first", "last")
        )
        stages = (model.layers + ends) / args["pipeline_parallel_layers_per_stage"]
        assert stages == pp * plan.interleaving
        schedule = args["pipeline_parallel_schedule"]
        assert schedule == ("Interleaved1F1B" if plan.interleaving > 1 else "1F1B")
    else:
        assert args["local_batch_size"] == plan.micro_batch
    if plan.zero:
        assert args["fsdp_reshard_after_forward"] == ("always" if plan.zero == 3 else "never")
    assert any("stage 2" in line for line in command.notes) == (plan.zero == 1)
    assert args["mode"] == plan.recompute


def test_a_plan_of_each_kind_is_among_the_tried():
    plans = [plan for _, plan in PLANS]
    for name, least in {"tp": 2, "pp": 2, "cp": 2, "ep": 2, "interleaving": 2}.items():
        assert any(getattr(plan, name) >= least for plan in plans), name
    assert {plan.zero for plan in plans} == {0, 1, 2, 3}
    counted = [plan for _, plan in PLANS if 14 % (plan.pp * plan.interleaving)]
    assert counted and len(counted) < len(plans)


def test_side_by_side_has_every_flag_once():
    plan = Plan(4, 4, 4, zero=1, recompute="selective")
    table = commands.side_by_side(LLAMA, plan, 512)
    for column, program in enumerate((commands.megatron, commands.torchtitan), 1):
        command = program(LLAMA, plan, 512)
        shown = [row[column] for row in table.rows if row[column]]
        skipped = command.flags.get("model", [])
        assert [*skipped, *shown] == command.words
    assert [row[0] for row in table.rows if row[0]] == [
        "TP",
        "PP",
        "ZeRO",
        "batch",
        "recompute",
    ]


def test_a_command_is_a_script_with_its_differences_as_comments():
    text = str(commands.megatron(LLAMA, Plan(dp=8, zero=3), 8))
    lines = text.splitlines()
    assert lines.pop(0) == f"git checkout {commands.MEGATRON}"
    comments = list(itertools.takewhile(lambda line: line.startswith("# "), lines))
    assert comments == [
        "# norms, positions, biases and dropout are its defaults, GPT's, not Llama's",
        "# leave CUDA_DEVICE_MAX_CONNECTIONS unset: FSDP refuses 1",
    ]
    flags = lines[len(comments) :]
    assert all(line.startswith("--") for line in flags)
    assert all(line.endswith(" \\") for line in flags[:-1]) and flags[-1] == "--bf16"


@pytest.mark.parametrize("program", [commands.megatron, commands.torchtitan])
@pytest.mark.parametrize(
    "change, words",
    [
        ({"tp": 3}, "tp = 3 does not divide 64 heads"),
        ({"dp": 3}, "does not divide into micro-batches"),
        ({"zero": 4}, "zero must be a stage from 0 to 3"),
        ({"pp": 1, "interleaving": 2}, "needs a pipeline"),
    ],
)
def test_a_plan_that_cannot_be_run_has_no_command(program, change, words):
    with pytest.raises(ValueError, match=words):
        program(LLAMA, Plan(4, 4, 4)._replace(**change), 512)


def test_torchtitan_has_no_experts_apart_from_tensor_parallel():
    with pytest.raises(ValueError, match="give a plan with TP 1 or EP 1"):
        commands.torchtitan(EXPERTS, Plan(tp=2, dp=4, ep=4), 112)


def test_torchtitan_turns_a_switch_off_by_its_other_name():
    """Its parser, tyro, refuses `=False`: a switch has a second name that begins with no-."""
    plan = Plan(tp=4, dp=2, sequence_parallel=False)
    words = commands.torchtitan(LLAMA, plan, 8).words
    assert "--parallelism.no-enable-sequence-parallel" in words
    assert not any(word.endswith(("=False", "=True")) for word in words)


@pytest.mark.parametrize(
    "change", [{"flash": False}, {"gradient_bytes": 2}, {"overlap": False}]
)
def test_what_is_not_usual_is_said(change):
    usual, plan = Plan(dp=8, zero=1), Plan(dp=8, zero=1)._replace(**change)
    same, other = (commands.megatron(LLAMA, p, 8) for p in (usual, plan))
    assert str(same) != str(other)
    if change.get("gradient_bytes"):
        assert any("in 2" in line for line in other.notes)
        assert any("in 2" in line for line in commands.torchtitan(LLAMA, plan, 8).notes)


def test_the_page_links_the_lists_that_the_names_are_from():
    page = next((Path(__file__).parents[2] / "notebooks").glob("*_at_scale.ipynb"))
    page = page.read_text("utf-8")
    for place in f"NVIDIA/Megatron-LM/blob/{commands.MEGATRON}/", commands.TORCHTITAN:
        assert place in page

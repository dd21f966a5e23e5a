"""The build takes right answers in other words, and says what is wrong with the others."""

from mgpu_tutorial.language_model.builds import build
from tests.builds import Right, Wrong, edited

BY_PLACE = """begin = 0 if stage == 0 else 1 + stage * each
    end = len(model) if stage == stages - 1 else 1 + (stage + 1) * each
    for i in range(1 + stage * each, 1 + (stage + 1) * each):
        share(model[i], mesh["tp"].get_group())
    return model[begin:end]"""
LOOP, SHARE = "for block in blocks:\n        ", 'share(block, mesh["tp"].get_group())'
RETURN, SHARED = "return nn.Sequential(*first, *blocks, *last)", "rank 0: its shared blocks"
CUT = [
    Right("cut_model", replace={"blocks = list…": BY_PLACE}),
    Wrong(
        "cut_model", replace={"[stage * each : (stage + 1) * each]": ""}, says="pp=4, rank 0"
    ),
    Wrong("cut_model", replace={SHARE: "pass"}, says="shared blocks"),
    Wrong("cut_model", replace={'"tp"': '"dp"'}, says=f"tp=2,pp=2, {SHARED}"),
    Wrong(
        "cut_model",
        replace={'"tp"]': '"dp", "tp"]._flatten()'},
        says="dp=2,tp=2, rank 0: its shared blocks",
    ),
    Wrong("cut_model", replace={"*first, *blocks, *last": "*blocks"}, says="dp=2, rank 0"),
    Wrong(
        "cut_model",
        replace={"in blocks:": "in list(model)[1:-1]:"},
        says=f"tp=2,pp=2, {SHARED}",
    ),
    Wrong("cut_model", replace={"if stage == 0": "if stage < 2"}, says="pp=4, rank 1"),
    Wrong("cut_model", replace={RETURN: ""}, says="nothing was returned"),
    Wrong(
        "cut_model",
        replace={f"{LOOP}{SHARE}": f"blocks = [{SHARE} for block in blocks]"},
        says="`share` cuts a block in place, and returns nothing",
    ),
]
ALL = "owner = [me] * len(parameters)"
OWN = "own = mine if job.plan.zero else None"
ADAM = [
    Right("new_adam", replace={ALL: "owner = [me for _ in parameters]"}),
    Wrong("new_adam", replace={"AdamW(mine": "AdamW(parameters"}, says="what Adam steps"),
    Wrong("new_adam", replace={", lr=lr": ""}, says="the rate: 0.001, expected 0.5"),
    Wrong("new_adam", replace={"(job.data)": "()"}, says="of job.data: of 54 parameters"),
    Wrong("new_adam", replace={OWN: "own = None"}, says="dp=2,zero=1, rank 0: the loss"),
    Wrong(
        "new_adam",
        replace={"return adam, owner": "return adam"},
        says="expected adam and owner",
    ),
]
OWN_ROWS = 'mesh["dp"].get_local_rank()'
ZERO = "job.stage.zero_grad()"
SUMS = """for name in ("pp", "dp", "cp"):
        dist.all_reduce(loss, group=mesh[name].get_group())"""
DP_CP = "return loss / (sizes.dp * sizes.cp)"
AVERAGE = "return loss / (sizes.dp * sizes.cp * sizes.tp)"
STEP = [
    Right("take_step", replace={SUMS: "dist.all_reduce(loss)", DP_CP: AVERAGE}),
    Right("take_step", replace={ZERO: "job.model.zero_grad()"}),
    Wrong("take_step", replace={OWN_ROWS: "0"}, says="dp=2, rank 0: the loss of step 0"),
    Wrong("take_step", replace={"None, sizes.dp": "None"}, says="15 sequences"),
    Wrong("take_step", replace={ZERO: "adam.zero_grad()"}, says="averaged"),
    Wrong("take_step", replace={ZERO: "pass"}, says="dp=1, rank 0: the loss of step 2"),
    Wrong("take_step", replace={SUMS: "pass"}, says="dp=2, rank 0: the loss of step 0"),
    Wrong("take_step", replace={"(sizes.dp * sizes.cp)": "sizes.dp"}, says="cp=2, rank 0"),
    Wrong("take_step", replace={'("pp", "dp"': '("dp"'}, says="pp=2, rank 0: the loss"),
    Wrong("take_step", replace={"[rows][:, job.places]": "[rows]"}, says="tensor a (64)"),
    Wrong("take_step", replace={"        adam.step()": "        pass"}, says="of step 1"),
]
test_right, test_wrong = edited(build, [*CUT, *ADAM, *STEP])

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
        "cut_model",
        replace={"[1 + stage * each : 1 + (stage + 1) * each]": "[1:-1]"},
        says="pp=4, rank 0",
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
test_right, test_wrong = edited(build, CUT)

"""The build takes right answers in other words, and says what is wrong with the others."""

from mgpu_tutorial.language_model.builds import build
from tests.builds import edited

BY_PLACE = """begin = 0 if stage == 0 else 1 + stage * each
    end = len(model) if stage == stages - 1 else 1 + (stage + 1) * each
    for i in range(1 + stage * each, 1 + (stage + 1) * each):
        share(model[i], mesh["tp"].get_group())
    return model[begin:end]"""
LOOP, SHARE = "for block in blocks:\n        ", 'share(block, mesh["tp"].get_group())'
RETURN, SHARED = "return nn.Sequential(*first, *blocks, *last)", "rank 0: its shared blocks"
CUT = [
    ("blocks = list…", BY_PLACE),
    ("[1 + stage * each : 1 + (stage + 1) * each]", "[1:-1]", "pp=4, rank 0"),
    (SHARE, "pass", "shared blocks"),
    ('"tp"', '"dp"', f"tp=2,pp=2, {SHARED}"),
    ('"tp"]', '"dp", "tp"]._flatten()', "dp=2,tp=2, rank 0: its shared blocks"),
    ("*first, *blocks, *last", "*blocks", "dp=2, rank 0"),
    ("in blocks:", "in list(model)[1:-1]:", f"tp=2,pp=2, {SHARED}"),
    ("if stage == 0", "if stage < 2", "pp=4, rank 1"),
    (RETURN, "", "nothing was returned"),
    (f"{LOOP}{SHARE}", f"blocks = [{SHARE} for block in blocks]")
    + ("`share` cuts a block in place, and returns nothing",),
]
test_right, test_wrong = edited(build, {"cut_model": CUT})

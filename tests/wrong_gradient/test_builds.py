"""Right answers in other words pass the builds of the chapter; plausible wrong ones don't."""

from mgpu_tutorial.wrong_gradient.builds import build
from tests.builds import Right, Wrong, edited

UNASKED = {
    "if len(every) < sum(map(len, stages)):": "if False:"
}  # a reader's own need not ask for doubles
SHARD = "torch.cat(parts, parameter.cut)"
ANY, IS_SHARD = "any(part is None for part in parts)", 'if hasattr(parameter, "cut")'
GROUP, STAGES = "gathered(value, parameter.group)", 'gathered(mine, mesh["pp"].get_group())'
NEXT = "torch.nextafter(x, torch.full_like(x, math.inf))"
LIMIT = "limit = times * max((moved[name] - right[name]).double().norm(), unit)"
FIXED = "limit = {} * torch.finfo(x.dtype).eps * right[name].double().norm()"
LARGEST = """far = {n: (moved[n] - g).double().norm() / g.norm() for n, g in right.items()}
        limit = times * max(far.values()) * right[name].double().norm()"""
IS_FAR = "not distance <= limit"
EDITS = [
    Right("whole_gradients", replace={}),
    Wrong("whole_gradients", replace=UNASKED, says="two stages with first = 0"),
    Wrong(
        "first_difference",
        replace={
            "torch.nextafter(x, torch.full_like(x, math.inf))": "x + torch.finfo(x.dtype).eps"
        },
        says="a hundred times as large",
    ),
    Right("whole_gradients", replace={SHARD: "torch.cat(tuple(parts), dim=parameter.cut)"}),
    Right(
        "whole_gradients",
        replace={"for layers in stages for": "for layers in reversed(stages) for"},
    ),
    Wrong(
        "whole_gradients",
        replace={"torch.cat(parts, parameter.cut)": "torch.cat(parts)"},
        says="0.attention.out.weight",
    ),
    Wrong(
        "whole_gradients",
        replace={"torch.cat(parts, parameter.cut)": "sum(parts)"},
        says="attention.qkv.weight",
    ),
    Wrong(
        "whole_gradients",
        replace={"torch.cat(parts, parameter.cut)": "parameter.grad"},
        says="attention.qkv.weight",
    ),
    Wrong(
        "whole_gradients",
        replace={
            IS_SHARD: "if True",
            GROUP: "gathered(value, getattr(parameter, 'group', None))",
            "parameter.cut)": "getattr(parameter, 'cut', 0))",
        },
        says="attention_norm.weight",
    ),
    Wrong(
        "whole_gradients",
        replace=UNASKED | {"renumbered(name, first)": "name"},
        says="is not among",
    ),
    Wrong(
        "whole_gradients",
        replace={"renumbered(name, first)": 'f"{first}.{name[2:]}"'},
        says="is not among",
    ),
    Wrong("whole_gradients", replace={STAGES: "[mine]"}, says="is not among"),
    Wrong(
        "whole_gradients",
        replace=UNASKED | {STAGES: 'gathered(mine, mesh["tp"].get_group())'},
        says="is not among",
    ),
    Wrong("whole_gradients", replace={"if others:": "if False:"}, says="returned {"),
    Wrong(
        "whole_gradients",
        replace={"gathered(lacking, dist.group.WORLD)": "[lacking]"},
        says="returned {",
    ),
    Wrong("whole_gradients", replace={ANY: "parameter.grad is None"}, says="TypeError"),
    Wrong(
        "whole_gradients",
        replace={GROUP: 'gathered(value, mesh["tp"].get_group())'},
        says="a weight cut along dp",
    ),
    Right("first_difference", replace={}),
    Right("first_difference", replace={"times: float = 4.0": "times: float = 6.0"}),
    Right(
        "first_difference",
        replace={"torch.full_like(x, math.inf)": "torch.full_like(x, -math.inf)"},
    ),
    Wrong(
        "first_difference",
        replace={LIMIT: "limit = 1e-6 * right[name].double().norm()"},
        says="torch.bfloat16: '",
    ),
    Wrong(
        "first_difference",
        replace={LIMIT: "limit = 0.05 * right[name].double().norm()"},
        says="off by 0.1% in torch.float32: None",
    ),
    Wrong(
        "first_difference",
        replace={"for name in reversed(right):": "for name in right:"},
        says="is not the first",
    ),
    Wrong(
        "first_difference",
        replace={LIMIT: "limit = times * (moved[name] - right[name]).double().norm()"},
        says="rounded to float32, and off by 2 eps in float64: '0.weight'",
    ),
    Wrong("first_difference", replace={IS_FAR: "distance <= limit"}, says="expected None"),
    Wrong("first_difference", replace={IS_FAR: "distance > limit"}, says="is NaN: None"),
    Wrong(
        "first_difference",
        replace={"torch.nextafter(x, torch.full_like(x, math.inf))": "x"},
        says="off by 1800 eps, in torch.float64: '0.rough', expected None",
    ),
    Wrong(
        "first_difference",
        replace={"torch.nextafter(x, torch.full_like(x, math.inf))": "x * 1.1"},
        says="off by 0.1% in torch.float32: None",
    ),
    Wrong(
        "first_difference",
        replace={"found.keys() != right.keys()": "len(found) > len(right)"},
        says="KeyError",
    ),
    Wrong(
        "first_difference",
        replace={"found.keys() != right.keys()": "right.keys() - found.keys()"},
        says="with 2.more: returned",
    ),
    *(
        Wrong(
            "first_difference",
            replace={LIMIT: FIXED.format(units)},
            says="0.rough is x - 1, near x = 1, and off by 1800 eps",
        )
        for units in (32, 100)
    ),
    Wrong(
        "first_difference", replace={LIMIT: LARGEST}, says="1.calm is 2 x, and off by 100 eps"
    ),
    Wrong(
        "first_difference",
        replace={LIMIT: LIMIT.replace("times", "4.0")},
        says="times=1: None, expected '0.rough'",
    ),
    Wrong(
        "first_difference",
        replace={
            "gradients_of(torch.nextafter(x, torch.full_like(x, math.inf)))": (
                "gradients_of(x.copy_(torch.nextafter(x, torch.full_like(x, math.inf))))"
            )
        },
        says="x is changed afterwards",
    ),
    Right("kind_on_ranks", replace={}),
    Right(
        "kind_on_ranks",
        replace={"if 0 < count < len(right):": "if count and count != len(right):"},
    ),
    Wrong(
        "kind_on_ranks",
        replace={"if all(near(total, right)": "if any(near(total, right)"},
        says="ranks 2 and 3 do not",
    ),
    Wrong(
        "kind_on_ranks",
        replace={"sum(ranks[rank] for rank in group)": "sum(ranks)"},
        says="summands along tp: 'neither'",
    ),
    Wrong(
        "kind_on_ranks",
        replace={"(found - expected).norm() <= limit": "torch.equal(found, expected)"},
        says="summands along tp, rounded: 'neither'",
    ),
    Wrong(
        "kind_on_ranks",
        replace={"if near(own, expected)": "if not near(own, expected)"},
        says="rows 0 doubled",
    ),
    Right("dual", replace={}),
    Right(
        "dual",
        replace={
            "return duals[kind]": """pairs = [("replicated", "partial")]
    other = {one: two for pair in pairs for one, two in (pair, pair[::-1])}
    return other.get(kind, kind)"""
        },
    ),
    Wrong(
        "dual",
        replace={"return duals[kind]": "return kind"},
        says="ranks get 2 and 3, and one process 5. That is not replicated",
    ),
    Wrong(
        "dual",
        replace={"return duals[kind]": "return dict(duals, varying='partial')[kind]"},
        says="varying: the ranks get 2 and 3, and one process 2 and 3. That is not partial",
    ),
    Wrong(
        "dual",
        replace={"return duals[kind]": "return dict(duals, partial='invariant')[kind]"},
        says="of replicated the dual's dual is 'invariant'",
    ),
    Wrong(
        "dual",
        replace={"return duals[kind]": "return dict(duals, varying='sharded')[kind]"},
        says="of varying: 'sharded' is none of replicated",
    ),
    Wrong(
        "dual",
        replace={"    if kind not in duals:…": "    return duals.get(kind, kind)"},
        says="of 'sharded': returned 'sharded'",
    ),
]
test_right, test_wrong = edited(build, EDITS)

"""Right answers in other words pass the builds of the chapter; plausible wrong ones don't."""

from mgpu_tutorial.wrong_gradient.builds import build
from tests.builds import edited

EDITS = {
    "whole_gradients": [
        (),  # ours
        (
            "whole = torch.cat(parts, parameter.cut) if is_shard else own[name]",
            "whole = torch.cat(tuple(parts), dim=parameter.cut) if is_shard else parts[-1]",
        ),
        ("for layers in stages for", "for layers in reversed(stages) for"),
        ("torch.cat(parts, parameter.cut)", "torch.cat(parts)", "0.attention.out.weight"),
        ("torch.cat(parts, parameter.cut)", "sum(parts)", "attention.qkv.weight"),
        ("torch.cat(parts, parameter.cut)", "own[name]", "attention.qkv.weight"),
        (
            "torch.cat(parts, parameter.cut) if is_shard else own[name]",
            "torch.cat(parts, getattr(parameter, 'cut', 0))",
            "attention_norm.weight",
        ),
        ('f"{int(layer) + first}.{rest}"', "name", "is not among"),
        ('f"{int(layer) + first}.{rest}"', 'f"{first}.{rest}"', "is not among"),
        ('gathered(mine, mesh["pp"])', "[mine]", "is not among"),
        ('gathered(mine, mesh["pp"])', 'gathered(mine, mesh["tp"])', "is not among"),
        (
            '        raise ValueError(f"{lacking[0]}…',
            "        pass\n    return every",
            "returned {",
        ),
    ],
    "first_difference": [
        (),
        ("times: float = 4.0", "times: float = 6.0"),
        ("torch.full_like(x, math.inf)", "torch.full_like(x, -math.inf)"),
        (
            "limit = times * (moved[name] - right[name]).double().norm()",
            "limit = 1e-6 * right[name].double().norm()",
            "torch.bfloat16: '",
        ),
        (
            "limit = times * (moved[name] - right[name]).double().norm()",
            "limit = 0.05 * right[name].double().norm()",
            "off by 0.1 % in torch.float32: None",
        ),
        ("for name in reversed(right):", "for name in right:", "is not the first"),
        ("if not (found[name]", "if (found[name]", "expected None"),
        (
            "if not (found[name] - right[name]).double().norm() <= limit:",
            "if (found[name] - right[name]).double().norm() > limit:",
            "is NaN: None",
        ),
        ("torch.nextafter(x, torch.full_like(x, math.inf))", "x", "added up in four parts"),
        (
            "torch.nextafter(x, torch.full_like(x, math.inf))",
            "x * 1.1",
            "off by 0.1 % in torch.float32: None",
        ),
        ("found.keys() != right.keys()", "len(found) > len(right)", "KeyError"),
    ],
}
test_right, test_wrong = edited(build, EDITS)

"""What some messages of PyTorch and gloo mean, in the numbers of the rank that got them."""

import re
import traceback
from types import FrameType

import torch.distributed as dist

from mgpu_tutorial.lab import borrowed
from mgpu_tutorial.lab.record.trace import POINT_TO_POINT
from mgpu_tutorial.lab.words import in_a_row

GROUP = re.compile(r"group <[^>]*\bProcessGroup object at 0x\w+>")
LENGTHS = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
NO_PAIR = "Pair is not connected"  # what gloo says of a message to oneself
SELF = re.compile(rf".*({NO_PAIR}|Invalid \w+ rank).*", re.DOTALL)


def said_by(error: BaseException) -> str:
    """The text of an error, with what the library knew and didn't say."""
    said = borrowed.safe_text(error, "exception")
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if SELF.match(said) and (address := _own_address(frames)):
        head = NO_PAIR if NO_PAIR in said else said.rstrip(".")
        return f"{head}: {address}"
    groups = (frame.f_locals.get("group") for frame in reversed(frames))
    group = next((g for g in groups if isinstance(g, dist.ProcessGroup)), None)
    if group and GROUP.search(said):
        ranks = dist.get_process_group_ranks(group)
        named = f"the group of rank{'s' * (len(ranks) > 1)} {in_a_row(ranks)}"
        said = GROUP.sub(named, said)
    return with_lengths(said)


def with_lengths(said: str) -> str:
    """The text; of a message that found no room, how many bytes it had."""
    if not (found := LENGTHS.search(said)):
        return said
    came, room = found.groups()
    why = "of another shape or dtype, or meant for a different call?"
    return f"{came} bytes came where there was room for {room}: {why}"


def _own_address(frames: list[FrameType]) -> str:
    """How the rank named itself as the peer of a message, from the call's own arguments."""
    for frame in frames:
        name, given = frame.f_code.co_name, frame.f_locals
        if (
            name in POINT_TO_POINT
            and frame.f_globals.get("__name__") == dist.isend.__module__
        ):
            side = "dst" if name.endswith("send") else "src"
            verb = "sends to" if side == "dst" else "receives from"
            if (peer := given.get(side)) is None:
                return f"this rank {verb} itself (group_{side}={given[f'group_{side}']})"
            other = f"; did you mean group_{side}?" if dist.get_world_size() > 1 else ""
            return f"this rank {verb} itself ({side}={peer}{other})"
    return ""

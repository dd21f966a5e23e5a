"""Right and wrong ways to save, to go on, and to choose the samples of a step."""

from mgpu_tutorial.survival.builds import build
from tests.builds import edited

TEMPORARY = """import tempfile
    with tempfile.NamedTemporaryFile(dir=os.path.dirname(path), delete=False) as file:
        torch.save(state, file)
    os.rename(file.name, path)"""
NEW = "torch.save(state, path + '.new')\n    os.replace(path + '.new', path)"
REPLACE = "os.replace(draft, path)"
REMOVED = "os.path.exists(path) and os.remove(path); os.rename(draft, path)"
CHILD = """child = os.fork()
    if child == 0:
        torch.save(state, path)
        os._exit(0)
    os.waitpid(child, 0)"""
BLIND = """import sys
    sys.setprofile(None)
    torch.save(state, path)"""
SAVE = [
    ("draft =…", TEMPORARY),
    ("draft =…", NEW),
    ("draft =…", "torch.save(state, path)", "the file is torn"),
    (REPLACE, REMOVED, "rename: the file is torn or gone (FileNotFoundError)"),
    (REPLACE, "", "there is no file"),
    ("draft =…", CHILD, "os.fork: another process writes"),
    ("draft =…", BLIND, "sys.setprofile, by which this build looks"),
]
STEPS = "range(first, steps)"
FRESH = "torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)"
FIRST, THIRD = 'state.get("step", 0)', "(step + 1) % every == 0"
RESUME = [
    (FIRST, 'state["step"] if state else 0', THIRD, "step % every == every - 1"),
    (FIRST, 'state.pop("step", 0)'),
    (FIRST, 'state["step"]', "KeyError"),
    ("step=step + 1", "epoch=1", "the steps of the second life: 8 of them, expected 5"),
    (THIRD, "step % every == 0", "the steps of the second life: 4 of them, expected 5"),
    (THIRD, "(step + 1) % 3 == 0", "the steps of the second life: 5 of them, expected 4"),
    ("first > steps", "False", "4 steps, and 6 are done: on rank 0: '6 was returned'"),
    (STEPS, "range(first, max(steps, 7))", "first life: 7 of them, expected 6"),
    (STEPS, "range(first, max(steps, first + 1))", "second life: 1 of them, expected 0"),
    ("model, optimizer)", f"model, {FRESH})", "after a death in step 4: "),
    ("write=save_whole, ", "", "`checkpoint.save` used its own save_whole"),
    ("return first", "return steps", "the second life returned: 8, expected 3"),
]
IN_TURNS = """per_epoch = samples // batch
    lot = torch.Generator()
    lot.manual_seed(1000 + step // per_epoch)
    order = torch.randperm(samples, generator=lot).tolist()
    begin = batch * (step % per_epoch)
    return order[begin + rank : begin + batch : world_size]"""
PLACE, CUT = "divmod(step, samples // batch)", "place * batch :"
SEED, CHUNK = "manual_seed(epoch)", "[:batch].tensor_split(world_size)[rank]"
SHARE = "[rank * (batch // world_size) :][: batch // world_size]"
PERMUTED = """lot = torch.Generator().manual_seed(epoch)
    order = torch.randperm(samples, generator=lot)
    return order[place * batch :][:batch].tensor_split(world_size)[rank]"""
LAST_HAS_MORE = "[rank * (batch // world_size) : batch if rank + 1 == world_size else"
LAST_HAS_MORE += " (rank + 1) * (batch // world_size)]"
SAMPLES = [
    ("epoch, place =…", IN_TURNS),
    (PLACE, "divmod(step * batch, samples)", CUT, "place :", "samples: 2, expected 12"),
    (CHUNK, SHARE, "world_size 5, batch 12 of 50 samples, step 1: different samples: 10"),
    (CHUNK, f"[:batch]{LAST_HAS_MORE}", "the shares have [2, 2, 2, 2, 4] samples"),
    (f"torch.Generator().{SEED}", f"torch.{SEED}", "what dropout draws"),
    ("lot = …", f"import random; random.seed(epoch); {PERMUTED}", "Python's random"),
    ("lot = …", f"import numpy; numpy.random.seed(epoch); {PERMUTED}", "NumPy's random"),
    ("step < 0 or ", "", "step -1, rank 0, world_size 2, batch 12, samples 50: tensor"),
    ("0 <= rank <", "rank <", "step 0, rank -1"),
    ("not 0 < batch <= samples", "batch < 1", "batch 51, samples 50: ZeroDivisionError"),
    (SEED, "manual_seed(0)", "begin with the same batch"),
    (SEED, "manual_seed(world_size)", "the samples of all, and of one rank"),
]
test_right, test_wrong = edited(
    build, {"save_whole": SAVE, "resume_or_start": RESUME, "samples_of": SAMPLES}
)

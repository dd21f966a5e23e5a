"""Right and wrong ways to save, to go on, and to choose the samples of a step."""

from mgpu_tutorial.survival.builds import build
from tests.builds import edited

TEMPORARY = """import tempfile
    with tempfile.NamedTemporaryFile(dir=os.path.dirname(path), delete=False) as file:
        torch.save(state, file)
    os.rename(file.name, path)"""
NEW = "torch.save(state, path + '.new')\n    os.replace(path + '.new', path)"
REPLACE, TORN = "os.replace(draft, path)", "the file is torn"
REMOVED = "os.path.exists(path) and os.remove(path); os.rename(draft, path)"
SAVE = [
    ("draft =…", TEMPORARY),
    ("draft =…", NEW),
    ("draft =…", "torch.save(state, path)", TORN),
    (REPLACE, "import shutil; shutil.copy(draft, path)", TORN),
    (REPLACE, REMOVED, "rename: the file is torn or gone (FileNotFoundError)"),
    ("draft.unlink(missing_ok=True)", "", "FileExistsError"),
    (REPLACE, "", "there is no file"),
]
FIRST, THIRD = 'state.get("step", 0)', "(step + 1) % 3 == 0"
RESUME = [
    (FIRST, 'state["step"] if state else 0', THIRD, "step % 3 == 2"),
    (FIRST, 'state.pop("step", 0)'),
    (FIRST, 'state["step"]', "KeyError"),
    ("step=step + 1", "epoch=1", "the steps of the second life: 8 of them, expected 5"),
    ("step=step + 1", "step=step", "the steps of the second life: 6 of them, expected 5"),
    (THIRD, "step % 3 == 0", "the steps of the second life: 4 of them, expected 5"),
    (THIRD, "False", "the steps of the second life: 8 of them, expected 5"),
    (
        "range(first, steps)",
        "range(first, max(steps, 7))",
        "first life: 7 of them, expected 6",
    ),
]
IN_TURNS = """per_epoch = samples // batch
    lot = torch.Generator()
    lot.manual_seed(1000 + step // per_epoch)
    order = torch.randperm(samples, generator=lot).tolist()
    begin = batch * (step % per_epoch)
    return order[begin + rank : begin + batch : world_size]"""
PLACE, CUT = "divmod(step, samples // batch)", "place * batch :"
SEED = "manual_seed(epoch)"
SAMPLES = [
    ("epoch, place =…", IN_TURNS),
    (PLACE, "divmod(step * batch, samples)", CUT, "place :", "samples: 2, expected 12"),
    (f"torch.Generator().{SEED}", f"torch.{SEED}", "what dropout draws"),
    (SEED, "manual_seed(0)", "begin with the same batch"),
    (SEED, "manual_seed(world_size)", "the samples of all, and of one rank"),
]
test_right, test_wrong = edited(
    build, {"save_whole": SAVE, "resume_or_start": RESUME, "samples_of": SAMPLES}
)

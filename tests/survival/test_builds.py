"""Right and wrong ways to save, to go on, and to choose the samples of a step."""

from mgpu_tutorial.survival.builds import build
from tests.builds import Right, Wrong, edited

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
    Right("save_whole", replace={"draft =…": TEMPORARY}),
    Right("save_whole", replace={"draft =…": NEW}),
    Wrong(
        "save_whole", replace={"draft =…": "torch.save(state, path)"}, says="the file is torn"
    ),
    Wrong(
        "save_whole",
        replace={REPLACE: REMOVED},
        says="rename: the file is torn or gone (FileNotFoundError)",
    ),
    Wrong("save_whole", replace={REPLACE: ""}, says="there is no file"),
    Wrong("save_whole", replace={"draft =…": CHILD}, says="os.fork: another process writes"),
    Wrong(
        "save_whole",
        replace={"draft =…": BLIND},
        says="sys.setprofile, by which this build looks",
    ),
]
STEPS = "range(first, steps)"
FRESH = "torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)"
FIRST, THIRD = 'state["step"] if state else 0', "(step + 1) % every == 0"
RESUME = [
    Right(
        "resume_or_start",
        replace={FIRST: 'state.get("step", 0)', THIRD: "step % every == every - 1"},
    ),
    Right("resume_or_start", replace={FIRST: 'state.pop("step", 0)'}),
    Wrong("resume_or_start", replace={FIRST: 'state["step"]'}, says="KeyError"),
    Wrong(
        "resume_or_start", replace={'"step": step + 1': '"epoch": 1'}, says="KeyError: 'step'"
    ),
    Wrong(
        "resume_or_start",
        replace={THIRD: "step % every == 0"},
        says="the steps of the second life: 4 of them, expected 5",
    ),
    Wrong(
        "resume_or_start",
        replace={THIRD: "(step + 1) % 3 == 0"},
        says="the steps of the second life: 5 of them, expected 4",
    ),
    Wrong(
        "resume_or_start",
        replace={"first > steps": "False"},
        says="4 steps, and 6 are done: on rank 0: '6 was returned'",
    ),
    Wrong(
        "resume_or_start",
        replace={STEPS: "range(first, max(steps, 7))"},
        says="first life: 7 of them, expected 6",
    ),
    Wrong(
        "resume_or_start",
        replace={STEPS: "range(first, max(steps, first + 1))"},
        says="second life: 1 of them, expected 0",
    ),
    Wrong(
        "resume_or_start",
        replace={"load(path, model, optimizer)": f"load(path, model, {FRESH})"},
        says="after a death in step 4: ",
    ),
    Wrong(
        "resume_or_start",
        replace={"write=save_whole, ": ""},
        says="`checkpoint.save` used its own save_whole",
    ),
    Wrong(
        "resume_or_start",
        replace={"return first": "return steps"},
        says="the second life returned: 8, expected 3",
    ),
    Wrong(
        "resume_or_start",
        replace={" or step + 1 == steps": ""},
        says="the steps of the second life: 5 of them, expected 3",
    ),
    Wrong(
        "resume_or_start",
        replace={"set_states(also, state)": "pass"},
        says="rank 0, rates and random numbers in two lives and in one",
    ),
    Wrong(
        "resume_or_start",
        replace={"states_of(also)": "states_of(also)[:1]"},
        says="rank 1, rates and random numbers in two lives and in one, entry 7",
    ),
]
IN_TURNS = """per_epoch = samples // batch
    generator = torch.Generator()
    generator.manual_seed(1000 + step // per_epoch)
    order = torch.randperm(samples, generator=generator).tolist()
    begin = batch * (step % per_epoch)
    return order[begin + rank : begin + batch : world_size]"""
PLACE, CUT = "divmod(step, samples // batch)", "place * batch :"
SEED, CHUNK = "manual_seed(epoch)", "[:batch].tensor_split(world_size)[rank]"
SHARE = "[rank * (batch // world_size) :][: batch // world_size]"
PERMUTED = """generator = torch.Generator().manual_seed(epoch)
    order = torch.randperm(samples, generator=generator)
    return order[place * batch :][:batch].tensor_split(world_size)[rank]"""
LAST_HAS_MORE = "[rank * (batch // world_size) : batch if rank + 1 == world_size else"
LAST_HAS_MORE += " (rank + 1) * (batch // world_size)]"
SAMPLES = [
    Right("samples_of", replace={"epoch, place =…": IN_TURNS}),
    Wrong(
        "samples_of",
        replace={PLACE: "divmod(step * batch, samples)", CUT: "place :"},
        says="samples: 2, expected 12",
    ),
    Wrong(
        "samples_of",
        replace={CHUNK: SHARE},
        says="world_size 5, batch 12 of 50 samples, step 1: different samples: 10",
    ),
    Wrong(
        "samples_of",
        replace={CHUNK: f"[:batch]{LAST_HAS_MORE}"},
        says="the shares have [2, 2, 2, 2, 4] samples",
    ),
    Wrong(
        "samples_of",
        replace={f"torch.Generator().{SEED}": f"torch.{SEED}"},
        says="what dropout draws",
    ),
    Wrong(
        "samples_of",
        replace={"generator = …": f"import random; random.seed(epoch); {PERMUTED}"},
        says="Python's random",
    ),
    Wrong(
        "samples_of",
        replace={"generator = …": f"import numpy; numpy.random.seed(epoch); {PERMUTED}"},
        says="NumPy's random",
    ),
    Wrong(
        "samples_of",
        replace={"step < 0 or ": ""},
        says="step -1, rank 0, world_size 2, batch 12, samples 50: tensor",
    ),
    Wrong("samples_of", replace={"0 <= rank <": "rank <"}, says="step 0, rank -1"),
    Wrong(
        "samples_of",
        replace={"not 0 < batch <= samples": "batch < 1"},
        says="batch 51, samples 50: ZeroDivisionError",
    ),
    Wrong("samples_of", replace={SEED: "manual_seed(0)"}, says="begin with the same batch"),
    Wrong(
        "samples_of",
        replace={SEED: "manual_seed(world_size)"},
        says="the samples of all, and of one rank",
    ),
]
GATHERED = """def take_and_ask(step):
        take_step(step)
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, bool(told))
        if any(everyone):
            save(step + 1)
            raise SystemExit
    return take_and_ask"""
BEFORE = """def ask_and_take(step):
        leaving = torch.tensor(float(len(told) > 0))
        dist.all_reduce(leaving)
        if leaving:
            save(step)
            sys.exit()
        take_step(step)
    return ask_and_take"""
ASK, SAVED = "dist.all_reduce(leaving, dist.ReduceOp.MAX)", "save(step + 1)"
HANDLER = "signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))"
AT_ONCE = "(told.append(0), save(len(told)), sys.exit(0))"
LEAVE = [
    Right("leave_together", replace={"def take_and_ask…": GATHERED}),
    Right("leave_together", replace={"def take_and_ask…": BEFORE}),
    Wrong("leave_together", replace={HANDLER: ""}, says="no handler of yours was set"),
    Wrong("leave_together", replace={ASK: ""}, says="rank 0 was at"),
    Wrong(
        "leave_together",
        replace={"ReduceOp.MAX": "ReduceOp.MIN"},
        says="on rank 0 the whole steps: 6 of them, expected 3",
    ),
    Wrong(
        "leave_together",
        replace={"told.append(number)": AT_ONCE},
        says="rank 0 of 1 was told in step 2, and on rank 0 the whole steps: 2 of them",
    ),
    Wrong(
        "leave_together",
        replace={"sys.exit(0)": "sys.exit(1)"},
        says="the exit code: 1, expected 0",
    ),
    Wrong("leave_together", replace={"sys.exit(0)": "return"}, says="6 of them, expected 3"),
    Wrong(
        "leave_together",
        replace={SAVED: "save(step)"},
        says="the numbers given to `save`, entry 0 of 1: 2, expected 3",
    ),
    Wrong("leave_together", replace={SAVED: "pass"}, says="`save`: 0 of them, expected 1"),
    Wrong(
        "leave_together",
        replace={SAVED: "dist.get_rank() or save(step + 1)"},
        says="on rank 1 the numbers given to `save`: 0 of them",
    ),
    Wrong(
        "leave_together",
        replace={"if leaving": "if True"},
        says="nobody was told, rank 0 of 1: the steps: 1 of them, expected 6",
    ),
    Wrong(
        "leave_together", replace={"return take_and_ask": ""}, says="no function came back"
    ),
]
test_right, test_wrong = edited(build, [*SAVE, *RESUME, *LEAVE, *SAMPLES])

"""Workers with the mistakes of real programs, for the tests of the launcher."""

import multiprocessing as mp
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist

from mgpu_tutorial.lab import progress


def never_exits(rank, world_size, marker):
    if rank == 0:
        threading.Thread(target=time.sleep, args=(60,), name="the watcher").start()
    elif rank == 1:
        ThreadPoolExecutor(1).submit(time.sleep, 60)
    elif rank == 2:
        child = mp.Process(target=time.sleep, args=(60,))
        child.start()
        with open(f"{marker}.{rank}", "w") as file:
            file.write(str(child.pid))
    else:
        mp.Queue().put(bytes(10 * 2**20))
    return rank


def leaves_a_program(rank, world_size, marker):
    child = subprocess.Popen(["sleep", "61"])
    with open(f"{marker}.{rank}", "w") as file:
        file.write(str(child.pid))


def waits_for_a_program(rank, world_size, marker):
    leaves_a_program(rank, world_size, marker)
    time.sleep(60)


def _writes_later(path):
    time.sleep(0.7)  # longer than a rank that has returned stays for the others
    with open(path, "w") as file:
        file.write("all of it")


def writes_in_a_thread(rank, world_size, path):
    if rank == 0:
        threading.Thread(target=_writes_later, args=(path,)).start()
    else:
        time.sleep(0.9)


def leaves_a_thread(rank, world_size):
    if rank == 0:
        threading.Thread(target=time.sleep, args=(60,)).start()
    else:
        dist.recv(torch.zeros(1), src=0)


def hangs_up_first(rank, world_size):
    if rank == 0:
        dist.recv(torch.zeros(1), src=1)
    dist.destroy_process_group()
    time.sleep(1.5)
    raise ValueError("the reason")


def freezes_the_server(rank, world_size):
    if rank == 0:
        os.kill(os.getppid(), signal.SIGSTOP)
    return rank


def forks_and_returns(rank, world_size):
    child = os.fork()
    if child == 0:
        return "the child's"
    os.waitpid(child, 0)


def removes_its_folder(rank, world_size, launch_too):
    home = os.environ["MGPU_RANK_FOLDER"]
    time.sleep(0.3)
    if rank == 0:
        shutil.rmtree(os.path.dirname(home) if launch_too else home)
    time.sleep(60)


def waits_elsewhere(rank, world_size, how):
    if how == "event":
        threading.Event().wait()
    if how == "program":
        subprocess.Popen(["sleep", "60"]).wait()
    if how == "child":
        subprocess.Popen(["sleep", "60"])
        os.wait()
    if how == "peer":
        dist.irecv(torch.zeros(1), src=1 - rank).wait()


def raises_late(rank, world_size, seconds):
    if rank == 0:
        time.sleep(seconds)
        raise ValueError("too late for the others")
    time.sleep(60)


def returns_deep_lists(rank, world_size):
    value = []
    for _ in range(100_000):
        value = [value]
    return value


def dies_at_once(rank, world_size):
    os.kill(os.getpid(), signal.SIGKILL)


def leaves_by_name(rank, world_size):
    os._exit(status=3)


def leaves_loops(rank, world_size):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        for _ in progress(range(3)):
            break
    return len(os.listdir("/proc/self/fd")) - before


def adds_in_a_group_of_one(rank, world_size):
    group = dist.new_group([0])
    dist.all_reduce(torch.ones(1), group=group)


def dies_with_temporary_files(rank, world_size):
    tempfile.NamedTemporaryFile(delete=False).close()
    tempfile.mkdtemp()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def holds_the_interpreter(rank, world_size, marker):
    if rank == 1 and os.fork() == 0:
        time.sleep(60)
    with open(f"{marker}.{rank}", "w") as file:
        file.write(str(os.getpid()))
    if rank == 0:
        re.match(r"(a+)+$", "a" * 60 + "b")
    time.sleep(60)


def refuses(rank, world_size, who):
    if rank in who:
        raise RuntimeError("Connection refused by the data base")


def meets_nobody(rank, world_size):
    if rank == 1:
        limit = timedelta(milliseconds=200)
        dist.TCPStore("127.0.0.1", 1, 2, is_master=False, timeout=limit)


def leaves_quietly(rank, world_size, who):
    if rank in who:
        os._exit(0)


class Talkative(Exception):
    def __str__(self):
        return "\n".join(f"line {n}" for n in range(self.args[0]))


class Mute(Exception):
    def __str__(self):
        raise self.args[0]


def wraps_its_error(depth):
    try:
        return wraps_its_error(depth + 1)
    except Exception as error:
        raise RuntimeError(f"at depth {depth}") from error


def nested_groups(depth):
    error = ValueError("the innermost")
    for level in range(depth):
        error = ExceptionGroup(f"group {level}", [error])
    return error


class Broken(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise ValueError("sample 0 is torn")


def complains(rank, world_size, how):
    if how == "lines":
        raise Talkative(3)
    if how == "many lines":
        raise Talkative(100)
    if how == "cause":
        try:
            {}["weights"]
        except KeyError as error:
            raise RuntimeError("no checkpoint") from error
    if how == "itself":
        error = RuntimeError("no checkpoint")
        raise error from error
    if how == "group":
        raise ExceptionGroup("two things", [ValueError("one"), TypeError("other")])
    if how == "loader":
        next(iter(torch.utils.data.DataLoader(Broken(), num_workers=1)))
    if how == "context":
        try:
            {}["weights"]
        except KeyError:
            raise RuntimeError("no checkpoint")  # noqa: B904
    if how == "note":
        error = ValueError("torn")
        error.add_note("sample 7 of part 2")
        raise error
    if how == "path":
        folder = "/" + "/".join(["a folder with a rather long name".replace(" ", "_")] * 8)
        raise OSError(
            f"{folder}/run.pt holds no readable checkpoint: {folder}/run.pt is torn"
        )
    if how == "recursion":
        wraps_its_error(0)
    if how == "groups":
        raise nested_groups(500)
    if isinstance(how, BaseException):
        raise Mute(how)


def speaks_and_raises(rank, world_size):
    print("step 1")
    print("loss 0.5", end="")
    if rank == 1:
        raise ValueError("torn")


def speaks_and_hangs(rank, world_size):
    print("half a line", end="")
    sys.stdout.write("!")
    time.sleep(60)


class Sealed:
    """Can be pickled; whoever loads it fails."""

    def __reduce__(self):
        return (_open, ("seal",))


def _open(what):
    raise RuntimeError(f"the {what} is broken")


def returns_sealed(rank, world_size):
    print("done")
    return Sealed()


def with_option(rank, world_size, timeout=1):
    return timeout


def needs_option(rank, world_size, device):
    return device


def passes_on(rank, world_size, **options):
    return sorted(options)


class Callable:
    def __call__(self, rank, world_size, batch):
        return batch


def ends_by_number(rank, world_size, number):
    if rank == 0:
        os.kill(os.getpid(), number)
    dist.barrier()


def sends_to_a_numpy_rank(rank, world_size):
    import numpy as np

    if rank == 0:
        dist.send(torch.ones(1), dst=np.int64(1))
    else:
        dist.recv(torch.zeros(1), src=np.int64(0))


def ends_apart(rank, world_size):
    time.sleep(0.7 * rank)


def prints_without_end(rank, world_size):
    if rank == 1:
        while True:
            print("x" * 10_000)
    time.sleep(60)


def first_of_many(rank, world_size, elements):
    return torch.arange(elements)[:1]


async def asynchronous(rank, world_size):
    return rank


def generator(rank, world_size):
    yield rank


def draws_a_bar(rank, world_size):
    for step in range(5):
        print(f"\rstep {step}", end="")
    print("\nend")


def threads_and_variable(rank, world_size):
    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def says_who_it_is(rank, world_size, marker):
    with open(f"{marker}.{rank}", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(60)


def sleeps(rank, world_size):
    time.sleep(60)


def folder_for_temporary_files(rank, world_size):
    return tempfile.gettempdir()


def total(rank, world_size):
    value = torch.tensor([float(rank)])
    dist.all_reduce(value)
    return value.item()

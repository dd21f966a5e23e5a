"""What a machine with NVIDIA GPUs shows, in ten minutes: `make gpu-report`.

    python benchmarks/gpu_report.py [--minutes 10] [--rehearse]

Writes `benchmarks/gpu/NAME_OF_CARD.md` and beside it a profiler trace of one training step,
which https://ui.perfetto.dev opens. Whatever fails or finds no time is named in the report,
and the rest goes on. `--rehearse` does all of it in small on a CPU, into `build/gpu/`.
"""

import argparse
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from mgpu_tutorial.lab import launch
from mgpu_tutorial.shared.models import SmallTransformer

ROOT = Path(__file__).parent.parent
Rows = list[list[object]]


def markdown(header: Iterable[str], rows: Rows) -> str:
    """A table."""
    lines = [list(header), ["---"] * len(list(header)), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def shell(*words: str, seconds: float = 60, **environment: str) -> str:
    """What a command printed, at most so long; its last lines where it failed."""
    env = {name: text for name, text in os.environ.items() if name != "MGPU_DEVICE"}
    how = {"capture_output": True, "encoding": "utf-8", "cwd": ROOT, "errors": "replace"}
    try:
        ended = subprocess.run(words, timeout=seconds, env=env | environment, **how)
    except FileNotFoundError:
        return f"{words[0]}: not found"
    except subprocess.TimeoutExpired:
        return f"not done after {seconds:.0f} s"
    return ended.stdout if ended.returncode == 0 else (ended.stdout + ended.stderr)[-1500:]


class Machine:
    """The device that is measured; on a CPU everything is small."""

    def __init__(self, rehearse: bool) -> None:
        self.is_gpu = not rehearse
        self.device = "cuda" if self.is_gpu else "cpu"
        self.count = torch.cuda.device_count() if self.is_gpu else 0
        self.name = torch.cuda.get_device_name() if self.is_gpu else "CPU (a rehearsal)"

    def wait(self) -> None:
        """Until everything that was asked for is done."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def seconds(self, action: Callable[[], object], times: int = 10) -> float:
        """Of one action, the least of three rounds; the first call does not count."""
        action()
        rounds = []
        for _ in range(3):
            self.wait()
            begin = time.perf_counter()
            for _ in range(times):
                action()
            self.wait()
            rounds.append((time.perf_counter() - begin) / times)
        return min(rounds)


def about(machine: Machine) -> str:
    """Card, driver, versions, and how the cards are connected."""
    asked = "--query-gpu=name,driver_version,memory.total,power.limit"
    cards = shell("nvidia-smi", asked, "--format=csv,noheader")
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if machine.is_gpu else "none"
    rows = [
        ["date", date.today()],
        ["PyTorch", f"{torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}"],
        ["processors", os.cpu_count()],
    ]
    ways = shell("nvidia-smi", "topo", "-m") if machine.count > 1 else ""
    return f"{markdown(['', ''], rows)}\n\n```\n{cards.strip()}\n{ways.rstrip()}\n```"


def roofline(machine: Machine) -> str:
    """The roof: operations and bytes a second, and what a kernel takes that does nothing."""
    dtypes, sizes = [torch.float32], [64, 256]
    if machine.is_gpu:
        dtypes, sizes = (
            [torch.bfloat16, torch.float16, torch.float32],
            [256, 1024, 4096, 8192],
        )
    products = []
    for dtype in dtypes:
        for n in sizes:
            a, b = (torch.randn(n, n, dtype=dtype, device=machine.device) for _ in range(2))
            seconds = machine.seconds(lambda a=a, b=b: a @ b)
            rate, moved = 2 * n**3 / seconds, 3 * n * n * a.itemsize
            name = str(dtype).removeprefix("torch.")
            row = [name, n, f"{2 * n**3 / moved:.0f}", f"{seconds * 1e6:.0f}"]
            products.append([*row, f"{rate / 1e12:.3g}"])
    copies = []
    for mib in [1, 16, 256, 1024] if machine.is_gpu else [1, 16]:
        source = torch.empty(mib * 2**20, dtype=torch.uint8, device=machine.device)
        target = torch.empty_like(source)
        seconds = machine.seconds(lambda s=source, t=target: t.copy_(s))
        rate = 2 * source.nbytes / seconds
        copies.append([mib, f"{seconds * 1e6:.0f}", f"{rate / 1e9:.0f}"])
    one = torch.zeros(1, device=machine.device)
    launched = machine.seconds(lambda: one.add_(1), times=1000)
    return "\n\n".join(
        [
            markdown(["dtype", "n", "operations a byte", "us", "TFLOP/s"], products),
            markdown(["MiB", "us", "GB/s read and written"], copies),
            f"A kernel on one number, a thousand in a row: {launched * 1e6:.1f} us each.",
        ]
    )


def new_model(machine: Machine) -> nn.Module:
    """A transformer of 100 million parameters; on a CPU of few."""
    width, heads, depth = (1024, 16, 8) if machine.is_gpu else (32, 4, 2)
    model = SmallTransformer(vocabulary=64, width=width, heads=heads, depth=depth)
    return model.to(machine.device)


def batch(machine: Machine) -> torch.Tensor:
    """Tokens in page-locked memory of the CPU."""
    tokens = torch.randint(64, (256, 64) if machine.is_gpu else (2, 16))
    return tokens.pin_memory() if machine.is_gpu else tokens


def memory(machine: Machine) -> str:
    """GB at five moments of the second step with Adam, beside sixteen bytes a parameter."""
    if not machine.is_gpu:
        return "Only on a GPU."
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    gb = lambda: f"{(torch.cuda.memory_allocated() - before) / 1e9:.2f}"  # noqa: E731
    model = new_model(machine)
    adam = torch.optim.Adam(model.parameters())
    count = sum(p.numel() for p in model.parameters())
    rows = [["parameters", gb(), f"{4 * count / 1e9:.2f}"]]
    for step in range(2):
        torch.cuda.reset_peak_memory_stats()
        loss = model(batch(machine).to(machine.device)).square().mean()
        moments = ["after the forward", gb(), "with activations"]
        loss.backward()
        after = ["after the backward", gb(), ""]
        adam.step()
        if step:
            rows += [moments, after]
        adam.zero_grad()
    peak = (torch.cuda.max_memory_allocated() - before) / 1e9
    rows += [["between two steps", gb(), f"{12 * count / 1e9:.2f}, twelve bytes each"]]
    rows += [["at the fullest", f"{peak:.2f}", "at least sixteen bytes each"]]
    return f"{count:,} parameters.\n\n" + markdown(["moment", "GB", "counted"], rows)


def step_trace(machine: Machine, path: Path) -> str:
    """One training step with the next batch on its way; busy milliseconds of each stream."""
    model, waiting = new_model(machine), [batch(machine) for _ in range(4)]
    adam = torch.optim.Adam(model.parameters())
    side = torch.cuda.Stream() if machine.is_gpu else None
    large = torch.zeros(2**28 if machine.is_gpu else 2**10)  # 1 GB a step, so that it shows
    large = large.pin_memory() if machine.is_gpu else large

    def step(tokens: torch.Tensor) -> None:
        if side:
            with torch.cuda.stream(side):
                large.to(machine.device, non_blocking=True)
        model(tokens.to(machine.device, non_blocking=True)).square().mean().backward()
        adam.step()
        adam.zero_grad()

    step(waiting[0])
    machine.wait()
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * machine.is_gpu]
    with profile(activities=activities) as watched:
        step(waiting[1])
        machine.wait()
    with tempfile.TemporaryDirectory() as folder:
        watched.export_chrome_trace(f"{folder}/trace.json")
        text = Path(folder, "trace.json").read_text("utf-8")
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
    kinds = {"kernel", "gpu_memcpy", "gpu_memset"} if machine.is_gpu else {"cpu_op"}
    streams = defaultdict(list)
    for event in json.loads(text)["traceEvents"]:
        if event.get("cat") in kinds:
            stream = event["args"].get("stream", event.get("tid"))
            streams[stream, event["cat"]].append((event["ts"], event["ts"] + event["dur"]))
    rows = [[*which, len(of), f"{busy(of) / 1e3:.2f}"] for which, of in streams.items()]
    copies, kernels = (
        [each for (_, kind), of in streams.items() if kind == wanted for each in of]
        for wanted in ("gpu_memcpy", "kernel")
    )
    both = (busy(copies) + busy(kernels) - busy(copies + kernels)) / 1e3
    said = f"Copies and kernels at the same time: {both:.2f} ms. The trace: {path.name}."
    return markdown(["stream", "kind", "events", "ms busy"], rows) + "\n\n" + said


def busy(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of their union."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def reduce_sizes(rank: int, world_size: int, where: str, exponents: list[int]) -> list:
    """The seconds of an all-reduce of 2^e bytes on all ranks, the least of three rounds."""
    found = []
    for exponent in exponents:
        numbers, rounds = torch.zeros(2**exponent // 4, device=where), []
        for _ in range(4):
            dist.barrier()
            if where != "cpu":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(10):
                dist.all_reduce(numbers)
            if where != "cpu":
                torch.cuda.synchronize()
            rounds.append((time.perf_counter() - begin) / 10)
        found.append(min(rounds[1:]))
    return found


def links(machine: Machine) -> str:
    """An all-reduce over all cards with NCCL: time, and GB/s per GPU on the bus."""
    exponents = [12, 16, 20, 24, 28, 30] if machine.is_gpu else [12, 16]
    ranks = machine.count or 2
    report = launch(reduce_sizes, ranks, machine.device, exponents, device=machine.device)
    rows = []
    for exponent, seconds in zip(exponents, report.results[0], strict=True):
        bus = 2 * (ranks - 1) / ranks * 2**exponent / seconds / 1e9
        rows.append([f"2^{exponent}", f"{seconds * 1e6:.0f}", f"{bus:.1f}"])
    return f"{ranks} ranks.\n\n" + markdown(["bytes", "us", "GB/s per GPU"], rows)


def gpu_tests(machine: Machine) -> str:
    """The tests that need a GPU."""
    said = shell(sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests", seconds=240)
    return f"```\n{said.strip()[-2000:]}\n```"


RUN_BOOK = """
import sys, nbformat
from nbclient import NotebookClient
book = nbformat.read(sys.argv[1], 4)
where = {"metadata": {"path": "notebooks"}}
NotebookClient(book, timeout=100, resources=where, allow_errors=True).execute()
cells = [cell for cell in book.cells if cell.cell_type == "code"]
for number, cell in enumerate(book.cells):
    for output in cell.get("outputs", []):
        lesson = "raises-exception" in cell.metadata.get("tags", [])
        if output["output_type"] == "error" and not lesson:
            print(f"[{number}] {output['ename']}: {output['evalue'][:160]!r}")
print(f"{len(cells)} cells")
"""


def notebooks(machine: Machine, left: Callable[[], float]) -> str:
    """Every notebook as it is, and once more with all ranks on the first card."""

    def run(path: Path, device: str) -> list:
        if left() < 20:
            return [path.stem, device or "unset", "no time was left"]
        chosen = {"MGPU_DEVICE": device} if device else {}
        words = [sys.executable, "-c", RUN_BOOK, str(path)]
        said = shell(*words, seconds=min(100, left()), **chosen)
        told = re.sub(r"\s*\n\s*", "; ", said.strip())
        return [path.stem, device or "unset", told[-400:].replace("|", "/")]

    books = sorted(ROOT.glob("notebooks/[0-9][0-9]_*.ipynb"))
    tasks = [(path, device) for device in ("", "cuda:0") for path in books]
    chosen = tasks if machine.is_gpu else tasks[:1]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as several:
        rows = list(several.map(lambda task: run(*task), chosen))
    return markdown(["notebook", "MGPU_DEVICE", "cells, and errors that are no lesson"], rows)


def benchmarks(machine: Machine) -> str:
    """The comparison of ways to train, on the cards that are here."""
    if not machine.is_gpu:
        return "Only on a GPU."
    said = shell(sys.executable, "benchmarks/comparison.py", seconds=120)
    return f"```\n{said.strip()[-4000:]}\n```"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--rehearse", action="store_true", help="in small, on a CPU")
    given = parser.parse_args()
    if not given.rehearse and not torch.cuda.is_available():
        sys.exit("PyTorch sees no GPU here. --rehearse does all of it in small on a CPU.")
    end = time.monotonic() + 60 * given.minutes
    machine = Machine(given.rehearse)
    folder = ROOT / ("build/gpu" if given.rehearse else "benchmarks/gpu")
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / f"{re.sub(r'[^A-Za-z0-9]+', '_', machine.name).strip('_')}.md"
    trace = page.with_suffix(".trace.json.gz")
    left = lambda: end - time.monotonic()  # noqa: E731
    sections: dict[str, Callable[[], str]] = {
        "The machine": lambda: about(machine),
        "The roof": lambda: roofline(machine),
        "Links": lambda: links(machine),
        "Memory over a step": lambda: memory(machine),
        "One step with its streams": lambda: step_trace(machine, trace),
        "Tests": lambda: gpu_tests(machine),
        "Benchmarks": lambda: benchmarks(machine),
        "Notebooks": lambda: notebooks(machine, left),
    }
    page.write_text(f"# {machine.name}\n", "utf-8")
    for title, section in sections.items():
        begin = time.monotonic()
        try:
            text = section() if left() > 0 else "No time was left."
        except Exception:
            text = f"It failed:\n\n```\n{traceback.format_exc(limit=-2).strip()}\n```"
        print(f"{title}: {time.monotonic() - begin:.0f} s", flush=True)
        with page.open("a", encoding="utf-8") as written:  # whole sections, whatever ends us
            written.write(f"\n## {title}\n\n{text}\n")
    print(f"The report: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

"""Apparatus: the times of two runs of section 3, and who computes when."""

from mgpu_tutorial.lab.record.report import Report


def print_times(**runs: Report) -> None:
    """Print the seconds of the slower rank in two runs, and how long each rank computes."""
    for name, run in runs.items():
        seconds = sorted(bar.end - bar.begin for bar in _computing(run))
        print(f"{name}: {max(run.results):.2f} s in all,", end=" ")
        print("computing", " and ".join(f"{s:.2f} s" for s in seconds))
    first, second = runs.values()
    print(f"{max(first.results) / max(second.results):.1f} times as fast")


def compute_at_once(run: Report) -> bool:
    """True where rank 0 begins to compute before rank 1 has ended."""
    zero, one = _computing(run)
    return zero.begin < one.end


def _computing(run: Report) -> list:
    """The spans of computation, by rank."""
    found = [event for event in run.events if event.note == "compute"]
    return sorted(found, key=lambda event: event.rank)

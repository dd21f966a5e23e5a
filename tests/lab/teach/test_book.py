"""The file is in order by subject, and no line of the reader's is lost on the way."""

from collections import Counter

from mgpu_tutorial.lab.teach import subjects
from mgpu_tutorial.lab.teach.book import Library

EARLIER = f'''{subjects.EARLIER}

import torch


def by_hand(x):
    return x  # please stay


# shared: borrowed: size_of
def size_of(group):
    return 1


# point_to_point: swap
def swap(mine, peer):
    return mine


# TODO: tell the others


def tells(x):
    """Written below swap."""
    return x


# data_partitioning: global_batches
# as on the board
def global_batches(rank):
    return [rank]


# tensor_parallel: Shard; borrowed: Group
Group = int


class Shard:
    group: Group = size_of(None)


LARGE = [Shard]


# language_model: take_step; borrowed: WIDTH, DEPTH
WIDTH = 64


DEPTH = 2


def take_step(job):
    return swap(WIDTH, DEPTH)
# the end
'''
SECTIONS = """\
# ---- Data ----------------------------------------------------------------------------
# built in 05_data_partitioning: global_batches


# as on the board
def global_batches(rank):
    return [rank]


# ---- Tensor parallel -----------------------------------------------------------------
# built in 19_tensor_parallel: Shard
# borrowed from shared: size_of
# borrowed from 19_tensor_parallel: Group


def size_of(group):
    return 1


Group = int


class Shard:
    group: Group = size_of(None)


LARGE = [Shard]


# ---- Messages and collectives --------------------------------------------------------
# built in 01_point_to_point: swap


def swap(mine, peer):
    return mine


# TODO: tell the others


def tells(x):
    \"\"\"Written below swap.\"\"\"
    return x


# ---- Course only ---------------------------------------------------------------------
# Parts of the notebooks' own jobs. They are not in `__all__`.
# built in 26_language_model: take_step
# borrowed from 26_language_model: WIDTH, DEPTH

WIDTH = 64
DEPTH = 2


def take_step(job):
    return swap(WIDTH, DEPTH)
# the end
"""


def test_a_file_of_an_earlier_version_is_put_in_order_by_subject():
    text = str(Library(EARLIER))
    assert SECTIONS in text
    assert text.index("def by_hand") < text.index("# ---- Data")


def test_all_has_what_was_built_for_a_job_elsewhere():
    assert '\n__all__ = ["global_batches", "Shard", "swap"]\n' in str(Library(EARLIER))


def test_a_file_in_order_stays_as_it_is():
    text = str(Library(EARLIER))
    assert str(Library(text)) == text


def test_no_line_of_the_reader_is_lost():
    old = EARLIER.split("\n", 1)[1].split("\n")  # the head was ours
    headers = {line for line in old if ": " in line and line[0] == "#" and "TODO" not in line}
    lost = Counter(line for line in old if line and line not in headers)
    assert not lost - Counter(str(Library(EARLIER)).split("\n"))


def test_what_is_derived_stands_below_what_must_be_there_before():
    late = "# experts: Base\nclass Base:\n    pass\n\n\n"
    early = "# data_partitioning: Batches\nclass Batches(Base):\n    pass\n"
    found = str(Library(late + early))
    assert found.index("class Base:") < found.index("class Batches")
    exec(found, {})


def test_a_head_and_a_list_of_the_reader_stay():
    text = '"""My own."""\n\n__all__ = ["swap", "tells"]\n\n\n' + EARLIER.split("\n", 1)[1]
    found = str(Library(text))
    assert found.startswith('"""My own."""\n') and subjects.HEAD not in found
    assert '__all__ = ["global_batches", "Shard", "swap", "tells"]' in found


def test_an_all_that_is_more_than_a_list_is_the_reader_s():
    own = "__all__ = [*globals()]"
    found = str(Library(f"{EARLIER}\n\n{own}\n"))
    assert found.count("__all__ = ") == 1 and own in found


def test_only_what_no_build_brought_may_be_used_by_nobody():
    book = Library(EARLIER.replace("Group = size_of(None)", "int = 0"))
    assert book.prune() == ["size_of", "Group"]
    assert book.holder("tells") and book.holder("swap")


def test_the_head_promises_the_torch_that_the_project_promises():
    from tests.test_builds import ROOT

    assert f'"torch>={subjects.TORCH}.' in (ROOT / "pyproject.toml").read_text()


def test_the_licence_is_the_project_s_to_the_word():
    from tests.test_builds import ROOT

    said = " ".join(line.removeprefix("# ") for line in subjects.LICENCE)
    words = (ROOT / "LICENSE").read_text().split()
    assert " ".join(words[words.index("Permission") :]) == said[said.index("Permission") :]

"""A stretched tape is the tape of another size, and a page replays as Python does."""

import json
import shutil
import subprocess

import pytest
import torch
import torch.distributed as dist
from torch import nn

from handouts.convert import ROOM
from mgpu_tutorial.ddp_buckets.wrappers import BucketedDDP
from mgpu_tutorial.instruments.price import explore, price
from mgpu_tutorial.lab import span
from mgpu_tutorial.sharding.blocks import PrefetchingBlock, linked
from tests.instruments.price.test_tape import around, fsdp, preloaded  # noqa: F401

WIDTH = 256
pytestmark = pytest.mark.timeout(400)  # the first test of a wrapper tapes it three times


def prefetching(model):
    return linked([PrefetchingBlock(layer) for layer in model])


def train(rank, world_size, wrapper, tokens=512):
    model = wrapper(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(2):
        with span("step"):
            model(torch.randn(tokens, WIDTH)).sum().backward()
            getattr(model, "finish_gradient_synchronization", lambda: None)()
            optimizer.step()
            optimizer.zero_grad()


def others(rank, world_size):
    """A barrier, a broadcast and an exchange, a smaller group, and no tokens."""
    x, half = torch.randn(1024, WIDTH), dist.new_group([0, 1])
    dist.barrier()
    dist.broadcast(x, 0)
    dist.all_to_all_single(torch.empty_like(x), x)
    dist.all_reduce(x, group=half)


@pytest.fixture(scope="module")
def explored():
    made = {}

    def get(wrapper):
        if wrapper not in made:
            made[wrapper] = explore(price(train, 4, wrapper))
        return made[wrapper]

    return get


@pytest.mark.parametrize("wrapper", [BucketedDDP, prefetching, fsdp])
@pytest.mark.parametrize(("ranks", "tokens"), [(16, 512), (4, 4096), (8, 1024)])
def test_a_stretched_tape_is_the_tape_of_that_size(explored, wrapper, ranks, tokens):
    stretched = explored(wrapper).at(ranks=ranks, tokens=tokens)
    taped = price(train, ranks, wrapper, tokens=tokens)
    assert stretched.machine == taped.machine
    assert stretched.seconds == pytest.approx(taped.seconds)
    assert stretched.exposed == pytest.approx(taped.exposed)
    for kind, nbytes in taped.fullest().items():
        assert stretched.fullest()[kind] == pytest.approx(nbytes, rel=1e-3, abs=1024)


def test_a_slider_of_the_link_is_another_link(explored):
    found = explored(BucketedDDP).at(inside=10, latency=4)
    link = found.machine.inside
    assert link.bandwidth == 10e9 and link.latency == 4 * 2e-6
    assert found.tapes is not None and found.exposed > explored(BucketedDDP).at().exposed


@pytest.fixture(scope="module")
def replayed():
    """Seconds, and those exposed, by the script of the web pages."""

    def replay(data, settings):
        script = (ROOM / "explore.js").read_text(encoding="utf-8") + (
            f"console.log(JSON.stringify({json.dumps(settings)}.map((set) => {{"
            f"const played = priced.replay({json.dumps(data)}, set);"
            "return [played.seconds, played.exposed, priced.draw(played).length]; })))"
        )
        command = ["node", "--eval", script]
        return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)

    if not shutil.which("node"):
        pytest.skip("no node here: the pages' script is tried in a browser too")
    return replay


SETTINGS = [
    {},
    {"ranks": 2},
    {"ranks": 64, "between": 5},
    {"tokens": 8192},
    {"inside": 20, "latency": 16},
    {"ranks": 1024, "tokens": 2048, "latency": 64},
]


@pytest.mark.parametrize("wrapper", [BucketedDDP, prefetching, fsdp])
def test_the_script_of_a_page_replays_as_python_does(explored, replayed, wrapper):
    ours = [explored(wrapper).at(**values) for values in SETTINGS]
    theirs = replayed(explored(wrapper).data(), SETTINGS)
    for found, (seconds, exposed, size) in zip(ours, theirs, strict=True):
        assert seconds == pytest.approx(found.seconds, rel=1e-3)
        assert exposed == pytest.approx(found.exposed, rel=1e-3, abs=1e-3 * found.seconds)
        assert size > 1000


def test_other_collectives_in_the_script(replayed):
    found = explore(price(others, 16))
    assert list(found.sliders) == ["inside", "between", "latency"]  # a group of two is fixed
    settings = [{}, {"inside": 20, "between": 5, "latency": 16}]
    for values, (seconds, *_) in zip(settings, replayed(found.data(), settings), strict=True):
        assert seconds == pytest.approx(found.at(**values).seconds, rel=1e-3)


def test_one_gpu_has_no_links():
    found = explore(price(train, 1, nn.Sequential))
    assert list(found.sliders) == ["tokens"]
    assert len(found.stills()) == 2


def test_it_shows_itself_as_sliders_and_on_paper_as_three_stills(explored):
    shown = explored(fsdp)._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in shown
    page = shown["text/html"]
    assert page.count("<figure") == 3 and page.startswith('<div class="explore" data-tape=')
    assert shown["text/plain"].count(" x H100, not measured") == 3
    assert shown["text/html"] == explored(fsdp)._repr_mimebundle_()["text/html"]


def test_a_step_of_several_stages_is_refused():
    with pytest.raises(ValueError, match="sliders move the step of one rank, .* has 4"):
        explore(price(around, 4))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"layers": 3}, "no slider 'layers', but ranks, tokens, inside"),
        ({"ranks": 12}, "12 GPUs are no whole nodes of 8"),
        ({"ranks": 0}, "the number of GPUs must be a whole number, 1 or more"),
        ({"tokens": 0.5}, "tokens must be a whole number, 1 or more"),
        ({"inside": 0}, "bandwidth must be above 0"),
        ({"latency": -1}, "latency 0 or more"),
    ],
)
def test_sliders_do_not_go_where_nothing_is(explored, values, words):
    with pytest.raises(ValueError, match=words):
        explored(fsdp).at(**values)

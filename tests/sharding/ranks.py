"""Workers of the tests: the ranks train in many ways one after the other."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.sharding import fsdp
from mgpu_tutorial.sharding.gradients import ShardedGradients
from mgpu_tutorial.sharding.model import ShardedModel, address_of
from mgpu_tutorial.sharding.optimizer import ShardedOptimizer
from mgpu_tutorial.shared.models import SmallTransformer

VOCABULARY = 37
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
}
KINDS = {  # name: optimizer, dtype, tied, frozen
    "sgd": ("sgd", torch.float64, True, False),
    "adam": ("adam", torch.float64, True, False),
    "adam, untied": ("adam", torch.float64, False, False),
    "adam, frozen": ("adam", torch.float64, True, True),
    "sgd, float32": ("sgd", torch.float32, True, False),
}


def make(dtype=torch.float64, tied=True, frozen=False):
    """Sizes that no number of ranks divides: a norm has 5 numbers, the embedding 185."""
    torch.manual_seed(0)
    model = SmallTransformer(VOCABULARY, width=5, heads=1, depth=2, tied=tied).to(dtype)
    if frozen:
        model.position.weight.requires_grad_(False)
        model.blocks[0].mlp.up.weight.requires_grad_(False)
    return model


def batches(step, parts):
    """Every step draws twelve sequences; returns them in equal parts."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (12, 8), generator=generator).chunk(parts)


def loss_of(model, step):
    tokens = batches(step, dist.get_world_size())[dist.get_rank()]
    return loss_on(model, tokens)


def loss_on(model, tokens):
    return cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def trained(parameters):
    return [p for p in parameters if p.requires_grad]


def values(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


# One process: the reference


def by_hand(rank, world_size, parts, steps):
    """The parameters by kind after each step, the first included.

    A step takes the mean of the gradients of a batch's parts, in order.
    """
    return {kind: train_by_hand(*KINDS[kind], parts[kind], steps) for kind in parts}


def train_by_hand(name, dtype, tied, frozen, parts, steps):
    model = make(dtype, tied, frozen)
    chosen, settings = OPTIMIZERS[name]
    optimizer = chosen(trained(model.parameters()), **settings)
    after = []
    for step in range(steps):
        optimizer.zero_grad()
        for tokens in batches(step, parts):
            loss_on(model, tokens).backward()
        for p in trained(model.parameters()):
            p.grad /= parts
        optimizer.step()
        after.append(values(model))
    return after


# The ways


def average(parameters):
    gradients = [p.grad for p in trained(parameters)]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, mean in zip(gradients, parts, strict=True):
        gradient.copy_(mean.view_as(gradient))


def with_optimizer(module, chosen, settings, steps, to_owner=False):
    optimizer = ShardedOptimizer(module.parameters(), chosen, **settings)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(module, step).backward()
        if to_owner:
            optimizer.average_gradients()
        else:
            average(module.parameters())
        optimizer.step()
    return values(module)


def with_gradients(module, chosen, settings, steps, bucket_cap_mb=1.0):
    model = ShardedGradients(module, bucket_cap_mb)
    optimizer = chosen(model.shards, **settings)
    for step in range(steps):
        loss_of(model, step).backward()
        assert all(p.grad is None for p in module.parameters())
        assert sum(part.sent is not None for part in model.slices) <= 1
        model.finish_gradient_synchronization()
        optimizer.step()
        model.gather_parameters()
    return values(module)


def with_model(module, chosen, settings, steps, units="all", prefetch=True):
    named = {"all": None, "blocks": list(module.blocks), "root": [module], "none": []}
    model = ShardedModel(module, named[units], prefetch=prefetch)
    optimizer = chosen(trained(model.parameters()), **settings)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        assert sum(flat.sum is not None for flat in model.flats) <= 1
        model.finish_gradient_synchronization()
        for p in trained(model.parameters()):
            assert p.grad.shape == p.shape
        assert all(flat.full is None for flat in model.flats)
        optimizer.step()
    return model.full_parameters()


def with_fsdp(module, chosen, settings, steps):
    fsdp.block_by_block(module)
    optimizer = chosen(trained(module.parameters()), **settings)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(module, step).backward()
        optimizer.step()
    return fsdp.whole_values(module)


WAYS = {
    "optimizer": (with_optimizer, {}),
    "optimizer, to the owner": (with_optimizer, {"to_owner": True}),
    "gradients": (with_gradients, {}),
    "gradients, each alone": (with_gradients, {"bucket_cap_mb": 0}),
    "gradients, small buckets": (with_gradients, {"bucket_cap_mb": 0.001}),
    "model": (with_model, {}),
    "model, blocks": (with_model, {"units": "blocks"}),
    "model, root": (with_model, {"units": "root"}),
    "model, none": (with_model, {"units": "none"}),
    "model, no prefetch": (with_model, {"prefetch": False}),
    "fully_shard": (with_fsdp, {}),
}


PLAIN = [way for way, (_, more) in WAYS.items() if not more]


def train_in_every_way(rank, world_size, kind, after, steps):
    """How far each way is from the reference after its steps, by way as `steps`."""
    name, dtype, tied, frozen = KINDS[kind]
    found = {}
    for way, number in steps.items():
        train, more = WAYS[way]
        result = train(make(dtype, tied, frozen), *OPTIMIZERS[name], number, **more)
        reference = after[number - 1]
        assert list(result) == list(reference)
        found[way] = max((result[n] - reference[n]).abs().max().item() for n in reference)
    return found


# What stays in memory, and what is on the way


def look_into_a_sharded_model(rank, world_size):
    """Facts of one step, by name."""
    module = make()
    whole = list(module.parameters())
    facts = {"before": sum(p.nbytes for p in whole)}
    model = ShardedModel(module)
    facts["parameters outside"] = sum(p.untyped_storage().nbytes() for p in whole)
    facts["shards"] = sum(p.nbytes for p in model.parameters())
    facts["padding"] = [flat.padding for flat in model.flats]
    seen = []

    def look(block, _):
        other = model.flats_of[module.blocks[1]][0]
        seen.append((other.full is not None, other.gathering is not None))

    def look_from_the_root(embedding, _):
        flats = [model.flats_of[block][0] for block in module.blocks]
        facts["after the root"] = [flat.gathering is not None for flat in flats]

    module.token.register_forward_pre_hook(look_from_the_root)
    module.blocks[0].register_forward_pre_hook(look)
    loss_of(model, 0)
    first = seen[-1]
    loss = loss_of(model, 1)
    facts["prefetched"] = first, seen[-1]
    facts["gathered after forward"] = [flat.full is not None for flat in model.flats]
    loss.backward()
    model.finish_gradient_synchronization()
    return facts


def what_autograd_keeps(rank, world_size):
    """The addresses of gathered memory that autograd still holds after forward: none."""
    module = make()
    model = ShardedModel(module)
    gathered, kept = set(), []
    start = model._gather

    def gather(flat):
        full = start(flat)
        gathered.add(address_of(full))
        return full

    note = model._note

    def watch(tensor):
        result = note(tensor)
        if isinstance(result, torch.Tensor) and address_of(result) in model.gathered_at:
            kept.append(tuple(result.shape))
        return result

    model._gather, model._note = gather, watch
    loss_of(model, 0).backward()
    model.finish_gradient_synchronization()
    return len(gathered) > 0, kept


def train_in_bfloat16(rank, world_size):
    """The dtypes that are seen, the gathered bytes by call, and the parameters' distance."""
    module, plain = make(torch.float32), make(torch.float32)
    model = ShardedModel(module, compute_dtype=torch.bfloat16)
    seen = {}

    def look(block, inputs):
        seen["weight"] = block.mlp.up.weight.dtype
        seen["input"] = inputs[0].dtype

    module.blocks[0].register_forward_pre_hook(look)
    output = model(batches(0, world_size)[rank])
    seen["output"] = output.dtype
    loss_of(model, 0).backward()
    model.finish_gradient_synchronization()
    gradients = {p.grad.dtype for p in model.parameters()}
    loss_of(plain, 0).backward()
    average(plain.parameters())
    exact = torch.cat([p.grad.flatten() for p in plain.parameters()]).norm()
    mine = sum(p.grad.square().sum() for p in model.parameters())
    dist.all_reduce(mine)
    off = abs(mine.sqrt() / exact - 1).item()
    return seen, gradients, {p.dtype for p in model.parameters()}, off


def set_and_get(rank, world_size):
    """Whole values go in on every rank, and come out again; a wrong name is refused."""
    model = ShardedModel(make(), units=None)
    full = {name: value + rank * 0 + 1 for name, value in model.full_parameters().items()}
    model.load_full_parameters(full)
    back = model.full_parameters()
    equal = all(torch.equal(back[name], full[name]) for name in full)
    with_rest = ShardedModel(make(), units=[])
    with_rest.load_full_parameters(full)
    equal &= all(torch.equal(v, full[n]) for n, v in with_rest.full_parameters().items())
    return equal, message(lambda: model.load_full_parameters({"other": full.popitem()[1]}))


def add_up(rank, world_size):
    """Two forwards and backwards before one step: how far the gradient is from their sum."""
    plain = make()
    for step in (0, 1):
        loss_of(plain, step).backward()
    average(plain.parameters())
    expected = {name: p.grad for name, p in plain.named_parameters()}
    model = ShardedModel(make(), units=[])
    sharded = ShardedModel(make())
    for each in (model, sharded):
        for step in (0, 1):
            loss_of(each, step).backward()
        each.finish_gradient_synchronization()
    with torch.no_grad():
        for p in sharded.parameters():  # the gradient in the place of the value
            p.copy_(p.grad)
    found = sharded.full_parameters()
    whole = {name: p.grad for name, p in model.module.named_parameters()}
    return [
        max((mine[n] - expected[n]).abs().max().item() for n in expected)
        for mine in (found, whole)
    ]


def compute_blocks_in_bfloat16(rank, world_size):
    """The dtypes of a block's input, weight and output, where all else stays float32."""
    module = make(torch.float32)
    model = ShardedModel(module, list(module.blocks), compute_dtype=torch.bfloat16)
    seen = []

    def look(block, inputs):
        seen.extend([inputs[0].dtype, block.mlp.up.weight.dtype])

    module.blocks[1].register_forward_pre_hook(look)
    module.blocks[1].register_forward_hook(lambda block, _, out: seen.append(out.dtype))
    loss_of(model, 0).backward()
    model.finish_gradient_synchronization()
    return seen


# The optimizer's state


def groups_of(model):
    return [
        {"params": [model.token.weight, model.position.weight], "lr": 0.02},
        {"params": [*model.blocks.parameters(), *model.norm.parameters()]},
    ]


def train_groups(rank, world_size, model_state=None, optimizer_state=None, steps=(0, 3)):
    """Two groups and a scheduler; returns the model's values and the whole state."""
    model = make()
    if model_state:
        model.load_state_dict(model_state, strict=False)
    optimizer = ShardedOptimizer(groups_of(model), torch.optim.AdamW, lr=0.01, amsgrad=True)
    if optimizer_state:
        optimizer.load_state_dict(optimizer_state)
    follow(model, optimizer, steps)
    return values(model), optimizer.state_dict(), len(optimizer.state)


def train_groups_alone(
    rank, world_size, model_state=None, optimizer_state=None, steps=(0, 3)
):
    """The same with torch's own optimizer in one process."""
    model = make()
    if model_state:
        model.load_state_dict(model_state, strict=False)
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01, amsgrad=True)
    if optimizer_state:
        optimizer.load_state_dict(optimizer_state)
    follow(model, optimizer, steps)
    return values(model), optimizer.state_dict(), len(optimizer.state)


def follow(model, optimizer, steps):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for step in range(*steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        average(model.parameters())
        optimizer.step()
        scheduler.step()


def step_with_a_closure(rank, world_size):
    """The closure's loss comes back, and gradients are on inside it."""
    weight = nn.Parameter(torch.tensor([3.0]))
    optimizer = ShardedOptimizer([weight], torch.optim.SGD, lr=0.5)

    def closure():
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return loss

    return optimizer.step(closure).item(), weight.item()


def send_in_parcels(rank, world_size):
    """A step of large, small, short and frozen parameters: their values, and the calls."""
    made = {
        "large": nn.Parameter(torch.zeros(600, 500)),
        "small": nn.Parameter(torch.zeros(3, 2)),
        "turned": nn.Parameter(torch.zeros(4, 5).T),  # its numbers do not lie in a row
        "last": nn.Parameter(torch.zeros(1)),
    }
    made["short"] = nn.Parameter(torch.zeros(7, dtype=torch.bfloat16))
    made["frozen"] = nn.Parameter(torch.zeros(2), requires_grad=False)
    optimizer = ShardedOptimizer(made.values(), torch.optim.SGD, lr=1.0)
    for number, (name, parameter) in enumerate(made.items(), 1):
        if name not in ("frozen", "last"):  # nobody used the last one
            parameter.grad = torch.full_like(parameter, number * (rank + 1.0))
    optimizer.average_gradients()
    optimizer.step()
    calls = sum(1 for _ in optimizer._parcels())
    values = {name: parameter.detach().unique().tolist() for name, parameter in made.items()}
    return values, calls


# Bad input


def message(call):
    """What a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def make_every_mistake(rank, world_size):
    """What each of them raises on this rank, by name."""
    found = {}
    for wrapper in (ShardedGradients, ShardedModel):
        name = wrapper.__name__
        deeper = SmallTransformer(VOCABULARY, width=5, heads=1, depth=2 + (rank == 1))
        found[f"{name}: other modules"] = message(lambda w=wrapper, m=deeper: w(m))
        inside = nn.Sequential(nn.Linear(2, 2), wrapper(nn.Linear(2, 2)))
        found[f"{name}: inside"] = message(lambda m=inside: ShardedModel(m))
        wrapped = wrapper(make())
        found[f"{name}: again"] = message(lambda m=wrapped: ShardedGradients(m))
        found[f"{name}: inside DDP"] = message(lambda m=wrapped: DistributedDataParallel(m))
        frozen = nn.Linear(2, 2).requires_grad_(False)
        found[f"{name}: frozen"] = message(lambda w=wrapper, m=frozen: w(m))
    found["stranger"] = message(lambda: ShardedModel(make(), units=[nn.Linear(2, 2)]))
    module = make()
    units = [module] if rank == 1 else None
    found["other units"] = message(lambda: ShardedModel(module, units=units))
    dtype = torch.bfloat16 if rank == 1 else None
    found["other dtype"] = message(lambda: ShardedModel(make(), compute_dtype=dtype))
    found["no class"] = message(
        lambda: ShardedOptimizer([nn.Parameter(torch.ones(1))], "Adam")
    )
    optimizer = ShardedOptimizer(make().parameters(), torch.optim.SGD, lr=0.1)
    other = ShardedOptimizer([nn.Parameter(torch.ones(1))], torch.optim.SGD, lr=0.1)
    state = other.state_dict()
    found["other state"] = message(lambda: optimizer.load_state_dict(state))

    model = ShardedModel(make())
    loss = loss_of(model, 0)
    loss.backward(retain_graph=True)
    found["model: backward twice"] = message(loss.backward)
    model = ShardedGradients(make())
    loss_of(model, 0).backward()
    found["gradients: backward twice"] = message(lambda: loss_of(model, 0).backward())
    model = ShardedGradients(make())
    model.module.norm.weight.data = torch.ones(5, dtype=torch.float64)
    loss_of(model, 0).backward()
    model.finish_gradient_synchronization()
    found["gradients: replaced"] = message(model.gather_parameters)
    model = ShardedModel(make())
    model.module.norm.weight = nn.Parameter(torch.ones(5, dtype=torch.float64))
    found["model: replaced"] = message(lambda: loss_of(model, 0))
    model = ShardedModel(make())

    def change(norm, _):
        with torch.no_grad():
            norm.weight.zero_()

    model.module.norm.register_forward_pre_hook(change)
    found["model: changed in training"] = message(lambda: loss_of(model, 0))
    with torch.no_grad():
        found["model: changed"] = message(lambda: loss_of(model, 0))
    return found


def run_all(rank, world_size, workers):
    """Several workers in the same ranks: their results by name."""
    return {
        name: worker(rank, world_size, *args) for name, (worker, *args) in workers.items()
    }

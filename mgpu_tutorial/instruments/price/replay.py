"""How long taped ranks take on a machine: a clock for each stream, and one for each link.

A kernel takes its stream's clock on. A call begins when every rank that was taped has made
it and its link is free, and meanwhile its stream runs on; a wait stands still until the call
is over. Ranks that were not taped do what those do that were.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mgpu_tutorial.instruments.price.machine import Machine, call_seconds, operation_seconds
from mgpu_tutorial.instruments.price.tape import Call, Event, Operation, Wait

DIRECTIONS = {"send": "o", "isend": "o", "recv": "i", "irecv": "i"}  # else both


@dataclass
class Played:
    """One rank on a machine: when each of its events began and was over, in seconds."""

    rank: int
    events: Sequence[Event]
    begins: list[float] = field(default_factory=list)
    ends: dict[int, float] = field(default_factory=dict)  # by the event's position
    clocks: Counter = field(default_factory=Counter)  # by stream
    links: Counter = field(default_factory=Counter)  # until when each is taken
    made: Counter = field(default_factory=Counter)  # how many calls of each kind

    @property
    def seconds(self) -> float:
        """Until all streams and all calls are over."""
        return max([0.0, *self.clocks.values(), *self.ends.values()])

    @property
    def computing(self) -> float:
        """The seconds of the kernels of the usual stream."""
        return sum(
            self.ends[position] - self.begins[position]
            for position, event in enumerate(self.events)
            if isinstance(event, Operation) and event.stream == 0
        )

    @property
    def exposed(self) -> float:
        """The seconds in which that stream stands still, for messages or other ranks."""
        return self.seconds - self.computing

    def play(self, machine: Machine, calls: dict) -> bool:
        """Go on to a wait whose call cannot begin yet; whether there was anything to do."""
        first = len(self.begins)
        for position in range(first, len(self.events)):
            event = self.events[position]
            now = self.clocks[event.stream]
            if isinstance(event, Wait):
                if event.of >= 0 and event.of not in self.ends:
                    break
                self.clocks[event.stream] = max(now, self.ends.get(event.of, 0.0))
            elif isinstance(event, Operation):
                self.clocks[event.stream] += operation_seconds(event, machine)
            if isinstance(event, Call):
                calls[self.name_of(event)].append((self, position, now))
            else:
                self.ends[position] = self.clocks[event.stream]
            self.begins.append(now)
        return len(self.begins) > first

    def name_of(self, call: Call) -> tuple:
        """The same for all who take part: the members, and how many they made before."""
        direction = DIRECTIONS.get(call.name)
        members: tuple = call.group or (self.rank,)
        if direction:
            ends = (self.rank, call.peer) if direction == "o" else (call.peer, self.rank)
            members = ("p2p", *ends, call.tag)
        self.made[members, direction] += 1
        return members, self.made[members, direction]


def replay(tapes: Mapping[int, Sequence[Event]], machine: Machine) -> dict[int, Played]:
    """Play the events of each taped rank on a machine.

    Raises ValueError where ranks wait for calls that others never make.
    """
    players = {rank: Played(rank, events) for rank, events in tapes.items()}
    calls: dict[tuple, list] = defaultdict(list)
    moved = [True]
    while any(moved):
        moved = [player.play(machine, calls) for player in players.values()]
        for name, posts in list(calls.items()):
            members, _ = name
            ranks = members[1:3] if members[0] == "p2p" else members
            if len(posts) == len(players.keys() & set(ranks)):
                _carry(posts, ranks, machine)
                del calls[name]
    for player in players.values():
        if len(player.begins) < len(player.events):
            call = player.events[player.events[len(player.begins)].of]
            of = f" with rank {call.peer}" if call.peer is not None else ""
            raise ValueError(
                f"rank {player.rank} waits for a {call.name}{of} that never ends: "
                "another rank does not make the call, or waits itself"
            )
    return players


def _carry(posts: list[tuple[Played, int, float]], ranks: tuple, machine: Machine) -> None:
    """One message or collective, whose ranks are all there: it takes its link of each."""
    link = "between" if machine.nodes(ranks) > 1 else "inside"
    taken = [
        (player, (link, direction))
        for player, position, _ in posts
        for direction in DIRECTIONS.get(player.events[position].name, "io")
    ]
    begin = max(now for *_, now in posts)
    begin = max([begin, *(player.links[which] for player, which in taken)])
    player, position, _ = max(posts, key=lambda post: post[0].events[post[1]].nbytes)
    end = begin + call_seconds(player.events[position], player.rank, machine)
    for player, which in taken:
        player.links[which] = end
    for player, position, _ in posts:
        player.begins[position] = begin
        player.ends[position] = end

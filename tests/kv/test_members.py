"""Ranks that tell each other what they know come to know the same, whatever the network does."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from random import Random

import pytest

from kvtool.kv.membership import Members
from kvtool.kv.placement import Member, Placement
from kvtool.kv.steps import Changed, Hung, Ping, Publish, Retire, Seek, SendView
from kvtool.kv.view import RAMP_STEPS, Entry, Standing, Status, View


def entry(
    number: int, incarnation: int = 1, status=Status.LIVE, step: int = 0, record: bytes = b"", place="a"
) -> Entry:
    return Entry(f"p/{number}", Standing(incarnation, status, step), place, record)


def three(number: int, place: str = "a") -> Members:
    """Rank `number` of three, linked with both others."""
    members = Members(f"p/{number}", [entry(n, place=place if n == number else "a") for n in range(3)], 0, 0.0)
    for other in {0, 1, 2} - {number}:
        members.linked(f"p/{other}", 0.0)
    members.take_actions()
    return members


def standing(members: Members, number: int) -> Standing:
    return members.view[f"p/{number}"].standing


def of(kind: type, actions: list) -> list:
    return [action for action in actions if isinstance(action, kind)]


# The lattice


def test_views_merge_to_the_same_in_any_order_and_later_standings_win():
    told = [
        entry(0), entry(0, status=Status.DEAD), entry(0, 2, Status.JOINING, 3), entry(0, 2, Status.JOINING, 1),
        entry(1, status=Status.DRAINING), entry(1, record=b"x"),
    ]  # fmt: skip
    views = []
    for order in permutations(told):
        view = View()
        for one in order:
            view.merge([one])
            view.merge([one])
        views.append(view)
    assert {view.epoch for view in views} == {views[0].epoch}
    assert views[0].entries == [entry(0, 2, Status.JOINING, 3), entry(1, status=Status.DRAINING)]


def test_the_epoch_grows_with_every_change_and_differs_between_views():
    rng, seen = Random(1), {}
    for _ in range(300):
        view = View(base=77)
        for _ in range(12):
            before = view.epoch
            some = entry(rng.randrange(4), rng.randrange(1, 4), rng.choice(list(Status)), rng.randrange(RAMP_STEPS))
            learnt = bool(view.merge([some]))
            assert (view.epoch > before) == learnt, "it grows exactly when something is learnt"
            known = tuple(view.entries)
            assert seen.setdefault(view.epoch, known) == known, "no two views share an epoch"
    assert View([entry(0)], base=78).epoch > View([entry(0)], base=77).epoch < 2**64


def test_survivors_who_know_of_different_deaths_do_not_share_an_epoch():
    first, second = three(0), three(1)
    first.ended("p/2", 1, "killed", 1.0)
    second.ended("p/0", 1, "killed", 1.0)
    assert first.epoch != second.epoch and first.epoch >> 32 == second.epoch >> 32, "as many deaths, another epoch"


# One rank


def test_a_death_is_told_to_all_and_written_down_by_the_lowest():
    for number in (0, 1):
        members = three(number)
        before = members.epoch
        members.ended("p/2", 1, "its process has ended", 1.0)
        actions = members.take_actions()
        assert members.epoch > before and standing(members, 2).status is Status.DEAD
        assert {action.to for action in of(SendView, actions)} == {"p/0", "p/1", "p/2"} - {f"p/{number}"}
        assert [action.how for action in of(Changed, actions)] == ["its process has ended"]
        assert len(of(Publish, actions)) == (number == 0)
        members.ended("p/2", 1, "again", 2.0)
        assert members.take_actions() == [], "nobody dies twice"


def test_the_end_of_an_earlier_incarnation_is_old_news():
    members = three(0)
    members.ended("p/2", 1, "killed", 1.0)
    assert members.asked_to_join(entry(2, 2, Status.JOINING), 2.0) == ""
    members.take_actions()
    members.ended("p/2", 1, "MPI reported its failure", 3.0)
    assert standing(members, 2) == (2, Status.JOINING, 0) and members.take_actions() == []


def test_a_hung_rank_is_known_in_less_than_five_seconds_and_is_not_dead():
    members, now_s, hung_at_s = three(0), 0.0, None
    while hung_at_s is None and now_s < 10:
        now_s += 0.2
        members.heard("p/1", members.epoch, now_s)
        members.tick(now_s)
        if Hung("p/2", True) in members.take_actions():
            hung_at_s = now_s
    assert hung_at_s is not None and hung_at_s < 4.0
    assert members.hung(now_s) == ["p/2"] and standing(members, 2).status is Status.LIVE
    members.heard("p/2", members.epoch, now_s)
    assert Hung("p/2", False) in members.take_actions() and members.hung(now_s) == []


def test_the_next_rank_writes_the_state_file_while_the_lowest_hangs():
    members = three(1)
    assert not members.publishes
    members.heard("p/2", members.epoch, 3.5)
    members.tick(3.5)
    actions = members.take_actions()
    assert Hung("p/0", True) in actions and Publish() in actions and members.publishes
    members.heard("p/0", members.epoch, 4.0)
    assert not members.publishes


def test_only_who_has_ended_can_be_replaced_and_only_by_a_later_incarnation():
    members = three(0)
    assert "serves as incarnation 1" in members.asked_to_join(entry(2, 2), 1.0)
    members.ended("p/2", 1, "killed", 1.0)
    assert "wanted a later one" in members.asked_to_join(entry(2, 1), 1.0)
    members.take_actions()
    assert members.asked_to_join(entry(2, 2, Status.JOINING), 1.0) == ""
    assert {action.to for action in of(SendView, members.take_actions())} == {"p/1", "p/2"}
    assert members.asked_to_join(entry(3), 1.0) == "", "a new rank is welcome"
    members.tick(1.0)
    assert entry(3) in [action.entry for action in of(Seek, members.take_actions())]


def test_a_rank_that_was_declared_dead_goes_on_as_the_next_incarnation():
    members = three(1)
    members.received([entry(1, status=Status.DEAD)], 5.0)
    assert standing(members, 1) == (2, Status.LIVE, 0) and of(Retire, members.take_actions()) == []
    members.received([entry(1, 2, Status.DEAD)], 5.1)
    assert standing(members, 1) == (2, Status.DEAD, 0), "but it does not shout"
    members.tick(5.5)
    assert standing(members, 1).status is Status.DEAD
    members.tick(6.0)
    assert standing(members, 1) == (3, Status.LIVE, 0)
    assert entry(1, 3) in [one for action in of(SendView, members.take_actions()) for one in action.entries]


def test_a_rank_that_was_declared_dead_before_it_began_goes_on_all_the_same():
    members = Members("p/1", [entry(0), entry(1, 4, Status.DEAD)], 0, 0.0)
    members.tick(1.0)
    assert standing(members, 1) == (5, Status.LIVE, 0)


@pytest.mark.parametrize("later", [entry(1, 2, Status.JOINING), entry(1, record=b"other")])
def test_a_rank_whose_place_is_taken_retires(later):
    members = three(1)
    members.received([later], 5.0)
    (retire,) = of(Retire, members.take_actions())
    assert "another process serves as p/1" in retire.why
    members.received([entry(1, 3, Status.DEAD)], 6.0)
    members.tick(9.0)
    assert standing(members, 1) == (3, Status.DEAD, 0), "and claims nothing more"


def test_a_rank_on_another_host_is_dead_after_it_could_not_be_reached_for_long():
    for place, dead in (("b", True), ("a", False)):
        members = Members("p/0", [entry(0), entry(1, place=place)], 0, 0.0)
        members.unreachable("p/1", 9.0)
        assert standing(members, 1).status is Status.LIVE
        members.unreachable("p/1", 10.5)
        assert (standing(members, 1).status is Status.DEAD) == dead, "on this host its process says whether it lives"
        members.take_actions()
        members.tick(20.0)
        assert bool(of(Seek, members.take_actions())) is True, "it is looked for all the same: the cut may heal"


def test_a_newcomer_takes_its_share_step_by_step_or_as_it_fills():
    members, weights = Members("p/1", [entry(0), entry(1, 2, Status.JOINING)], 0, 100.0), []
    now_s = 100.0
    while members.mine.standing.status is Status.JOINING:
        weights.append(members.mine.standing.weight)
        now_s = members.tick(now_s)
        assert now_s < 130.0
    assert sorted(set(weights)) == [n / 8 for n in range(1, 8)] and now_s - 100.0 <= 15.0
    assert members.mine.standing.weight == 1.0
    filling = Members("p/1", [entry(0), entry(1, 2, Status.JOINING)], 0, 0.0)
    filling.filled(0.25, 0.1)
    assert filling.mine.standing == (2, Status.JOINING, 3)
    filling.filled(0.5, 0.2)
    assert filling.mine.standing == (2, Status.LIVE, 0)


def test_a_draining_rank_takes_nothing_new_and_one_that_left_is_not_sought():
    members = three(0)
    members.drain(1.0)
    assert members.mine.standing.weight == 0.0 and members.mine.standing.serves
    members.leave(2.0)
    (retire,) = of(Retire, members.take_actions())
    assert "told to leave" in retire.why
    other = three(1)
    other.received([entry(0, status=Status.LEFT)], 3.0)
    other.link_lost("p/0", 3.0)
    other.take_actions()
    other.tick(60.0)
    assert not [action for action in of(Seek, other.take_actions()) if action.entry.number == 0]


# Many ranks on a network that drops, delays and cuts


class Net:
    """Ranks, their links, and messages on the way. A link stands unless its pair is cut; a message may be lost."""

    def __init__(self, rng: Random, places: str) -> None:
        self.rng, self.now_s, self.cut, self.mail = rng, 0.0, set(), []
        start = [entry(n, place=place, record=b"%d" % n) for n, place in enumerate(places)]
        self.members = {one.identity: Members(one.identity, start, 0, 0.0) for one in start}
        self.running = set(self.members)
        self.retired: set[str] = set()
        self.losing = True

    def pass_time(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += 0.05
            for name in self.alive():
                self.members[name].tick(self.now_s)
            for name in self.alive():
                self.do(name)
            due = [mail for mail in self.mail if mail[0] <= self.now_s]
            self.mail = [mail for mail in self.mail if mail[0] > self.now_s]
            for _, sender, to, view, epoch in due:
                if to in self.running and sender in self.running and self.joined(sender, to):
                    self.members[to].heard(sender, epoch, self.now_s)
                    if view is not None:
                        self.members[to].received(view.entries, self.now_s, sender, view.whole)

    def alive(self) -> Iterator[str]:
        return (name for name in sorted(self.members) if name in self.running)

    def joined(self, one: str, other: str) -> bool:
        return one in self.running and other in self.running and frozenset((one, other)) not in self.cut

    def do(self, name: str) -> None:
        members = self.members[name]
        for action in members.take_actions():
            if isinstance(action, (SendView, Ping)):
                if self.joined(name, action.to) and not (self.losing and self.rng.random() < 0.3):
                    view = action if isinstance(action, SendView) else None
                    self.mail.append((self.now_s + self.rng.uniform(0, 0.2), name, action.to, view, members.epoch))
            elif isinstance(action, Seek):
                self.seek(name, action)
            elif isinstance(action, Retire):
                self.running.discard(name)
                self.retired.add(name)

    def seek(self, name: str, seek: Seek) -> None:
        members, other = self.members[name], seek.entry.identity
        if other not in self.running and seek.entry.place == members.mine.place:
            members.ended(other, seek.entry.standing.incarnation, "its process has ended", self.now_s)
        elif self.joined(name, other):
            if seek.dial and seek.entry.record == self.members[other].mine.record:
                members.linked(other, self.now_s)
                self.members[other].linked(name, self.now_s)
        else:
            members.unreachable(other, self.now_s)

    def lose_links(self, one: str, other: str) -> None:
        for mine, theirs in ((one, other), (other, one)):
            if mine in self.running and theirs in self.members[mine].linked_peers:
                self.members[mine].link_lost(theirs, self.now_s)

    def kill(self, name: str) -> None:
        self.running.discard(name)
        for other in self.members:
            self.lose_links(other, name)

    def replace(self, name: str) -> None:
        """What a keeper and its replacement do: learn the view from somebody alive, and be admitted."""
        for other in self.alive():
            host = self.members[other]
            if host.view[name].standing.serves:
                continue
            incarnation = host.view[name].standing.incarnation + 1
            place = host.view[name].place
            new = Entry(name, Standing(incarnation, Status.JOINING), place, b"%s.%d" % (name.encode(), incarnation))
            assert host.asked_to_join(new, self.now_s) == ""
            self.members[name] = Members(name, host.view.entries, 0, self.now_s)
            self.running.add(name)
            return


@pytest.mark.parametrize("seed", range(60))
def test_all_who_can_reach_each_other_come_to_the_same_view(seed):
    rng = Random(seed)
    net = Net(rng, "".join(rng.choice("ab") for _ in range(rng.randrange(2, 6))))
    names = sorted(net.members)
    for _ in range(12):
        net.pass_time(rng.choice([0.1, 1.0, 4.0, 12.0]))
        one, other = rng.sample(names, 2)
        match rng.choice(["kill", "replace", "cut", "heal", "drain"]):
            case "kill" if len(net.running) > 1:
                net.kill(one)
            case "replace" if one not in net.running:
                net.replace(one)
            case "cut" if net.members[one].mine.place != net.members[other].mine.place:
                net.cut.add(frozenset((one, other)))
                net.lose_links(one, other)
            case "heal":
                net.cut.clear()
            case "drain" if one in net.running:
                net.members[one].drain(net.now_s)
    net.cut.clear()
    net.losing = False
    net.pass_time(30.0)
    views = {name: net.members[name].view for name in net.alive()}
    assert not net.retired, "nobody's place was taken"
    assert len({view.epoch for view in views.values()}) == 1
    (known, *_) = [view.entries for view in views.values()]
    for view in views.values():
        assert view.entries == known
    serving = {one.identity for one in known if one.standing.serves}
    assert serving >= net.running, "who runs serves"
    places = {net.members[name].mine.place for name in net.running}
    here = {name for name in names if net.members[name].mine.place in places}
    assert serving & here == net.running & here, "who has ended is known to be dead, at least to those beside him"
    assert serving == net.running


def test_a_newcomer_moves_few_keys_at_a_time_and_each_of_them_once():
    """The misses that its return costs at most: one for each key of its share, an eighth of them at a time."""
    rng = Random(5)
    keys = [rng.randbytes(32) for _ in range(3000)]
    owners, moved = None, []
    for step in range(RAMP_STEPS + 1):
        standing = Standing(2, Status.JOINING, step) if step < RAMP_STEPS else Standing(2, Status.LIVE)
        members = [Member(n, f"p/{n}", 1.0) for n in range(3)] + [Member(3, "p/3", standing.weight)]
        before, owners = owners, Placement(step, members).owners(keys)
        if before is None:
            assert 0 < owners.count(3) < 3000 / 4 / 8 * 2
        else:
            changed = [(was, now) for was, now in zip(before, owners, strict=True) if was != now]
            assert all(now == 3 for _, now in changed), "keys only go to the newcomer"
            moved.append(len(changed))
    assert max(moved) < 3000 / 4 / 8 * 2 and owners.count(3) > 600

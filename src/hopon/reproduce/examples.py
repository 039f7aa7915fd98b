"""Worked examples of articles and papers, pass by pass."""

from __future__ import annotations

from hopon.reproduce.claim import Claim, Found, Group, equal, near
from hopon.reproduce.play import Played, ask, crowd, play
from hopon.workload.ask import Workload

FOUR = "a Chinese article's example of four requests (5, 20, 3 and 50 tokens)"
TWO = "连续批处理如何提升大模型吞吐量？ (two slots; 2, 4 and 2 steps)"
ORCA = "Yu et al., Orca, OSDI'22"
_OUTPUTS = (5, 20, 3, 50)
_THREE = (2, 4, 2)


def _run(outputs: tuple[int, ...], policy: str, slots: int, delivery: str = "stream") -> Played:
    knobs = {"delivery": delivery} if policy == "static" else {}
    return play(crowd((1, output) for output in outputs), policy, seats=slots, capacity=4096, knobs=knobs)


def _idles(outputs: tuple[int, ...]) -> Found:
    """Passes between A's last token and the moment at which its answer is told."""
    done, told = (_run(outputs, "static", 4, delivery).ends()[0] for delivery in ("stream", "batch"))
    return equal(told - done, 45)


def _useful(outputs: tuple[int, ...], slots: int, policy: str) -> Played:
    return _run(outputs, policy, slots)


def _without_queue(outputs: tuple[int, ...]) -> Found:
    """Fewer passes than static, or only earlier answers."""
    static, continuous = _run(outputs, "static", 4, "batch"), _run(outputs, "hopon", 4)
    fewer = continuous.totals.passes < static.totals.passes
    earlier = [end == output for end, output in zip(continuous.ends(), outputs, strict=False)]
    ours = f"{continuous.totals.passes} passes against {static.totals.passes}"
    same = continuous.totals.passes == static.totals.passes and all(earlier)
    return Found(ours, fewer, same and sum(continuous.ends()) < sum(static.ends()))


def _with_queue(outputs: tuple[int, ...]) -> Found:
    """The same requests, four times over."""
    static, continuous = _run(outputs * 4, "static", 4), _run(outputs * 4, "hopon", 4)
    ratio = static.totals.passes / continuous.totals.passes
    return Found(f"{static.totals.passes} and {continuous.totals.passes} passes, x{ratio:.2f}", ratio > 1.5)


def _at_once(outputs: tuple[int, ...]) -> Found:
    ends = [int(end) for end in _run(outputs, "hopon", 4).ends()]
    return Found(", ".join(map(str, ends)), ends == [5, 20, 3, 50])


def _third(case: tuple[tuple[int, ...], str]) -> int:
    outputs, policy = case
    return int(_run(outputs, policy, 2).ends()[2])


def _newcomer(policy: str) -> Found:
    """A request for one token comes after the first pass of one for 50; when does it begin?"""
    knobs = {"delivery": "batch"} if policy == "static-impatient" else {}
    workload = Workload(name="made by hand", asks=(ask(0, 1, 50), ask(1, 1, 1, arrival=1.0)))
    admitted = play(workload, policy, seats=4, capacity=4096, knobs=knobs).records[1].admitted
    return Found(f"pass {admitted:.0f}", admitted == 50)


def _size_seven(prompts: tuple[int, int]) -> Found:
    """Two requests decode when two come with prompts: tokens of that pass."""
    first, second = prompts
    asks = (ask(0, 3, 9), ask(1, 2, 9), ask(2, first, 2, arrival=2.0), ask(3, second, 2, arrival=2.0))
    found = play(Workload(name="made by hand", asks=asks), "orca", seats=4, capacity=4096)
    [step] = [step for step in found.steps if step.start == 2.0]
    return equal(step.features.num_tokens, 7)


def _reserves(limit: int) -> Found:
    """20 slots: prompts of 3, 2 and 4 with up to 4, 6 and ``limit`` tokens; how many start in the first pass?"""
    asks = (ask(0, 3, 4), ask(1, 2, 6), ask(2, 4, 1, limit=limit), ask(3, 1, 1))
    found = play(Workload(name="made by hand", asks=asks), "orca", seats=4, capacity=20, block_size=1)
    started = sum(record.admitted == 0 for record in found.records)
    return equal(started, 2)


GROUP = Group(
    name="examples",
    title="Worked examples",
    claims=(
        Claim(
            name="four requests, static",
            source=FOUR,
            text="a static batch of 5, 20, 3 and 50 tokens takes as long as its longest member",
            published="50 passes",
            tag="hand-worked",
            given=_OUTPUTS,
            perturbed=(5, 20, 3, 49),
            check=lambda outputs: equal(_run(outputs, "static", 4).totals.passes, 50, "passes"),
        ),
        Claim(
            name="four requests, A idles",
            source=FOUR,
            text="A has its 5 tokens and waits 45 passes for its answer to be told",
            published="45",
            tag="hand-worked",
            given=_OUTPUTS,
            perturbed=(5, 20, 3, 49),
            check=_idles,
        ),
        Claim(
            name="four requests, waste",
            source=FOUR,
            text="60 % of such a batch and more can be wasted (122 of 200 slot-steps)",
            published="61 %",
            tag="hand-worked",
            given=_OUTPUTS,
            perturbed=(50, 20, 30, 50),
            check=lambda outputs: near(
                100 * (1 - (_run(outputs, "static", 4).totals.utilisation or 0)), 61, within=0.5, unit="%"
            ),
        ),
        Claim(
            name="four requests, at once",
            source=FOUR,
            text="with iteration-level scheduling each is answered when it is done",
            published="5, 20, 3, 50",
            tag="hand-worked",
            given=_OUTPUTS,
            perturbed=(5, 20, 4, 50),
            check=_at_once,
        ),
        Claim(
            name="four requests, fewer passes",
            source=FOUR,
            text="so such a batch takes fewer passes with iteration-level scheduling, as it reads",
            published="< 50",
            tag="hand-worked",
            given=_OUTPUTS,
            perturbed=(5, 20, 3, 50, 7),
            check=_without_queue,
            remark="Wrong without a queue: nobody is there to take the free rows. The four take 50 passes either way "
            "and are only answered earlier.",
        ),
        Claim(
            name="four requests, with a queue",
            source=FOUR,
            text="with a queue (the same four, four times) it does",
            published="> x1.5",
            tag="hand-worked",
            given=_OUTPUTS,
            perturbed=(50, 50, 50, 50),
            check=_with_queue,
        ),
        Claim(
            name="a newcomer waits",
            source=FOUR,
            text="a request that comes after a static batch has begun waits for its longest member (50 passes)",
            published="pass 50",
            tag="hand-worked",
            given="static-impatient",
            perturbed="hopon",
            check=_newcomer,
        ),
        Claim(
            name="two slots, static",
            source=TWO,
            text="A 2 steps, B 4, C 2 in the queue: statically C is done at 6",
            published="6",
            tag="hand-worked",
            given=(_THREE, "static"),
            perturbed=(_THREE, "hopon"),
            check=lambda case: equal(_third(case), 6),
        ),
        Claim(
            name="two slots, continuous",
            source=TWO,
            text="C takes A's place: it is done at 4",
            published="4",
            tag="hand-worked",
            given=(_THREE, "hopon"),
            perturbed=(_THREE, "static"),
            check=lambda case: equal(_third(case), 4),
        ),
        Claim(
            name="two slots, used",
            source=TWO,
            text="8 of 12 slot-steps are used statically",
            published="67 %",
            tag="hand-worked",
            given=_THREE,
            perturbed=(4, 4, 2),
            check=lambda outputs: near(
                100 * (_useful(outputs, 2, "static").totals.utilisation or 0), 100 * 8 / 12, within=0.01, unit="%"
            ),
        ),
        Claim(
            name="two slots, all used",
            source=TWO,
            text="8 of 8 slot-steps are used continuously",
            published="100 %",
            tag="hand-worked",
            given=_THREE,
            perturbed=(2, 5, 2),
            check=lambda outputs: equal(100 * (_useful(outputs, 2, "hopon").totals.utilisation or 0), 100, "%"),
        ),
        Claim(
            name="a step of size 7",
            source=ORCA,
            text="two decodes and prompts of 2 and 3 tokens are one batch of 7 for the linear layers (figure 5)",
            published="7",
            tag="hand-worked",
            given=(2, 3),
            perturbed=(2, 4),
            check=_size_seven,
        ),
        Claim(
            name="reservations",
            source=ORCA,
            text="a request starts only when its prompt and max_tokens can be reserved, and the first that cannot "
            "ends the walk: of 7, 8, 7 and 2 tokens, two start in 20 slots",
            published="2",
            tag="hand-worked",
            given=3,
            perturbed=1,
            check=_reserves,
        ),
    ),
)

"""A slow model of congestion control, written from the rules of docs/networks.md.

It shares nothing with the engine: packets are objects in dictionaries and lists, every departure is
an event of its own, and lost packets are found by looking at all that are in flight.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from typing import Any

PACKET, PAYLOAD, ACK = 1495, 1448, 47
SECOND = 10**9
LEAST_TIMEOUT = SECOND // 5
STEP, BEGIN, ARRIVAL, ACKNOWLEDGED, TIMER, DEPARTURE = range(6)
"""What happens at one time happens in this order."""


def splitmix(x: int) -> int:
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def transmission(size: int, rate: int) -> int:
    """Return the nearest whole number of nanoseconds, and the lower one from the middle."""
    return (2 * size * 8 * SECOND + rate - 1) // (2 * rate)


class Draws:
    """Number i of a stream is a hash of key and i."""

    def __init__(self, seed: int, episode: int, stream: int) -> None:
        self.key = splitmix(splitmix(splitmix(seed) ^ episode) ^ stream)
        self.count = 0

    def uniform(self) -> float:
        self.count += 1
        return (splitmix(self.key ^ splitmix(self.count - 1)) >> 11) / 2**53


class ModelLink:
    def __init__(self, rate: int, delay: int, buffer: int, loss: float, draws: Draws) -> None:
        self.rate, self.delay, self.buffer, self.loss, self.draws = rate, delay, buffer, loss, draws
        self.waiting: deque = deque()
        self.is_busy = False


class ModelFlow:
    """A sender. ``control`` is "agent", "aimd" or "cbr"; those with ``steps`` are observed."""

    def __init__(self, control: str, path: list[int], **options: Any) -> None:
        self.control, self.path = control, path
        self.steps: bool = options.get("steps", False)
        self.step_at, self.began, self.most_throughput, self.gone = -1, 0, 0.0, False
        self.start: int = options.get("start", 0)
        self.between: int = options.get("between", 0)
        self.left: float = options.get("size", math.inf)
        self.size = self.left
        self.threshold: float = options.get("threshold", options["most"])
        self.most: float = options["most"]
        self.window, self.number, self.delivered = 10.0, 0, 0
        self.in_flight: dict[int, int] = {}  # number: when it was sent
        self.srtt = self.least = self.largest = self.last_activity = self.backoff = 0
        self.recovered_at, self.last_lost = 0, -1
        self.slow_start, self.rtts = True, deque()  # (when, rtt)
        self.sent = self.acked = self.lost = 0

    def deadline(self) -> int:
        return self.last_activity + max(LEAST_TIMEOUT, 3 * self.srtt) * 2**self.backoff


class Model:
    """Links in a row; the first flows are those of the agents."""

    def __init__(self, links: list[ModelLink], flows: list[ModelFlow]) -> None:
        self.links, self.flows = links, flows
        self.now, self.count = 0, 0
        self.events: list[tuple] = []
        self.trace: list[tuple[int, str, int, int]] = []
        for i, flow in enumerate(flows):
            self.at(flow.start, BEGIN, i)
        self.ready = self.run()

    def at(self, time: int, kind: int, who: int, what: Any = None) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, kind, who, self.count, what))

    def run(self) -> list[int]:
        """Run until steps end; return whose."""
        handlers = {
            BEGIN: self.begin,
            ARRIVAL: lambda link, packet: self.enter(packet),
            ACKNOWLEDGED: self.acknowledged,
            TIMER: self.timer,
            DEPARTURE: self.departure,
        }
        ready: list[int] = []
        while True:
            if ready and self.events[0][:2] != (self.now, STEP):
                return ready
            self.now, kind, who, _, what = heapq.heappop(self.events)
            if kind != STEP:
                handlers[kind](who, what)
            elif self.flows[who].step_at == self.now:
                self.flows[who].step_at = -1
                ready.append(who)

    def begin(self, i: int, _: Any) -> None:
        flow = self.flows[i]
        if flow.control != "cbr":
            self.send_allowed(i)
            return
        self.emit(i)
        self.at(self.now + flow.between, BEGIN, i)

    def emit(self, i: int) -> None:
        flow = self.flows[i]
        self.trace.append((self.now, "sent", i, flow.number))
        flow.number += 1
        self.enter((i, flow.number - 1, 0))

    def send(self, i: int) -> None:
        flow = self.flows[i]
        flow.in_flight[flow.number] = flow.last_activity = self.now
        flow.left -= 1
        flow.sent += 1
        self.emit(i)
        self.at(flow.deadline(), TIMER, i)

    def send_allowed(self, i: int) -> None:
        flow = self.flows[i]
        while flow.left > 0 and len(flow.in_flight) + 1 <= flow.window:
            self.send(i)

    def enter(self, packet: tuple[int, int, int]) -> None:
        i, number, hop = packet
        at = self.flows[i].path[hop]
        link = self.links[at]
        if link.is_busy and len(link.waiting) >= link.buffer:
            self.trace.append((self.now, "dropped", i, number))
            return
        is_lost = link.loss > 0 and link.draws.uniform() < link.loss
        if is_lost:
            self.trace.append((self.now, "dropped", i, number))
        link.waiting.append((packet, is_lost))
        if not link.is_busy:
            self.transmit(at)

    def transmit(self, at: int) -> None:
        link = self.links[at]
        link.is_busy = True
        ends = self.now + transmission(PACKET, link.rate)
        self.at(ends, DEPARTURE, at, link.waiting.popleft())

    def departure(self, at: int, what: tuple) -> None:
        link, ((i, number, hop), is_lost) = self.links[at], what
        link.is_busy = False
        if link.waiting:
            self.transmit(at)
        flow = self.flows[i]
        if is_lost:
            return
        if hop + 1 < len(flow.path):
            self.at(self.now + link.delay, ARRIVAL, at, (i, number, hop + 1))
        elif flow.control != "cbr":
            back = sum(self.links[n].delay for n in flow.path)
            back += sum(transmission(ACK, self.links[n].rate) for n in flow.path)
            self.at(self.now + link.delay + back, ACKNOWLEDGED, i, number)

    def acknowledged(self, i: int, number: int) -> None:
        flow = self.flows[i]
        if flow.gone:
            return
        self.trace.append((self.now, "acknowledged", i, number))
        if number not in flow.in_flight:
            return
        rtt = self.now - flow.in_flight.pop(number)
        flow.srtt = rtt if flow.srtt == 0 else (7 * flow.srtt + rtt) // 8
        flow.least = min(flow.least, flow.srtt) if flow.least else flow.srtt
        flow.largest = max(flow.largest, flow.srtt)
        flow.rtts.append((self.now, rtt))
        flow.last_activity, flow.backoff = self.now, 0
        flow.delivered += 1
        flow.acked += 1
        lost = list(itertools.takewhile(lambda n: n <= number - 3, flow.in_flight))
        for n in lost:
            del flow.in_flight[n]
            flow.last_lost = n
        self.adapt(i, number, len(lost))

    def timer(self, i: int, _: Any) -> None:
        flow = self.flows[i]
        if flow.gone or not flow.in_flight or flow.deadline() != self.now:
            return
        flow.last_lost = min(flow.in_flight)
        del flow.in_flight[flow.last_lost]
        flow.backoff = min(6, flow.backoff + 1)
        self.trace.append((self.now, "timeout", i, flow.last_lost))
        self.adapt(i, -1, 1)

    def adapt(self, i: int, number: int, lost: int) -> None:
        flow = self.flows[i]
        flow.left += lost
        flow.lost += lost
        was_slow_start = flow.slow_start
        if flow.control == "agent" and flow.slow_start:
            flow.window = max(2.0, flow.window / 2) if lost else flow.window + 1
            flow.slow_start = not lost and flow.window < flow.threshold
        elif flow.control == "aimd":
            self.adapt_aimd(flow, number, lost)
        flow.window = min(flow.window, flow.most)
        if number < 0:
            self.send(i)
        if flow.delivered >= flow.size:
            flow.gone = True
            self.end_step(i, self.now)
            return
        if flow.steps and was_slow_start and not flow.slow_start:
            self.begin_step(i, flow.srtt or LEAST_TIMEOUT)
        self.send_allowed(i)
        if flow.in_flight:
            self.at(flow.deadline(), TIMER, i)

    @staticmethod
    def adapt_aimd(flow: ModelFlow, number: int, lost: int) -> None:
        if lost and flow.last_lost >= flow.recovered_at:
            flow.window = flow.threshold = max(2.0, flow.window / 2)
            flow.recovered_at, flow.slow_start = flow.number, False
        elif number >= flow.recovered_at:
            flow.window += 1 if flow.window < flow.threshold else 1 / flow.window
        if number < 0:
            flow.window = 2.0

    def begin_step(self, i: int, length: int) -> None:
        agent = self.flows[i]
        agent.sent = agent.acked = agent.lost = 0
        agent.began = self.now
        self.end_step(i, self.now + length)

    def end_step(self, i: int, time: int) -> None:
        self.flows[i].step_at = time
        self.at(time, STEP, i)

    def step(self, exponents: dict[int, float]) -> None:
        """Let agents act, by their numbers, and run on."""
        for i, exponent in sorted(exponents.items()):
            agent = self.flows[i]
            if agent.control == "agent" and not agent.gone:
                agent.window = min(agent.most, max(1.0, agent.window * math.exp2(exponent)))
            while len(agent.rtts) > 1 and agent.rtts[0][0] < self.now - 10 * SECOND:
                agent.rtts.popleft()
            least = min((rtt for _, rtt in agent.rtts), default=0)
            self.begin_step(i, 0 if agent.gone else 2 * least or LEAST_TIMEOUT)
            if not agent.gone:
                self.send_allowed(i)
        self.ready = self.run()

    def leave(self, i: int) -> None:
        """Let an agent send and hear nothing any more."""
        self.flows[i].gone, self.flows[i].left = True, 0

    def observed(self, i: int = 0) -> tuple[list[float], float, str]:
        """Return observation, reward, and which branch of the reward it was."""
        agent = self.flows[i]
        length = (self.now - agent.began) / SECOND
        throughput = agent.acked * PAYLOAD * 8 / length if length else 0.0
        agent.most_throughput = max(agent.most_throughput, throughput)
        share = throughput / agent.most_throughput if agent.most_throughput else 0.0
        spread = agent.largest - agent.least
        normalized = (agent.srtt - agent.least) / spread if spread else 0.0
        loss = min(1.0, agent.lost / max(1, agent.sent))
        gain, branch = share - loss, "simple"
        reward = gain
        if agent.srtt and not (gain < 1 and agent.srtt == agent.least):
            branch = "delayed"
            reward = gain * (agent.least / agent.srtt) * (1 - normalized)
        return [share, normalized, loss, agent.window], reward, branch
